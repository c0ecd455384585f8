"""Fine-tuning: stock and own checkpoints, full and LoRA, new encodings, resume, refusals."""

import json
import re

import pytest
import torch

pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')

from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import whatwhere_cli as cli
from processes import TORCHRUN, python
from tiny import slow_but
from whatwhere.scripts.cards.folder import card_of_run
from whatwhere.scripts.commands import convert as convert_command
from whatwhere.scripts.commands import finetune as command
from whatwhere.scripts.commands.card import main as write_cards
from whatwhere.scripts.commands.compare import main as compare
from whatwhere.scripts.conversion.folder import convert_checkpoint
from whatwhere.scripts.data.tokenize import build_tokenizer, byte_level
from whatwhere.scripts.errors import Refused
from whatwhere.scripts.training import finetune as script

# peft 0.21 asks the model by the name that transformers has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def finetune(arguments):
    """Runs the command line; returns the results."""
    options = command.parser().parse_args(arguments)
    place = {"resume": options.resume, "resume_from": options.resume_from, "data_dir": options.data_dir}
    with card_of_run(options.output):
        return script.finetune(command.settings_of(options), options.output, **place, arguments=[])


TINY = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256}


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for split, count in (("train", 8), ("test", 3)):
        rows = [{"text": f"{split} {i}: " + "how now brown cow, " * (2 + i % 3)} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Folders of a stock GPT-2 and a stock Llama, with tokenizers."""
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **TINY))
    llama = LlamaForCausalLM(
        LlamaConfig(
            max_position_embeddings=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            **TINY,
        )
    )
    folders = {}
    for name, model in (("gpt2", gpt2), ("llama", llama)):
        folders[name] = str(tmp_path_factory.mktemp("stock") / name)
        model.save_pretrained(folders[name])
        build_tokenizer("bytes").save_pretrained(folders[name])
    return folders


@pytest.fixture
def run(data_dir, tmp_path):
    """Runs the command line on a checkpoint; returns the output folder and the results."""

    def run(checkpoint, *arguments, output="run"):
        splits = json.dumps({"train": "train.jsonl", "validation": "test.jsonl", "test": "test.jsonl"})
        fixed = ["--data", "local", "--data-dir", str(data_dir), "--splits", splits]
        fixed += ["--output", str(tmp_path / output)]
        fast = ["--steps", "4", "--batch-size", "2", "--sequence-length", "16", "--evaluation-blocks", "4"]
        return tmp_path / output, finetune([checkpoint, *fixed, *fast, "--learning-rate", "0.01", *arguments])

    return run


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(10, 20)[None]).logits


# --- what is trained and saved


@pytest.mark.parametrize(
    ("family", "encoding", "fresh"),
    [
        ("gpt2", None, set()),
        pytest.param(
            "gpt2",
            "cope",
            {f"transformer.h.{i}.attn.encodings.cope.table.weight" for i in range(2)},
            marks=pytest.mark.slow,
        ),
        ("llama", "pope", {f"model.layers.{i}.self_attn.encodings.pope.delta.weight" for i in range(2)}),
    ],
)
def test_full(run, stock, data_dir, family, encoding, fresh):
    arguments = ["--position-encoding", encoding] if encoding else []
    output, results = run(stock[family], *arguments)
    assert set(results["newly_initialised"]) == fresh
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.config.position_encoding == (encoding or "absolute")
    assert AutoTokenizer.from_pretrained(output).eos_token_id == 256
    before, *_ = convert_checkpoint(stock[family], encoding)
    after = dict(model.named_parameters())
    for name, parameter in before.named_parameters():
        assert not torch.equal(after[name], parameter), f"{name} was not trained"
    assert json.loads((output / "results.json").read_text()) == results
    assert (output / "README.md").exists()
    # held-out loss by hand
    texts = [json.loads(line)["text"] for line in (data_dir / "test.jsonl").read_text().splitlines()]
    stream = [token for text in texts for token in [*text.encode(), 256]]
    blocks = torch.tensor(stream[: 4 * 16]).view(4, 16)
    with torch.no_grad():
        loss = model.eval()(blocks, labels=blocks).loss.item()
    size = (blocks[:, 1:] < 256).sum().item()
    expected = loss * blocks[:, 1:].numel() / (size * torch.log(torch.tensor(2.0)).item())
    assert results["metrics"]["bits_per_byte"]["value"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("family", "encoding"), slow_but([("gpt2", "cope")], [("gpt2", "cope"), ("llama", "pope")]))
def test_lora_with_a_new_encoding(run, stock, family, encoding):
    output, results = run(stock[family], "--position-encoding", encoding, "--lora", "--lora-rank", "2", "--merge")
    assert results["parameters"] == AutoModelForCausalLM.from_pretrained(output).num_parameters()
    adapter = load_file(output / "adapter" / "adapter_model.safetensors")
    assert any("lora_A" in name for name in adapter)
    position = {name: tensor for name, tensor in adapter.items() if "encodings." in name and "lora" not in name}
    assert len(position) == 2, "the new parameters of both layers belong to the adapter"
    before, *_ = convert_checkpoint(stock[family], encoding)
    initial = dict(before.named_parameters())
    for name, tensor in position.items():
        assert not torch.equal(tensor, initial[name.removeprefix("base_model.model.")]), f"{name} was not trained"
    merged = AutoModelForCausalLM.from_pretrained(output)
    assert not any("lora" in name for name in merged.state_dict())
    weights = dict(merged.named_parameters())
    unchanged = "transformer.wte.weight" if family == "gpt2" else "model.embed_tokens.weight"
    assert torch.equal(weights[unchanged], initial[unchanged])

    # the adapter on its base gives the same model, loaded in the way that peft users know
    import peft

    model = peft.AutoPeftModelForCausalLM.from_pretrained(output / "adapter")
    assert model.config.position_encoding == encoding
    torch.testing.assert_close(logits(model), logits(merged), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(merged), logits(before), atol=1e-3)


def test_bfloat16_checkpoint_is_trained_in_float32(run, stock, tmp_path, capsys):
    """A step that bfloat16 cannot represent is not lost; the result has the checkpoint's dtype."""
    half = tmp_path / "half"
    LlamaForCausalLM.from_pretrained(stock["llama"]).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(half)
    output, results = run(str(half), "--position-encoding", "pope")
    assert "PoPE's fit to RoPE loses " in capsys.readouterr().err
    saved = load_file(output / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16
    (shard,) = (output / "checkpoints" / "step-00000004").glob("*.safetensors")
    trained = load_file(shard)
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    for name, weight in saved.items():
        assert torch.equal(trained[f"model.{name}"].bfloat16(), weight), name
    # The results are those of the saved weights.
    _, again = run(str(output), output="again")
    assert again["metrics_before"] == results["metrics"]


@pytest.mark.parametrize("encoding", ["cope", "fox"])
def test_new_parameters_of_a_bfloat16_checkpoint_with_lora(run, stock, tmp_path, encoding):
    half = tmp_path / "half"
    LlamaForCausalLM.from_pretrained(stock["llama"]).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(half)
    output, results = run(str(half), "--position-encoding", encoding, "--lora", "--lora-rank", "2", "--merge")
    (shard,) = (output / "checkpoints" / "step-00000004").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(shard).values()} == {torch.float32}
    # The results are those of the saved weights.
    _, again = run(str(output), output="again")
    assert again["metrics_before"] == results["metrics"]
    for folder in (output, output / "base"):
        weights = load_file(folder / "model.safetensors")
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_lora_of_our_own_checkpoint(run, stock, tmp_path, capsys):
    own, results = run(stock["llama"], "--position-encoding", "[rope, cope]", output="own")
    assert AutoModelForCausalLM.from_pretrained(own).config.position_encoding == ["rope", "cope"]
    assert (results["base_model"], results["base_folder"], results["licence"]) == (None, "llama", None)
    card = (own / "README.md").read_text(encoding="utf-8")
    assert "license" not in card.partition("\n---\n")[0]
    assert "the position encoding `rope, cope`, fine-tuned from `llama`" in card
    assert "is not stated; that of `llama` applies." in card
    output, results = run(str(own), "--lora", "--lora-rank", "2", output="lora")
    assert results["newly_initialised"] == []
    assert not (output / "base").exists()
    assert not (output / "model.safetensors").exists()
    with pytest.raises(ValueError, match=r"it is an adapter: .*--merge"):
        run(str(output), output="again")
    assert results["position_encoding"] == ["rope", "cope"]
    card = ModelCard.load(output / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", None)
    assert "A LoRA adapter of a Llama-style model" in card.text
    assert str(tmp_path) not in card.content
    # transformers loads an adapter folder by itself
    model = AutoModelForCausalLM.from_pretrained(output)
    assert not torch.allclose(logits(model), logits(AutoModelForCausalLM.from_pretrained(own)), atol=1e-3)
    compare(list(map(str, (own, output))))
    # The same for both runs, it is printed once.
    assert "encoding: rope, cope\n" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"run=.*lora' is an adapter, .* leave out --output"):
        write_cards([str(own), str(output), "--output", str(tmp_path / "cards")])
    assert not (tmp_path / "cards").exists()
    own.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"folder=.*lora' is an adapter of a model in .*own', .*--merge"):
        write_cards([str(output)])


