"""Training on several processes: every layout computes what one process computes. Runs on CPUs, with gloo."""

import copy
import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file

from layout_worker import copy_unfinished
from processes import TORCHRUN, python
from whatwhere.scripts.errors import Refused, TrainingError
from whatwhere.scripts.training import distributed
from whatwhere.scripts.training import model as training_model
from whatwhere.scripts.training.distributed import check_layout
from whatwhere.scripts.training.loop import train
from whatwhere.scripts.training.model import build_config, build_model
from whatwhere.scripts.training.recipe import parse_recipe

ENCODINGS = ("rope", "pope", "cope")


def values(encoding="rope", layout=None, family="llama", **training):
    """A recipe of 20 steps as a dictionary."""
    widths = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if family == "gpt2":
        widths = {"n_embd": 32, "n_layer": 2, "n_head": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return {
        "name": "layouts",
        "data": {"source": "stdlib", "sequence_length": 64},
        "model": {"family": family, "position_encoding": encoding, **widths},
        "training": {
            "steps": 20,
            "batch_size": 8,
            "learning_rate": 3e-3,
            "warmup_steps": 2,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "log_every": 1,
            "checkpoint_every": 7,
            **training,
        },
        # 9 blocks cannot be divided evenly.
        "evaluation": {"every": 10, "blocks": 9, "final_blocks": 9},
        **({"distributed": layout} if layout else {}),
    }


def launch(folder: pathlib.Path, processes: int, cases: dict) -> None:
    """Trains the cases (name: recipe, or recipe and step to resume from) in new processes."""
    listed = {
        name: {"recipe": case[0], "resume_from": case[1]}
        if isinstance(case, tuple)
        else {"recipe": case, "resume_from": None}
        for name, case in cases.items()
    }
    (folder / "cases.json").write_text(json.dumps(listed))
    worker = pathlib.Path(__file__).parent / "layout_worker.py"
    python(*TORCHRUN, processes, worker, folder)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_training(folder, expected):
    """Losses of all steps agree to 1e-5, and so do the validation losses and the final weights."""
    for line, other in zip(lines(folder), lines(expected), strict=True):
        for name in ("loss", "gradient_norm", "validation_loss"):
            if name in other:
                assert line[name] == pytest.approx(other[name], abs=1e-5), (line["step"], name)
    weights, others = load_file(folder / "model.safetensors"), load_file(expected / "model.safetensors")
    assert weights.keys() == others.keys()
    for name in others:
        torch.testing.assert_close(weights[name], others[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs of one process, of two and of four."""
    folder = tmp_path_factory.mktemp("layouts")
    for encoding in ENCODINGS:
        train(parse_recipe(values(encoding)), folder / encoding)
    train(parse_recipe(values("cope", family="gpt2")), folder / "gpt2")
    two = {}
    for encoding in ENCODINGS:
        two[f"{encoding}-ddp"] = values(encoding)
        two[f"{encoding}-fsdp"] = values(encoding, {"dp_shard": 2})
        two[f"{encoding}-tp"] = values(encoding, {"tp": 2})
        two[f"{encoding}-accumulated"] = values(encoding, {"dp_shard": 2}, micro_batch_size=1)
        two[f"{encoding}-tp-accumulated"] = values(encoding, {"tp": 2}, micro_batch_size=2)
    options = {"chunked_loss": True, "activation_checkpointing": "selective"}
    two["gpt2-options"] = values("cope", {"dp_shard": 2}, "gpt2", **options)
    launch(folder, 2, two)
    four = {f"{encoding}-hsdp": values(encoding, {"dp_shard": 2}) for encoding in ENCODINGS}
    four["cope-fsdp-tp"] = values("cope", {"dp_shard": 2, "tp": 2}, micro_batch_size=1)
    launch(folder, 4, four)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp", "accumulated", "tp-accumulated", "hsdp"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_layouts_compute_the_same(runs, encoding, layout):
    assert_same_training(runs / f"{encoding}-{layout}", runs / encoding)


@pytest.mark.slow
def test_fsdp_with_tensor_parallelism(runs):
    assert_same_training(runs / "cope-fsdp-tp", runs / "cope")


@pytest.mark.slow
def test_options_with_fsdp(runs):
    """GPT-2's tied weights, the loss in chunks, and selective checkpointing."""
    assert_same_training(runs / "gpt2-options", runs / "gpt2")


@pytest.mark.slow
def test_checkpoints_are_resumed_on_other_layouts(runs, tmp_path):
    """1 to 2 to 4 processes and back, between all kinds of layout; and exactly on the same layout."""
    two = {
        "one-to-tp": ("pope", {"tp": 2}),
        "hsdp-to-fsdp": ("pope-hsdp", {"dp_shard": 2}),
        "fsdp-to-fsdp": ("pope-fsdp", {"dp_shard": 2}),
        "tp-to-ddp": ("pope-tp", None),
    }
    four = {"fsdp-to-hsdp": ("pope-fsdp", {"dp_shard": 2}), "ddp-to-tp": ("pope-ddp", {"dp_shard": 2, "tp": 2})}
    for processes, cases in ((2, two), (4, four)):
        for name, (source, _) in cases.items():
            copy_unfinished(runs / source, tmp_path / name)
        launch(tmp_path, processes, {name: (values("pope", layout), 14) for name, (_, layout) in cases.items()})
    copy_unfinished(runs / "pope-hsdp", tmp_path / "hsdp-to-one")
    train(parse_recipe(values("pope")), tmp_path / "hsdp-to-one", resume_from=14)
    for name in (*two, *four, "hsdp-to-one"):
        assert_same_training(tmp_path / name, runs / "pope")
    same, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "fsdp-to-fsdp", runs / "pope-fsdp")
    )
    assert all(torch.equal(same[name], before[name]) for name in before)


@pytest.mark.slow
def test_bfloat16_learns_as_float32_does(tmp_path):
    """After 200 steps: by autocast in one process, and with bfloat16 weights gathered by FSDP."""
    full = {encoding: values(encoding, steps=200, log_every=20, checkpoint_every=None) for encoding in ENCODINGS}
    half = copy.deepcopy(full)
    for encoding in ENCODINGS:
        half[encoding]["training"]["mixed_precision"] = "bf16"
        train(parse_recipe(full[encoding]), tmp_path / encoding)
    launch(tmp_path, 1, {f"{encoding}-one": half[encoding] for encoding in ENCODINGS})
    launch(
        tmp_path, 2, {f"{encoding}-fsdp": {**half[encoding], "distributed": {"dp_shard": 2}} for encoding in ENCODINGS}
    )
    for encoding in ENCODINGS:
        expected = lines(tmp_path / encoding)[-1]["validation_loss"]
        assert expected < 3.6, "nothing was learned"
        for name in ("one", "fsdp"):
            assert lines(tmp_path / f"{encoding}-{name}")[-1]["validation_loss"] == pytest.approx(expected, rel=0.01)


# --- settings


@pytest.mark.parametrize(
    ("layout", "family", "message"),
    [
        ({"dp_shard": 3}, "llama", r"dp_replicate=None, dp_shard=3 and tp=1.*number of processes, 4"),
        ({"dp_replicate": 2}, "llama", r"dp_replicate=2, dp_shard=1 and tp=1.*number of processes, 4"),
        ({"tp": 2}, "gpt2", r"distributed\.tp=2.*model\.family='gpt2' has no tensor-parallel plan"),
        ({"tp": 8}, "llama", r"distributed\.tp=8.*must divide num_attention_heads=4"),
        ({"tp": 2}, "tied", r"distributed\.tp=2.*tie_word_embeddings=True.*Allowed: False"),
        ({"cp": 2}, "llama", r"distributed\.cp=2.*position_encoding='cope'.*masks and biases"),
    ],
)
def test_layouts_that_do_not_fit(layout, family, message):
    recipe = values("cope", layout, "llama" if family == "tied" else family)
    if family == "tied":
        recipe["model"]["tie_word_embeddings"] = True
    recipe = parse_recipe(recipe)
    with pytest.raises(Refused, match=message):
        check_layout(recipe, build_config(recipe), 4)


def test_shares_of_the_batch():
    """Tensor-parallel processes have the same share."""
    recipe = parse_recipe(values("rope", {"dp_shard": 2, "tp": 2}))
    shares = [check_layout(recipe, build_config(recipe), 8, rank).data_share for rank in range(8)]
    assert shares == [(rank // 2, 4) for rank in range(8)]


# --- the loss in chunks


@pytest.mark.parametrize(("kind", "autocast"), [(True, False), (True, True), ("liger", False)])
def test_chunked_loss(kind, autocast):
    """The value and the gradients of the ordinary loss, without a tensor of tokens times vocabulary."""
    if kind == "liger":
        pytest.importorskip("liger_kernel")
    recipe = parse_recipe(values("rope", chunked_loss=kind))
    config = build_config(recipe)
    config.vocab_size = 1024
    torch.manual_seed(0)
    chunked = build_model(config, recipe.training)
    plain = build_model(config, parse_recipe(values("rope")).training)
    plain.load_state_dict(chunked.state_dict())
    ids = torch.randint(1024, (4, 64))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)
    results, largest = [], []
    for model in (plain, chunked):
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=100, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in model.named_parameters()}))
        largest.append(max(sizes))
    (expected, gradients), (value, others) = results
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, msg=name, **tolerance)
    assert largest[0] >= 4 * 63 * 1024 > largest[1]


def test_what_liger_needs(monkeypatch, tmp_path):
    recipe = values("rope", chunked_loss="liger", compile=True)
    with pytest.raises(Refused, match=r"training\.compile=True .*'layers'"):
        parse_recipe(recipe)
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"training\.chunked_loss='liger' .*whatwhere\[liger\]"):
        train(parse_recipe(values("rope", chunked_loss="liger")), tmp_path)
    monkeypatch.setattr(distributed, "runs_on", lambda device: False)
    with pytest.raises(TrainingError, match=r"training\.chunked_loss='liger' .* device='cpu'"):
        train(parse_recipe(values("rope", chunked_loss="liger")), tmp_path)


def test_layers_are_compiled_by_themselves(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    recipe = parse_recipe(values("rope", compile="layers"))
    model = build_model(build_config(recipe), recipe.training)
    assert compiled == list(training_model.decoder_layers(model))
