"""Fine-tuning: stock and own checkpoints, full and LoRA, new encodings, resume, refusals."""

import json
import re
import shlex
import signal

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

from processes import TORCHRUN, python
from tiny import slow_but
from whatwhere.scripts import cli
from whatwhere.scripts.cards.folder import card_of_run
from whatwhere.scripts.commands import convert as convert_command
from whatwhere.scripts.commands import finetune as command
from whatwhere.scripts.commands.card import main as write_cards
from whatwhere.scripts.commands.compare import main as compare
from whatwhere.scripts.conversion.folder import convert_checkpoint
from whatwhere.scripts.data.tokenize import build_tokenizer, byte_level
from whatwhere.scripts.errors import Interrupted, Refused, TrainingError
from whatwhere.scripts.training import finetune as script
from whatwhere.scripts.training import loop
from whatwhere.scripts.training.run_folder import RunFolder

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


def test_bfloat16_checkpoint_is_trained_in_float32(run, stock, tmp_path):
    """A step that bfloat16 cannot represent is not lost; the result has the checkpoint's dtype."""
    half = tmp_path / "half"
    LlamaForCausalLM.from_pretrained(stock["llama"]).bfloat16().save_pretrained(half)
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(half)
    output, results = run(str(half), "--position-encoding", "pope")
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
    assert "license: unknown" in card
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
    assert "| encoding" in (printed := capsys.readouterr().out)
    assert printed.count("rope, cope") == 2
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
    with pytest.raises(ValueError, match=r"new_learning_rate=0.1 is not valid: no parameter is new"):
        run(stock["llama"], "--new-learning-rate", "0.1", output="none")


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
    assert "base_model: someone/model" in (two / "README.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "pg19", "--splits", '{"train": "x"}'], "splits={'train': 'x'}"),
        (["--data", "pg19", "--text-field", "page"], "text_field='page'"),
        (["--data", "wikitext103"], "split='train' of corpus 'wikitext103' is not"),
        (["--data", "pg19", "--train-file", "a.txt"], r"train_file=\['a.txt'\]"),
        (["--train-file", "a.txt"], "data_dir=.* has no effect"),
        (["--data", "stdlib"], "data_dir=.* has no effect"),
        (["--data", "mixture"], "mixture=None is not valid: data='mixture' needs a list"),
        (["--mixture", '[{"train_file": "a.txt", "weight": 1}]', "--data", "stdlib"], "with data.mixture, it must be"),
        (["--mixture", '[{"train_file": "a.txt"}]'], r"mixture\[0\]\.weight"),
        (
            [
                "--mixture",
                '[{"source": "stdlib", "weight": 1}, {"source": "local", "splits": {"train": "no"}, "weight": 1}]',
            ],
            r"mixture\[1\]\.splits=\{'train': 'no'\}",
        ),
        (
            ["--mixture", '[{"source": "stdlib", "weight": 1}]', "--data", "pg19"],
            r"mixture=\[\{'source': 'stdlib', 'weight': 1(\.0)?\}\] .*no effect with data='pg19'",
        ),
        (["--mixture", '[{"train_file": "a.txt", "weight": 1}]', "--train-file", "b"], "train_file=.*no effect"),
    ],
)
def test_text_options_without_effect(stock, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        command.main([stock["llama"], *arguments, "--data-dir", str(tmp_path), "--output", str(tmp_path / "run")])


def test_a_mixture_reads_the_folder_of_local_data(stock, data_dir, tmp_path):
    mixture = [{"source": "local", "splits": {"train": "train.jsonl", "validation": "test.jsonl"}, "weight": 1}]
    arguments = [stock["llama"], "--mixture", json.dumps(mixture), "--data-dir", str(data_dir), "--sequence-length"]
    command.main([*arguments, "16", "--steps", "1", "--evaluation-blocks", "2", "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit):
        command.main([stock["llama"], "--mixture", "null", "--output", str(tmp_path / "null")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train-file", "no.txt"], "train_file='no.txt' is not valid: there is no such file"),
        (["--dataset", "foo"], "dataset='foo' is not valid: it has no effect with data='stdlib'"),
    ],
)
def test_errors_of_the_text_come_before_the_model(stock, tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    monkeypatch.setattr(script, "convert_checkpoint", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        finetune([stock["llama"], *arguments, "--output", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["{num:3}", "{'a': 1}"])
def test_what_is_not_json_is_named(value, capsys):
    with pytest.raises(SystemExit):
        command.parser().parse_args(["x", "--output", "y", "--position-encoding-parameters", value])
    assert f"--position-encoding-parameters: {value!r} is not valid JSON" in capsys.readouterr().err


def test_own_text_is_measured_before_and_after(stock, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("how now brown cow, " * 100)
    arguments = [stock["llama"], "--train-file", str(tmp_path / "a.txt"), "--output", str(tmp_path / "run")]
    fast = ["--steps", "4", "--batch-size", "2", "--sequence-length", "16", "--learning-rate", "0.01"]
    command.main([*arguments, *fast])
    said, heard = capsys.readouterr()
    assert "the last 5% of the document is held out" in heard
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["data"]["source"] == "local"
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


# --- resume


OF_KIND = {
    "stream": ["--streaming", "--shuffle-buffer", "4"],
    "lora": ["--lora", "--lora-rank", "2", "--lora-dropout", "0.1"],
}


@pytest.mark.parametrize("kind", slow_but(["stream"], OF_KIND))
def test_interrupted_run_resumes_exactly(run, stock, kind, monkeypatch):
    lora = kind == "lora"
    arguments = [stock["llama"], "--position-encoding", "cope", *OF_KIND[kind]]
    whole, results = run(*arguments, output="whole")
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        with pytest.raises(Interrupted, match="after step 2"):
            run(*arguments, output="parts")
    parts, resumed = run(*arguments, "--resume", output="parts")
    assert resumed["metrics"] == results["metrics"]
    assert resumed["metrics_before"] == results["metrics_before"]
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    weights, others = load_file(whole / file), load_file(parts / file)
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name
    files = (parts / "checkpoints" / "step-00000002").glob("*.safetensors")
    saved = [name for file in files for name in load_file(file)]
    assert len([name for name in saved if name.startswith("optimizer.")]) == 3 * len(weights)
    assert len([name for name in saved if name.startswith("model.")]) == len(weights), "frozen weights are not saved"


def test_the_command_after_an_interruption_continues(stock, tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("how now brown cow, " * 100)
    small = ["--steps", "3", "--batch-size", "2", "--sequence-length", "16", "--evaluation-blocks", "2"]
    begun = ["finetune", stock["llama"], "--train-file", str(tmp_path / "a.txt"), *small, "--lora"]
    cli.main([*begun, "--output", str(tmp_path / "whole")])
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        with pytest.raises(SystemExit) as caught:
            cli.main([*begun, "--output", str(tmp_path / "run")])
    assert caught.value.code == 128 + signal.SIGTERM
    command = capsys.readouterr().err.rpartition("Continue with: ")[2].strip()
    assert command == f"whatwhere finetune --output {tmp_path / 'run'} --resume"
    cli.main(shlex.split(command)[1:])
    weights, others = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("run", "whole"))
    for name, weight in weights.items():
        assert torch.equal(others[name], weight), name
    with pytest.raises(SystemExit, match="lora_rank: 16 → 2"):
        cli.main([*shlex.split(command)[1:], "auto", "--lora-rank", "2"])
    with pytest.raises(SystemExit, match="error: no CHECKPOINT is given"):
        cli.main(["finetune", "--output", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match=r"has no run to resume: it has no finetune\.json"):
        cli.main(["finetune", "--output", str(tmp_path / "new"), "--resume"])


def test_resume_refuses_a_changed_checkpoint(run, stock, tmp_path, monkeypatch):
    checkpoint = tmp_path / "checkpoint"
    model = LlamaForCausalLM.from_pretrained(stock["llama"])
    model.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(checkpoint)
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        with pytest.raises(Interrupted):
            run(str(checkpoint))
    model.config.rope_parameters["rope_theta"] = 3.0
    model.save_pretrained(checkpoint)
    with pytest.raises(TrainingError, match=r"with checkpoint=.*checkpoint', whose files have changed"):
        run(str(checkpoint), "--resume")


def test_resume_of_a_run_of_an_earlier_version(run, stock, data_dir, monkeypatch):
    """The options of distillation are no longer there: unused, they change nothing; a run with them is refused."""
    whole, _ = run(stock["llama"], output="whole")
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        with pytest.raises(Interrupted):
            run(stock["llama"])
    output = whole.with_name("run")
    record, settings = output / "finetune.json", json.loads((output / "finetune.json").read_text())
    resume = ["--output", str(output), "--resume", "--data-dir", str(data_dir)]
    record.write_text(json.dumps({**settings, "distill_from": "source", "distill": "attention"}))
    with pytest.raises(TrainingError, match=r"other settings .*: distill_from: 'source' → None"):
        finetune(resume)
    record.write_text(json.dumps({**settings, "distill_from": None, "distill": "logits"}))
    finetune(resume)
    weights, others = (load_file(folder / "model.safetensors") for folder in (output, whole))
    assert all(torch.equal(others[name], weight) for name, weight in weights.items())


def test_resume_refuses_another_batch_size(run, stock, monkeypatch):
    """`--batch-size` is for each device, so the number of processes changes it; refused before the data are read."""
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        state = {"batch_size": 8, "fingerprints": {}}
        patch.setattr(script.Finetuning, "more_state", lambda self: state)
        with pytest.raises(Interrupted):
            run(stock["llama"])
    monkeypatch.setattr(loop, "load_data", lambda *_: pytest.fail("the data were read"))
    with pytest.raises(TrainingError, match=r"with 8 sequences a step, now these are .* as before, 1\."):
        run(stock["llama"], "--resume")


def stop_in_step_2(patch):
    train_step, calls = script.TrainingRun.train_step, []

    def stopping(self, batch):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return train_step(self, batch)

    patch.setattr(script.TrainingRun, "train_step", stopping)


def test_damaged_checkpoint(run, stock, monkeypatch, tmp_path):
    """An earlier one can be chosen; nothing that could execute code is written."""
    arguments = [stock["llama"], "--save-every", "1"]
    with monkeypatch.context() as patch:
        stop_in_step_2(patch)
        with pytest.raises(Interrupted, match="after step 2"):
            run(*arguments, output="parts")
    folder = tmp_path / "parts" / "checkpoints" / "step-00000002"
    pickles = {".bin", ".pkl", ".pt", ".pth"}
    assert not [file for file in (tmp_path / "parts").rglob("*") if file.suffix in pickles]
    (folder / "run.json").write_text("{}")
    with pytest.raises(TrainingError, match="--resume-from 1"):
        run(*arguments, "--resume", output="parts")
    run(*arguments, "--resume-from", "1", output="parts")


def test_one_run_a_folder(run, stock, tmp_path):
    with RunFolder(tmp_path / "run").lock(), pytest.raises(TrainingError, match=r"is in use: process \d+ on "):
        run(stock["llama"], output="run")


def test_what_resume_refuses(run, stock):
    output, _ = run(stock["llama"])
    with pytest.raises(TrainingError, match="is not empty"):
        run(stock["llama"])
    with pytest.raises(TrainingError, match="finished run"):
        run(stock["llama"], "--resume")
    with pytest.raises(TrainingError, match="finished run"):
        run(stock["llama"], "--resume", "auto", "--resume-from", "1")
    (output / "results.json").unlink()
    with pytest.raises(TrainingError, match=r"weight_decay: 0\.0 → 0\.5"):
        run(stock["llama"], "--resume", "--weight-decay", "0.5")
    # What does not change the result may change.
    run(stock["llama"], "--resume", "--save-every", "7", "--activation-checkpointing")


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--position-encoding", "pop"], "position_encoding='pop'.*'pope'"),
        (["--position-encoding-parameters", '{"thta": 1}'], "thta"),
        (["--rope-parameters", '{"rope_type": "yarm"}'], "yarm"),
        (["--position-encoding", "absolute", "--sequence-length", "64"], "sequence_length=64.*32"),
        (["--merge"], "merge=True"),
        (["--shuffle-buffer", "4"], "shuffle_buffer=4 is not valid: it has no effect without streaming"),
        (["--lora-rank", "4"], "lora_rank=4 is not valid: it has no effect without lora"),
        (["--lora-alpha", "4"], "lora_alpha=4.0"),
        (["--lora-dropout", "0.5"], "lora_dropout=0.5"),
        (["--warmup-steps", "4"], "warmup_steps=4 is not valid: it must be below steps=4"),
        (["--position-encoding", "[rope, popes]"], "position_encoding='popes'"),
        (["--tokenizer", "./no/tokenizer"], r"^tokenizer='\./no/tokenizer' is not valid"),
        (["--tokenizer", "bpe"], "tokenizer='bpe' is not valid: it is made by a recipe"),
        (["--tokenizer", "jsb"], "tokenizer='jsb' is not valid: it is made by a recipe"),
    ],
)
def test_bad_options(run, stock, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run(stock["llama"], *arguments)


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


def test_bad_checkpoints(run, tmp_path, stock, capsys):
    with pytest.raises(ValueError, match=r"checkpoint=.*config\.json' is not valid: it is a file\. Allowed: a folder"):
        run(f"{stock['llama']}/config.json")
    LlamaForCausalLM(LlamaConfig.from_pretrained(stock["llama"], vocab_size=257)).save_pretrained(tmp_path / "smaller")
    AutoTokenizer.from_pretrained(stock["llama"]).save_pretrained(tmp_path / "smaller")
    with pytest.raises(ValueError, match=r"tokenizer=.*smaller' is not valid: it has 258 tokens"):
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp-shard", "3"], r"dp_shard=3 .* are not valid: their product must be the number of processes, 1"),
        (["--dp-shard", "2", "--lora"], r"dp_shard.*Allowed with lora: 1"),
    ],
)
def test_sharding_that_does_not_fit(run, stock, arguments, message):
    with pytest.raises(ValueError, match=message):
        run(stock["llama"], *arguments)