def test_accumulation_and_activation_checkpointing_change_nothing(run, stock):
    whole, _ = run(stock["llama"], "--batch-size", "4", output="whole")
    parts, _ = run(
        stock["llama"], "--batch-size", "1", "--accumulation", "4", "--activation-checkpointing", output="parts"
    )
    weights, others = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_rope_parameters_replace_those_of_the_checkpoint(run, stock):
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    output, _ = run(stock["llama"], "--rope-parameters", json.dumps(yarn))
    config = AutoModelForCausalLM.from_pretrained(output).config
    assert (config.rope_parameters, config.max_position_embeddings) == (yarn, 64)
    adapter, _ = run(str(output), "--rope-parameters", json.dumps({**yarn, "factor": 4.0}), "--lora", output="lora")
    config = AutoModelForCausalLM.from_pretrained(adapter).config
    assert (config.rope_parameters, config.max_position_embeddings) == ({**yarn, "factor": 4.0}, 128)
    classes = LlamaForSequenceClassification(LlamaConfig.from_pretrained(stock["llama"]))
    classes.save_pretrained(output.parent / "classes")
    with pytest.raises(ValueError, match="no causal language model"):
        run(str(output.parent / "classes"), "--tokenizer", "bytes", output="other")
    with pytest.raises(ValueError, match="rope_parameters"):
        run(stock["gpt2"], "--rope-parameters", json.dumps(yarn), output="other")


