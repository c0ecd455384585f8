"""FLOPs, memory and time of a recipe, and the files that start it on many GPUs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

from accelerate.commands.config.config_args import load_config_from_file

import whatwhere
from processes import TORCHRUN, python
from tiny import FAMILIES, causal_lm_class, tiny_config
from whatwhere import attention_triton
from whatwhere.scripts import cli
from whatwhere.scripts.errors import Refused
from whatwhere.scripts.training.flops import flops_per_token, peak_flops
from whatwhere.scripts.training.plan import plan
from whatwhere.scripts.training.recipe import load_recipe

LAUNCH = pathlib.Path(__file__).resolve().parents[1] / "scripts" / "launch"


def matrices(model):
    """The number of weights that a token is multiplied with."""
    embeddings = [id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    inside = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings)
    head = model.get_output_embeddings().weight
    return inside + (head.numel() if id(head) in embeddings else 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_formula(family, tied):
    config = tiny_config(family, "rope", tie_word_embeddings=tied)
    model = causal_lm_class(family)(config)
    for length in (8, 48):
        attention = 12 * config.num_hidden_layers * config.hidden_size * length
        # Older Transformers compute RoPE's angles by a matrix product.
        assert flops_per_token(config, length) == pytest.approx(6 * matrices(model) + attention, rel=1e-4)


@pytest.mark.parametrize("encoding", [name for name in whatwhere.list_position_encodings() if name != "none"])
def test_flops_of_an_encoding(encoding):
    state = torch.get_rng_state()
    plain, found = (flops_per_token(tiny_config("llama", name), 48) for name in ("none", encoding))
    assert plain <= found
    assert torch.equal(torch.get_rng_state(), state)


def test_flops_of_pope():
    """Its queries and keys are twice as wide."""
    config = tiny_config("llama", "pope")
    extra = flops_per_token(config, 48) - flops_per_token(tiny_config("llama", "none"), 48)
    assert extra == 6 * config.num_hidden_layers * config.hidden_size * 48


def test_peak_of_a_device():
    assert peak_flops("NVIDIA A100-SXM4-80GB") == peak_flops("A100") == 312e12
    assert (peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("NVIDIA H100 PCIe")) == (989e12, 756e12)
    assert peak_flops("NVIDIA RTX A4000") is None
    assert peak_flops(torch.device("cpu")) is None


def small(*changes, **data):
    """A recipe of 64 sequences."""
    settings = {"batch_size": 64, "micro_batch_size": 8, **data}
    return load_recipe("demo_rope", [*(f"training.{key}={value}" for key, value in settings.items()), *changes])


def test_parts_of_the_memory():
    whole = plan(small(), 8)
    weights = 4 * whole.parameters
    assert whole.tokens_per_step == 64 * 256
    assert (whole.rows, whole.parts) == (8, 1)
    assert whole.memory.weights == whole.memory.communication == weights
    assert whole.memory.optimiser == 2 * weights
    assert whole.memory.gradients <= weights
    one = plan(small(), 1)
    assert one.parts == 8
    assert (one.memory.gradients, one.memory.communication) == (weights, 0)
    shared = plan(small("distributed.dp_shard=4"), 8)
    assert str(shared.layout) == "dp_replicate 2, dp_shard 4, tp 1"
    assert shared.memory.weights == weights / 4
    assert shared.memory.total < whole.memory.total
    tensor = plan(small("distributed.tp=2"), 2)
    assert weights / 2 < tensor.memory.weights < 0.6 * weights
    assert tensor.memory.activations < one.memory.activations


@pytest.mark.parametrize("key", ["activation_checkpointing=true", "activation_checkpointing=selective"])
def test_checkpointing_saves_memory(key):
    memory = plan(small("model.num_hidden_layers=8")).memory
    less = plan(small("model.num_hidden_layers=8", f"training.{key}")).memory
    assert less.activations < memory.activations
    assert less.weights == memory.weights


def test_chunked_loss_saves_memory():
    large = "model.vocab_size=50000", "training.micro_batch_size=32"
    whole = plan(small(*large)).memory.logits
    for kind in ("true", "liger"):
        assert plan(small(*large, f"training.chunked_loss={kind}")).memory.logits < 0.2 * whole


@pytest.mark.parametrize("encoding", ["cope", "pope"])
def test_kernels_are_planned(encoding, monkeypatch):
    recipe = small(f"model.position_encoding={encoding}")
    planned = plan(recipe).memory.activations
    monkeypatch.setattr(attention_triton, "import_error", lambda: "not here")
    assert plan(recipe).memory.activations != planned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices=0 is not valid"),
        (["--utilisation", "1.5"], "--utilisation=1.5 is not valid: it must be above 0 and at most 1"),
        (["--device", "H10"], "--device='H10' is not known.*H100"),
        (["--device", "H100", "--device-tflops", "3"], "--device-tflops=3.0 has no effect"),
        (["--devices", "3", "--set", "distributed.dp_shard=2"], "must be the number of processes, 3"),
        (["--set", "distributed.cp=2"], "distributed.cp=2"),
        (["--set", "data.tokenizer=./no"], r"data.tokenizer='./no'.*--set model.vocab_size=50257"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        cli.main(["plan", "demo_rope", *arguments])


def test_printed_plan(capsys):
    cli.main(["plan", "llama_7b", "--devices", "64", "--device-memory", "80", "--device", "H100"])
    text = capsys.readouterr().out
    # The page has the same.
    assert text.strip() in (LAUNCH.parents[1] / "docs" / "scale.md").read_text(encoding="utf-8")
    assert "fits in 80 GB: yes" in text
    cli.main(["plan", "demo_rope", "--device-memory", "0.1"])
    text = capsys.readouterr().out
    assert "fits in 0.1 GB: no" in text
    assert "TFLOP/s" not in text


def test_tokenizer_is_not_needed_with_a_vocabulary():
    with pytest.raises(Refused, match=r"model\.vocab_size"):
        plan(small("data.tokenizer=./no"))
    assert plan(small("data.tokenizer=./no", "model.vocab_size=300")).parameters


@pytest.mark.parametrize("file", sorted(LAUNCH.glob("*.yaml")), ids=lambda file: file.stem)
def test_accelerate_reads_its_files(file):
    config = load_config_from_file(str(file))
    machines, gpus = {"1_gpu": (1, 1), "8_gpus": (1, 8), "8_nodes": (8, 8)}[file.stem]
    assert (config.num_machines, config.num_processes) == (machines, machines * gpus)
    # The recipe decides these.
    assert (config.mixed_precision, config.fsdp_config, config.parallelism_config) == ("no", {}, {})


def test_slurm_script(tmp_path):
    """With commands in place of Slurm's: starts the training, and queues the job again when it was asked to stop."""
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\nif [ "$1" = show ]; then echo node0; else echo "$@" >> requeued; fi\n'
    )
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\nexec "$@"\n')
    (tmp_path / "python").write_text('#!/bin/sh\necho "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $@"\nexit $STATUS\n')
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    slurm = {"JOB_NODELIST": "n", "JOB_ID": "7", "PROCID": "9", "LOCALID": "1", "NTASKS": "64"}
    names = {f"SLURM_{name}": value for name, value in slurm.items()}
    for status, requeued in ((0, False), (1, False), (138, True)):
        done = subprocess.run(
            ["bash", LAUNCH / "slurm.sh", "llama_7b", "--output", "runs/a b"],
            env={**os.environ, **names, "STATUS": str(status), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == (0 if requeued else status), done.stderr
        assert not list(tmp_path.glob(".stopped*"))
        assert done.stdout.strip() == "9 1 64 node0 -m whatwhere train llama_7b --output runs/a b --resume auto"
        assert (tmp_path / "requeued").exists() == requeued


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")
@pytest.mark.parametrize(("processes", "shards"), [(1, 1), (2, 1), (2, 2)], ids=["one", "ddp", "fsdp"])
def test_memory_is_that_of_training(processes, shards, tmp_path, monkeypatch):
    """On a CPU, so without kernels."""
    monkeypatch.setattr(attention_triton, "import_error", lambda: "not here")
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 2000)
    settings = {
        "data.sequence_length": 256,
        "data.tokenizer": "bytes",
        "distributed.dp_shard": shards,
        "model.vocab_size": 50257,
        "training.batch_size": 2 * processes,
        "training.micro_batch_size": 2,
        "training.mixed_precision": "'no'",
        "training.steps": 2,
        "training.warmup_steps": 1,
    }
    changes = [f"{key}={value}" for key, value in settings.items()]
    launch = [] if processes == 1 else [*TORCHRUN, processes]
    worker = [str(pathlib.Path(__file__).with_name("memory_worker.py")), "openwebtext"]
    options = [option for change in changes for option in ("--set", change)]
    places = {"MALLOC_MMAP_THRESHOLD_": "100000", "WHATWHERE_CACHE": str(tmp_path)}
    said = python(*launch, *worker, "--train-file", tmp_path / "text.txt", *options, env=places)
    found = plan(load_recipe("openwebtext", changes), processes)
    assert found.parameters > 100e6
    for measured in json.loads(said.splitlines()[-1]):
        assert found.memory.total == pytest.approx(measured, rel=0.15)