def test_schedule(run, stock):
    rates = {}
    for schedule in ("cosine", "constant"):
        output, _ = run(stock["llama"], "--schedule", schedule, "--steps", "10", output=schedule)
        rates[schedule] = metrics(output)[-1]["learning_rate"]
    assert rates["constant"] == 0.01
    assert rates["cosine"] < 0.002


# --- new parameters


@pytest.mark.parametrize("adapters", [[], ["--lora", "--lora-rank", "2", "--merge"]], ids=["full", "lora"])
def test_learning_rate_of_new_parameters(run, stock, adapters):
    """The table is trained by its own rate, and all others by theirs."""
    arguments = ["--position-encoding", "cope+rope", "--schedule", "constant", "--steps", "1", *adapters]
    slow, _ = run(stock["llama"], *arguments, "--new-learning-rate", "1e-5", output="slow")
    fast, _ = run(stock["llama"], *arguments, "--new-learning-rate", "1e-2", output="fast")
    one, other = (load_file(folder / "model.safetensors") for folder in (slow, fast))
    for name, weight in one.items():
        if name.endswith("cope.table.weight"):
            # Adam's first step is the learning rate, in the direction of the gradient.
            torch.testing.assert_close(weight * 1000, other[name], rtol=1e-3, atol=1e-8)
            assert weight.abs().max() == pytest.approx(1e-5, rel=1e-2)
        else:
            torch.testing.assert_close(weight, other[name])


def test_new_parameters_are_counted_once(run, stock):
    """With adapters, peft keeps the originals of the modules that it trains in full."""
    output, results = run(stock["llama"], "--position-encoding", "cope", "--lora", "--lora-rank", "2")
    adapter = load_file(output / "adapter_model.safetensors")
    added = sum(tensor.numel() for name, tensor in adapter.items() if "lora_" in name)
    assert added < sum(map(torch.numel, adapter.values()))
    assert results["parameters"] == AutoModelForCausalLM.from_pretrained(output / "base").num_parameters() + added


def test_learning_rate_of_new_parameters_of_a_converted_folder(run, stock, tmp_path):
    """`convert`, then `finetune`, is `finetune` with another encoding."""
    folder = str(tmp_path / "converted")
    convert_command.main([stock["llama"], "--position-encoding", "cope", "--output", folder])
    card = tmp_path / "converted" / "README.md"
    card.write_text("---\nlicense: mit\nbase_model: someone/model\n---\n", encoding="utf-8")
    two, results = run(folder, "--new-learning-rate", "0.001", output="two")
    assert (results["base_model"], results["licence"]) == ("someone/model", "mit")
    card = (two / "README.md").read_text(encoding="utf-8")
    assert "base_model: someone/model" in card
    assert "| learning rate of new parameters | 0.001 |" in card
    merged, results = run(folder, "--lora", "--merge", output="merged")
    assert (results["licence"], ModelCard.load(merged / "README.md").data.license) == ("mit", "mit")
    one, _ = run(stock["llama"], "--position-encoding", "cope", "--new-learning-rate", "0.001", output="one")
    weights, others = (load_file(path / "model.safetensors") for path in (two, one))
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, msg=name)


def test_mixture(stock, tmp_path, monkeypatch):
    """Each text has its share of the training sequences."""
    for name, character in (("a", "a"), ("b", "b")):
        (tmp_path / f"{name}.txt").write_text(character * 640)
    mixture = [{"train_file": str(tmp_path / f"{name}.txt"), "weight": weight} for name, weight in (("a", 3), ("b", 1))]
    seen, loss = [], script.Finetuning.loss

    def keep(self, inputs, predictions):
        seen.extend(inputs["input_ids"][:, 0].tolist())
        return loss(self, inputs, predictions)

    monkeypatch.setattr(script.Finetuning, "loss", keep)
    arguments = [stock["llama"], "--mixture", json.dumps(mixture), "--output", str(tmp_path / "run"), "--steps", "20"]
    arguments += ["--batch-size", "2", "--sequence-length", "16", "--evaluation-blocks", "4"]
    results = finetune(arguments)
    assert seen.count(ord("a")) > 20
    assert 2 <= seen.count(ord("b")) < 20
    assert len(seen) == 40
    assert results["recipe"]["mixture"][0]["weight"] == 3
    card = (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert "a.txt (75%), b.txt (25%): a.txt: not known; b.txt: not known" in card
    arguments[arguments.index("--output") + 1] = str(tmp_path / "other")
    for text, reason in (("", "not valid: it has no text"), ("b", "too short to hold out a part")):
        (tmp_path / "b.txt").write_text(text)
        with pytest.raises(ValueError, match=rf"mixture\[1\]\.train_file=.*b\.txt' is {reason}"):
            finetune(arguments)


# --- what it reads


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """The data folder of a corpus known by name."""
    from datasets import IterableDataset

    from whatwhere.scripts.data.corpora import CORPORA

    folder = tmp_path / "data" / "pg19" / "test"
    folder.mkdir(parents=True)
    (folder / "1.txt").write_text("a held-out book " * 20)

    def books():
        for index in range(1000):
            yield {"text": f"book {index}: " + "once upon a time, " * 6}

    def read_local(self, root, split, *, streaming):
        assert streaming
        return IterableDataset.from_generator(books if split == "train" else lambda: iter([{"text": "held out " * 20}]))

    monkeypatch.setattr(type(CORPORA["pg19"]), "read_local", read_local)
    return tmp_path / "data"


def test_a_corpus_by_name_is_streamed(corpus, stock, tmp_path):
    fixed = ["--data", "pg19", "--data-dir", str(corpus), "--streaming", "--shuffle-buffer", "8"]
    sizes = ["--steps", "3", "--batch-size", "2", "--sequence-length", "16", "--evaluation-blocks", "2"]
    results = finetune([stock["llama"], *fixed, *sizes, "--output", str(tmp_path / "run")])
    assert results["data"]["splits"] == {"train": "pg19:train", "validation": "pg19:test"}
    assert len(results["base_weights_sha256"]) == 64


def test_a_mixture_reads_the_folder_of_local_data(stock, data_dir, tmp_path):
    mixture = [{"source": "local", "splits": {"train": "train.jsonl", "validation": "test.jsonl"}, "weight": 1}]
    arguments = [stock["llama"], "--mixture", json.dumps(mixture), "--data-dir", str(data_dir), "--sequence-length"]
    command.main([*arguments, "16", "--steps", "1", "--evaluation-blocks", "2", "--output", str(tmp_path / "run")])


def test_own_text_is_measured_before_and_after(stock, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("how now brown cow, " * 100)
    arguments = [stock["llama"], "--train-file", str(tmp_path / "a.txt"), "--output", str(tmp_path / "run")]
    fast = ["--steps", "4", "--batch-size", "2", "--sequence-length", "16", "--learning-rate", "0.01"]
    command.main([*arguments, *fast])
    said, heard = capsys.readouterr()
    assert "the last 5% of the document is held out" in heard
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["data"]["source"] == "local"
    card = (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    for part in ("inputs = tokenizer(", "It prints:", "| batch size per step | 2 sequences, 32 tokens |"):
        assert part in card
    assert "| learning rate | 0.01 |" in card
    before, after = (results[key]["bits_per_byte"]["value"] for key in ("metrics_before", "metrics"))
    assert after < before
    assert re.search(rf"^before, .*, validation split: loss .*, bits per byte {before:.4g}$", said, flags=re.MULTILINE)
    assert re.search(rf"^after, .*, validation split: loss .*, bits per byte {after:.4g}$", said, flags=re.MULTILINE)
    assert said.endswith(f"\nNext: whatwhere length {tmp_path / 'run'}\n")
    # that of the checkpoint itself, on the same text
    model, *_ = convert_checkpoint(stock["llama"])
    text = ("how now brown cow, " * 100)[-96:].encode()
    model.eval()
    with torch.no_grad():
        loss = model(torch.tensor([list(text[:16])]), labels=torch.tensor([list(text[:16])])).loss
    assert before == pytest.approx(loss.item() / 0.6931, rel=0.2)


# --- refusals

MIXTURE = ["--mixture", '[{"source": "stdlib", "weight": 1}]']
# Options, the option that is refused and its value, and words of the reason.
BAD = [
    # noticed when the options are read
    ("--data pg19 --splits {}", "splits", {}, "no effect with data='pg19'"),
    ("--data pg19 --text-field page", "text_field", "page", "no effect with data='pg19'"),
    ("--data pg19 --train-file a.txt", "train_file", ["a.txt"], "no effect with data='pg19'"),
    ("--data pg", "data", "pg", "allowed: stdlib, hub"),
    ("--data mixture", "mixture", None, "data='mixture' needs a list"),
    ([*MIXTURE, "--data", "stdlib"], "data", "stdlib", "with data.mixture, it must be"),
    ([*MIXTURE, "--train-file", "b"], "train_file", ["b"], "no effect"),
    (["--mixture", '[{"train_file": "a.txt"}]'], "mixture[0].weight", None, "missing"),
    ("--dataset foo", "dataset", "foo", "no effect with data='stdlib'"),
    ("--merge", "merge", True, "no effect without lora"),
    ("--shuffle-buffer 4", "shuffle_buffer", 4, "no effect without streaming"),
    ("--lora-rank 4", "lora_rank", 4, "no effect without lora"),
    ("--lora-alpha 4", "lora_alpha", 4.0, "no effect without lora"),
    ("--lora-dropout 0.5", "lora_dropout", 0.5, "no effect without lora"),
    ("--warmup-steps 4 --steps 4", "warmup_steps", 4, "it must be below steps=4"),
    ("--dp-shard 2 --lora", "dp_shard", 2, "Allowed with lora: 1"),
    ("--tokenizer bpe", "tokenizer", "bpe", "it is made by a recipe"),
    ("--tokenizer remi", "tokenizer", "remi", "it is made by a recipe"),
    # before the model is loaded
    ("--train-file no.txt", "train_file", "no.txt", "there is no such file"),
    (
        ["--mixture", '[{"source": "local", "splits": {"train": "a", "validation": "b"}, "weight": 1}]'],
        "mixture[0].splits",
        ...,
        "--data-dir",
    ),
    # with the model
    ("--position-encoding pop", "position_encoding", "pop", "'pope'"),
    (["--position-encoding", "[rope, popes]"], "position_encoding", "popes", "'pope'"),
    (["--position-encoding-parameters", '{"thta": 1}'], "thta", ..., ""),
    (["--rope-parameters", '{"rope_type": "yarm"}'], "yarm", ..., ""),
    ("--position-encoding absolute --sequence-length 64", "sequence_length", 64, "at most 32"),
    ("--tokenizer ./no/tokenizer", "tokenizer", "./no/tokenizer", "it must be"),
    ("--new-learning-rate 0.1", "new_learning_rate", 0.1, "no parameter is new"),
    ("--dp-shard 3", "dp_shard", 3, "their product must be the number of processes, 1"),
]


@pytest.mark.parametrize(("arguments", "field", "value", "reason"), BAD, ids=lambda value: str(value)[:40])
def test_bad_options(stock, tmp_path, monkeypatch, arguments, field, value, reason):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    if BAD.index((arguments, field, value, reason)) < [case[0] for case in BAD].index("--position-encoding pop"):
        monkeypatch.setattr(script, "convert_checkpoint", lambda *_: pytest.fail("the model was loaded"))
    arguments = arguments.split() if isinstance(arguments, str) else arguments
    with pytest.raises(ValueError, match=re.escape(field)) as caught:
        finetune([stock["llama"], *arguments, "--output", str(tmp_path / "run")])
    assert value in (None, ...) or f"{field}={value!r} " in str(caught.value)
    assert reason in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_folder_of_local_data_without_effect(stock, data_dir, tmp_path):
    for arguments in (["--train-file", "a.txt"], ["--data", "stdlib"]):
        with pytest.raises(ValueError, match=r"data_dir=.* has no effect"):
            command.main([stock["llama"], *arguments, "--data-dir", str(data_dir), "--output", str(tmp_path / "run")])
    with pytest.raises(ValueError, match="split='train' of corpus 'wikitext103' is not"):
        command.main(
            [stock["llama"], "--data", "wikitext103", "--data-dir", str(data_dir), "--output", str(tmp_path / "run")]
        )


@pytest.mark.parametrize("value", ["{num:3}", "{'a': 1}", "null"])
def test_what_is_not_json_is_named(value, capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["x", "--output", "y", "--position-encoding-parameters", value])
    assert re.search(rf"--position-encoding-parameters: .*{re.escape(value)}.* is not valid", capsys.readouterr().err)


def test_tokens_that_are_not_the_checkpoints_are_noticed(run, stock, tmp_path, capsys):
    content = json.loads(build_tokenizer("bytes").backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    byte_level(Tokenizer.from_str(json.dumps(content))).save_pretrained(tmp_path / "other")
    run(stock["llama"], "--tokenizer", "bytes", "--steps", "1", output="same")
    assert "warning" not in capsys.readouterr().err
    run(stock["llama"], "--tokenizer", str(tmp_path / "other"), "--steps", "1")
    heard = capsys.readouterr().err
    assert heard.count(f"other' has other tokens than the tokenizer of checkpoint={stock['llama']!r}") == 1
    assert heard.index("warning:") < heard.index("reading and tokenising the data")


def test_a_special_token_beyond_the_embedding(run, stock, tmp_path):
    """No text has it: fine-tuning, conversion and evaluation take it."""
    source, text = tmp_path / "padded", tmp_path / "text.txt"
    LlamaForCausalLM.from_pretrained(stock["llama"]).save_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(stock["llama"])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(source)
    assert len(tokenizer) == 1 + LlamaConfig.from_pretrained(source).vocab_size
    commands = {
        "finetune": ["--train-file", str(text), "--sequence-length", "24", "--steps", "1", "--batch-size", "2"],
        "convert": ["--position-encoding", "cope"],
        "length": ["--validation-file", str(text), "--windows", "8"],
    }
    # In a text, it is text.
    text.write_text("how now brown [PAD] cow, " * 60)
    for name, options in commands.items():
        cli.main([name, str(source), *options, "--output", str(tmp_path / name)])


def test_bad_checkpoints(run, tmp_path, stock, capsys):
    with pytest.raises(ValueError, match=r"checkpoint=.*config\.json' is not valid: it is a file\. Allowed: a folder"):
        run(f"{stock['llama']}/config.json")
    LlamaForCausalLM(LlamaConfig.from_pretrained(stock["llama"], vocab_size=200)).save_pretrained(tmp_path / "smaller")
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(tmp_path / "smaller")
    with pytest.raises(
        ValueError, match=r"checkpoint=.*smaller' .* has 257 tokens, the model has 200.*_embeddings\(257"
    ):
        run(str(tmp_path / "smaller"))
    LlamaForCausalLM(LlamaConfig.from_pretrained(stock["llama"])).save_pretrained(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"^checkpoint=.*weights' is not valid: it has no tokenizer\. Give .*--tok.*$"):
        run(str(tmp_path / "weights"))
    (tmp_path / "weights/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"weights' is not valid: its tokenizer cannot be read: Expecting .*\. Give"):
        run(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="no/such/folder"):
        run("./no/such/folder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty' cannot be loaded: .*model_type"):
        run(str(tmp_path / "empty"))
    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"model_type is 'bert'\. Allowed: .*'whatwhere_llama'"):
        run(str(tmp_path / "bert"))
    broken = tmp_path / "broken"
    LlamaConfig.from_pretrained(stock["llama"]).save_pretrained(broken)
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="broken' cannot be loaded"):
        run(str(broken))
    # no folder is left behind, and the command line says it in one line
    assert not (tmp_path / "run").exists()
    with pytest.raises(SystemExit) as caught:
        cli.main(["finetune", str(tmp_path / "bert"), "--output", str(tmp_path / "run")])
    assert str(caught.value.code).startswith("error: checkpoint=")


def test_options_out_of_range(tmp_path):
    """All of them are said together."""
    values = {"steps": 0, "sequence-length": 0, "learning-rate": 0.0, "shuffle-buffer": 0, "lora-dropout": 1.5}
    options = [argument for name, value in values.items() for argument in (f"--{name}", str(value))]
    with pytest.raises(Refused) as caught:
        finetune(["anything", "--output", str(tmp_path / "out"), "--schedule", "step", *options])
    for name, value in {**values, "schedule": "step"}.items():
        assert any(text.startswith(f"{name.replace('-', '_')}={value!r} ") for text in caught.value.problems), name
    assert not (tmp_path / "out").exists()


# --- several processes


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "dtype"), [(2, torch.float32), (4, torch.float32), (2, torch.bfloat16)], ids=str)
def test_sharded_fine_tuning(run, stock, data_dir, tmp_path, processes, dtype):
    """FSDP2, and two copies of it, train what one process trains; the folder loads by remote code."""
    converted = str(tmp_path / "converted")
    convert_command.main([stock["llama"], "--position-encoding", "pope", "--output", converted])
    generation = AutoModelForCausalLM.from_pretrained(converted).generation_config
    generation.update(repetition_penalty=1.3)
    generation.save_pretrained(converted)
    AutoModelForCausalLM.from_pretrained(converted).to(dtype).save_pretrained(converted)
    expected, results = run(converted, "--batch-size", "4")
    splits = json.dumps({"train": "train.jsonl", "validation": "test.jsonl", "test": "test.jsonl"})
    arguments = [converted, "--data", "local", "--data-dir", str(data_dir)]
    arguments += ["--splits", splits, "--steps", "4", "--batch-size", str(4 // processes)]
    arguments += ["--sequence-length", "16", "--evaluation-blocks", "4", "--learning-rate", "0.01", "--dp-shard", "2"]
    command = [*TORCHRUN, processes, "-m", "whatwhere", "finetune", *arguments, "--output", tmp_path / "sharded"]
    python(*command)
    metrics = json.loads((tmp_path / "sharded" / "results.json").read_text())["metrics"]
    assert metrics["perplexity"]["value"] == pytest.approx(
        results["metrics"]["perplexity"]["value"], rel=1e-5 if dtype == torch.float32 else 1e-3
    )
    one, other = (
        AutoModelForCausalLM.from_pretrained(f, trust_remote_code=True) for f in (expected, tmp_path / "sharded")
    )
    assert other.dtype == one.dtype == dtype
    # Weights that are rounded the other way.
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits(other), logits(one), rtol=tolerance, atol=tolerance)
    assert other.generation_config.repetition_penalty == 1.3
    python(*command, "--resume", "auto")
