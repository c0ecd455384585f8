"""The training loop: toy tasks, processes, accumulation, records, and what it refuses."""

import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import yaml

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import whatwhere_cli as cli
from processes import TORCHRUN, python
from runs import STREAM, assert_same_run, interrupt, kill, metrics, mixture, recipe, stop_after, write_texts
from tiny import slow_but, tiny_model
from toys import SOLVABLE, toy_recipe
from whatwhere.scripts import progress
from whatwhere.scripts.cards.folder import write_card
from whatwhere.scripts.data.tokenize import train_bpe
from whatwhere.scripts.errors import TrainingError
from whatwhere.scripts.training import data, loop, plan
from whatwhere.scripts.training.flops import flops_per_token
from whatwhere.scripts.training.loop import TrainingRun, train
from whatwhere.scripts.training.model import build_optimizer
from whatwhere.scripts.training.recipe import TrainingRecipe

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"))


# --- a whole run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    output = tmp_path_factory.mktemp("finished") / "run"
    results = train(recipe(), output, data_dir=data_dir, arguments=["tiny.yaml", "--output", "a b"])
    return output, results


def test_finished_folder(finished):
    output, results = finished
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "checkpoints"} <= names
    assert {"recipe.yaml", "metrics.jsonl", "results.json"} <= names
    assert json.loads((output / "results.json").read_text()) == results
    assert results["recipe"] == recipe().resolved()
    assert results["command"] == "whatwhere train tiny.yaml --output 'a b'"
    assert (results["steps"], results["tokens_trained"], results["seed"]) == (6, 6 * 4 * 24, 0)
    assert results["data"]["split"] == "test"
    assert {"torch", "transformers", "accelerate", "datasets"} <= set(results["versions"])
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000006"]
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output)
    tokens = tokenizer("how now", return_tensors="pt")["input_ids"]
    assert model.generate(tokens, max_new_tokens=2, do_sample=False).shape == (1, 9)


def test_metrics_file(finished):
    lines = metrics(finished[0])
    trained = [line for line in lines if "loss" in line]
    assert [line["step"] for line in trained] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in trained] == [96 * i for i in range(1, 7)]
    assert trained[-1]["loss"] < trained[0]["loss"]
    # that of the step, not of the next one: the warm-up starts at 0 and is over after one step
    assert [line["learning_rate"] for line in trained[:2]] == [0.0, 0.01]
    assert [line["step"] for line in lines if "validation_bits_per_byte" in line] == [3, 6]


def test_scores_by_hand(finished, data_dir):
    """Bits per byte of the saved model on the test split, from the logits and the bytes of the text."""
    output, results = finished
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    texts = [json.loads(line)["text"] for line in (data_dir / "test.jsonl").read_text().splitlines()]
    stream = [token for text in texts for token in [*text.encode(), 256]]
    bits, size, nats, count = 0.0, 0, 0.0, 0
    for start in range(0, len(stream) - 23, 24):
        block = torch.tensor(stream[start : start + 24])
        with torch.no_grad():
            chances = model(block[None]).logits[0].double().log_softmax(-1)
        for place in range(1, 24):
            nats -= chances[place - 1, block[place]].item()
            count += 1
            size += block[place].item() < 256
    bits = nats / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    assert results["tokens"] == count
    assert results["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits / size, rel=1e-5)
    assert results["metrics"]["perplexity"]["value"] == pytest.approx(2.718281828459045 ** (nats / count), rel=1e-5)
    assert results["metrics"]["loss"]["value"] == pytest.approx(nats / count, rel=1e-5)


def test_seed_decides_the_run(finished, data_dir, tmp_path):
    train(recipe(), tmp_path / "same", data_dir=data_dir)
    assert metrics(tmp_path / "same") == metrics(finished[0])
    train(recipe(seed=1), tmp_path / "other", data_dir=data_dir)
    assert metrics(tmp_path / "other")[0]["loss"] != metrics(finished[0])[0]["loss"]


def test_bars_on_a_terminal(tmp_path, monkeypatch):
    """That of training has the loss; libraries show none for what we generate, load and save."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    written = Terminal()
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe().resolved()))
    write_texts(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"text": "so that no copy of it is known"}\n')
    monkeypatch.setattr(sys, "stderr", written)
    cli.main(["train", str(tmp_path / "tiny.yaml"), "--data-dir", str(tmp_path), "--output", str(tmp_path / "run")])
    names = {line.partition(":")[0].strip() for line in re.split(r"[\r\n]", written.getvalue()) if "%|" in line}
    assert {"tiny"} <= names <= {name for name in names if name.startswith(("tiny", "tokenising"))}
    assert re.search(r"tiny: .*tokens/s, step \d of 6, loss \d\.\d+\]", written.getvalue())


def test_progress_in_a_log(data_dir, tmp_path, monkeypatch, capsys):
    train(recipe(), tmp_path / "quiet", data_dir=data_dir)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tiny")]
    assert said[0] == "tiny: reading and tokenising the data"
    assert re.fullmatch(r"tiny: [\d,]+ parameters, 6 steps on cpu", said[1])
    assert len(said) == 2, "a run of a second needs no lines about its progress"
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "NEXT_LINE", 0.0)
    train(recipe(), tmp_path / "slow", data_dir=data_dir)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tiny: step")]
    assert len(lines) == 6
    for step, line in enumerate(lines, 1):
        form = rf"tiny: step {step} of 6, loss \d\.\d+, [\d,]+ tokens/s, 00:0\d left"
        assert re.fullmatch(form, line), line


def test_estimate(monkeypatch):
    """With a clock that advances by a second at each call: passes and updates take one second each."""
    ticks = itertools.count()
    monkeypatch.setattr(plan, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    state = torch.get_rng_state()
    # 6 steps of 4 sequences, 2 evaluations of 3 and one of 9, at a third of the cost; 6 updates
    seconds = plan.estimate_seconds(recipe(evaluation__final_blocks=9))
    assert seconds == pytest.approx((6 * 4 + (2 * 3 + 9) / 3) / 4 + 6)
    assert torch.equal(torch.get_rng_state(), state)
    large = recipe(data__sequence_length=2048, model__hidden_size=768, model__num_hidden_layers=4)
    assert plan.estimate_seconds(large) is None or torch.accelerator.is_available()
    monkeypatch.undo()
    assert plan.estimate_seconds(recipe(training__chunked_loss=True)) > 0
    assert [progress.describe_seconds(x) for x in (40, 720, 9000, 400_000)] == ["40 s", "12 min", "2.5 h", "4.6 days"]


def test_results_of_a_mixture(data_dir, tmp_path):
    results = train(
        recipe(**mixture({"source": "stdlib"}, evaluation__final_blocks=8)), tmp_path / "run", data_dir=data_dir
    )
    about = results["data"]["described"]["train"]
    assert about["title"] == "train.jsonl (75%), source code of Python's standard library (25%)"
    assert [text["weight"] for text in results["data"]["mixture"]] == [0.75, 0.25]
    assert "train.jsonl (75%)" in write_card(tmp_path / "run").read_text()
    # 6 blocks of one text, 2 of the other, of 23 predictions each.
    assert results["tokens"] == 8 * 23


def test_commit_is_that_of_this_code(tmp_path, monkeypatch):
    def git(*arguments):
        names = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *names, *arguments], check=True, capture_output=True, text=True)

    file = tmp_path / "loop.py"
    file.touch()
    (tmp_path / "other.py").touch()
    monkeypatch.setattr(loop, "__file__", str(file))
    git("init")
    git("add", "other.py")
    git("commit", "-m", "another project")
    assert loop._commit() is None
    git("add", "loop.py")
    git("commit", "-m", "this code")
    assert loop._commit() == git("rev-parse", "HEAD").stdout.strip()


# --- words that are no text, and the best model


@pytest.fixture(scope="session")
def chorales(tmp_path_factory):
    """Documents of chorales' words, of different lengths."""
    folder = tmp_path_factory.mktemp("chorales")
    for split, count in (("train", 9), ("validation", 5), ("test", 5)):
        rows = [{"text": " ".join(str(60 + i * j % 7) for j in range(6 + 5 * i))} for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def of_words(**changes):
    """A run that gets worse again, because its learning rate is far too high."""
    values = {"data__tokenizer": "jsb", "data__pack": "separate", "evaluation__every": 1, "evaluation__blocks": None}
    values |= {"evaluation__keep": "best", "training__schedule": "constant", "training__learning_rate": 0.5}
    return recipe(**{**values, **changes})


@pytest.fixture(scope="module")
def finished_words(tmp_path_factory, chorales):
    output = tmp_path_factory.mktemp("words") / "run"
    return output, train(of_words(), output, data_dir=chorales)


def mean_loss(folder, chorales, split):
    """Nats a word of the saved model, document by document, each cut into sequences of 24; and the number of words."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    nats, count = 0.0, 0
    rows = [json.loads(line) for line in (chorales / f"{split}.jsonl").read_text().splitlines()]
    for row in rows:
        ids = torch.tensor(tokenizer(row["text"])["input_ids"])
        for piece in ids.split(24):
            with torch.no_grad():
                chances = model(piece[None]).logits[0].double().log_softmax(-1)
            nats -= chances[:-1].gather(1, piece[1:, None]).sum().item()
            count += len(piece) - 1
    return nats / count, count


def test_run_of_words(finished_words, chorales):
    output, results = finished_words
    loss, count = mean_loss(output, chorales, "test")
    assert results["metrics"].keys() == {"perplexity", "loss"}
    assert results["metrics"]["loss"]["value"] == pytest.approx(loss, rel=1e-5)
    assert results["tokens"] == count
    assert results["samples_trained"] == 6 * 4
    assert "tokens_trained" not in results
    lines = metrics(output)
    assert [line["sequences"] for line in lines if "loss" in line] == [4 * i for i in range(1, 7)]
    assert "bits per byte" not in write_card(output).read_text(encoding="utf-8")
    # There is no token that ends a text: as many are made as are asked for.
    tokenizer, model = AutoTokenizer.from_pretrained(output), AutoModelForCausalLM.from_pretrained(output)
    made = model.generate(**tokenizer("60 61 62", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert len(tokenizer.decode(made[0]).split()) == 8


def test_best_model_is_kept(finished_words, chorales):
    output, results = finished_words
    losses = {line["step"]: line["validation_loss"] for line in metrics(output) if "validation_loss" in line}
    best = min(losses, key=losses.get)
    assert best < 6, "the last model is the best: nothing is tested"
    assert results["kept"] == {"step": best, "validation_loss": losses[best]}
    assert results["steps"] == 6
    assert mean_loss(output, chorales, "validation")[0] == pytest.approx(losses[best], rel=1e-5)
    names = [path.name for path in (output / "checkpoints").iterdir()]
    assert sorted(names) == [f"step-{best:08d}", "step-00000006"]


def test_last_model_is_kept_by_default(finished_words, chorales, tmp_path):
    results = train(of_words(evaluation__keep="last"), tmp_path / "run", data_dir=chorales)
    assert "kept" not in results
    assert "keep" not in results["recipe"]["evaluation"]
    assert metrics(tmp_path / "run") == metrics(finished_words[0])
    assert results["weights_sha256"] != finished_words[1]["weights_sha256"]


@pytest.mark.parametrize("killed_after", slow_but([3], [1, 3, 4, 5]))
def test_best_model_survives_a_kill(finished_words, chorales, tmp_path, killed_after):
    """Wherever a run is killed, before or after the best step: the resumed one keeps the same model."""
    output = tmp_path / "run"
    changed = of_words(training__checkpoint_every=2)
    kill(changed, output, killed_after, chorales)
    (output / "checkpoints").mkdir(exist_ok=True)
    (output / "checkpoints" / ".step-00000001").mkdir()
    results = train(changed, output, resume=True, data_dir=chorales)
    assert_same_run(output, finished_words[0])
    assert results["kept"] == finished_words[1]["kept"]
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == [f"step-{results['kept']['step']:08d}", "step-00000004", "step-00000006"]


def test_best_model_of_an_earlier_checkpoint(finished_words, chorales, tmp_path):
    """Falling back does not lose the best model that was known then; a damaged one is noticed."""
    output, changed = tmp_path / "run", of_words(training__checkpoint_every=1)
    last = finished_words[1]["kept"]["step"]
    assert last > 1
    interrupt(changed, output, last - 1, chorales)
    folder = output / "checkpoints"
    (folder / f"step-{last:08d}" / SHARD).write_bytes(b"")
    with pytest.raises(TrainingError, match=rf"step-{last:08d}/{SHARD}'.*damaged.*--resume-from {last - 1}\.$"):
        train(changed, output, resume=True, data_dir=chorales)
    results = train(changed, output, resume_from=last - 1, data_dir=chorales)
    assert_same_run(output, finished_words[0])
    assert results["kept"] == finished_words[1]["kept"]


# --- toy tasks


@pytest.mark.parametrize("task", slow_but(["selective_copy"], SOLVABLE))
def test_toy_checkpoint_answers(task, tmp_path):
    """A toy run's folder loads like any other, and generates the right answers; its card reports errors."""
    changed = toy_recipe(task)
    results = train(changed, tmp_path / "run")
    scores = results["metrics"]["test_sets"]["in_distribution"]
    assert scores["token_error"] == scores["sequence_error"] == 0
    assert scores["sequences"] == 40
    assert results["recipe"] == changed.resolved()
    assert (results["samples_trained"], results["length"]) == (
        changed.training.steps * 32,
        changed.data.sequence_length,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    config = changed.data.task_config()
    rows = [config.row(config.sample("test", index)) for index in range(40)]
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    count = len(tokenizer(rows[0]["answer"])["input_ids"])
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    assert answers == [row["answer"] for row in rows]
    card = write_card(tmp_path / "run").read_text(encoding="utf-8")
    assert f"| in distribution |  | 0.00 % | 0.00 % | {scores['tokens']} | 40 |" in card
    assert f"toy task {task.replace('_', ' ')}" in card
    assert "bits per byte" not in card
    assert results["data"]["example"]["prompt"] in card.replace('\\"', '"')


def short_toy(**changes):
    """A toy run of a few steps, with dropout, and samples of a fixed number that are visited more than once."""
    steps = {"training__steps": 6, "training__batch_size": 4, "training__log_every": 1, "evaluation__every": 3}
    kept = {"data__train_samples": 9, "data__test_sets": None, "model__attention_dropout": 0.1}
    return toy_recipe("counting", **{**steps, **kept, **changes})


@pytest.fixture(scope="module")
def finished_toy(tmp_path_factory):
    output = tmp_path_factory.mktemp("toy") / "run"
    return output, train(short_toy(), output)


def test_toy_metrics(finished_toy):
    output, results = finished_toy
    lines = metrics(output)
    assert [line["samples"] for line in lines if "loss" in line] == [4, 8, 12, 16, 20, 24]
    validated = [line for line in lines if "validation_loss" in line]
    assert [line["step"] for line in validated] == [3, 6]
    assert [line["validation_sequences"] for line in validated] == [64, 64]
    assert set(results["metrics"]["test_sets"]) == {"in_distribution", "longer", "shorter"}
    assert "bits_per_byte" not in json.dumps(lines) + json.dumps(results)


@pytest.mark.parametrize(
    ("task", "encoding", "differs"),
    [
        pytest.param("flip_flop", "rope", {"ignore": 0.1}, marks=pytest.mark.slow),
        # samples of different lengths, which are padded in a batch
        ("counting", "cope", {"pass_weight": 0.5}),
    ],
)
def test_toy_scores_by_hand(task, encoding, differs, tmp_path):
    """Errors and loss of a half-trained model on a test set, one sample at a time; some answers are wrong."""
    changed = toy_recipe(
        task, training__steps=15, model__position_encoding=encoding, data__test_sets={"dense": differs}
    )
    scores = train(changed, tmp_path / "run")["metrics"]["test_sets"]["dense"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    config = changed.data.task_config(test_set="dense")
    assert differs.items() <= vars(config).items()
    assert config.seed == 0
    nats, wrong, wrong_sequences, count = 0.0, 0, 0, 0
    for index in range(40):
        symbols, answers = config.sample("test", index)
        with torch.no_grad():
            chances = model(torch.from_numpy(symbols)[None]).logits[0].double().log_softmax(-1)
        errors = 0
        for place in answers.nonzero()[0].tolist():
            nats -= chances[place - 1, symbols[place]].item()
            errors += chances[place - 1].argmax().item() != symbols[place]
            count += 1
        wrong += errors
        wrong_sequences += errors > 0
    assert 0 < wrong < count
    assert scores == {
        "loss": pytest.approx(nats / count, rel=1e-5),
        "token_error": wrong / count,
        "sequence_error": wrong_sequences / 40,
        "tokens": count,
        "sequences": 40,
    }


def test_seed_decides_the_toy_samples(finished_toy, tmp_path):
    """Training samples follow the run's seed; held-out ones are the same for every seed."""
    runs = [TrainingRun(short_toy(seed=seed), tmp_path / str(seed)) for seed in (0, 1)]
    first, other = (run.data.batches(0)["input_ids"] for run in runs)
    assert first.shape != other.shape or not torch.equal(first, other)
    for name, rows in runs[0].data.held_out.items():
        assert torch.equal(rows[range(4)]["input_ids"], runs[1].data.held_out[name][range(4)]["input_ids"])
    assert runs[0].data.splits_sha256["train"] == finished_toy[1]["text_sha256"] != runs[1].data.splits_sha256["train"]


@pytest.mark.parametrize("train_samples", [9, pytest.param(None, marks=pytest.mark.slow)], ids=["epochs", "stream"])
def test_interrupted_toy_run_resumes_exactly(finished_toy, tmp_path, train_samples):
    changed = short_toy(data__train_samples=train_samples)
    whole = finished_toy[0]
    if train_samples is None:
        whole = tmp_path / "whole"
        train(changed, whole)
    interrupt(changed, tmp_path / "run", 3)
    torch.rand(7)
    train(changed, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", whole)


def test_toy_resume_refuses_other_samples(tmp_path, monkeypatch):
    interrupt(short_toy(), tmp_path / "run", 1)
    changed = short_toy(data__task_parameters={**SOLVABLE["counting"][0], "pass_weight": 3})
    with pytest.raises(TrainingError, match=r"data\.task_parameters\.pass_weight: 2\.0 → 3\.0"):
        train(changed, tmp_path / "run", resume=True)
    # As after a change of the code, or of numpy's random numbers.
    from whatwhere.scripts.toy_tasks.counting import CountingConfig

    draw = CountingConfig.draw
    monkeypatch.setattr(CountingConfig, "draw", lambda self, random: draw(self, random.spawn(1)[0]))
    with pytest.raises(TrainingError, match="other text"):
        train(short_toy(), tmp_path / "run", resume=True)


# --- refusals


def test_unwritable_output(data_dir, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(data, "load_text", lambda *a, **k: pytest.fail("work was done before the folder was checked"))
    with pytest.raises(OSError, match="cannot be written"):
        train(recipe(), tmp_path / "file" / "run", data_dir=data_dir)


def test_divergence_stops_without_saving(data_dir, tmp_path):
    output = tmp_path / "run"
    with pytest.raises(TrainingError, match=r"at step \d: training has diverged"):
        train(recipe(training__learning_rate=1e30, training__clip_norm=None), output, data_dir=data_dir)
    assert not (output / "model.safetensors").exists()
    assert not (output / "checkpoints").exists()


def test_a_finite_loss_that_grows_stops_the_run(data_dir, tmp_path):
    changed = recipe(training__learning_rate=30.0, training__warmup_steps=0, training__log_every=1)
    with pytest.raises(TrainingError, match=r"^loss=\d[\d.]* at step \d: training has diverged"):
        train(changed, tmp_path / "run", data_dir=data_dir)


def test_an_unknown_tracker_is_named(data_dir, tmp_path):
    with pytest.raises(TrainingError, match=r"training.trackers=\['wandd'\] is not valid.*Did you mean 'wandb'"):
        train(recipe(training__trackers=["wandd"]), tmp_path / "run", data_dir=data_dir)


@pytest.mark.filterwarnings("ignore:.*no supported trackers:UserWarning")
def test_missing_tracker(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(TrainingError, match="'aim' is not installed"):
        train(recipe(training__trackers=["aim"]), tmp_path / "run", data_dir=data_dir)
    assert not (tmp_path / "run").exists()


def test_folder_with_dots(tmp_path, data_dir, monkeypatch):
    """`runs/..` is the present folder, although `runs` does not exist."""
    (tmp_path / "mine.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainingError, match="is not empty"):
        train(recipe(), "runs/..", data_dir=data_dir)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", ".lock"}


def test_recipe_errors_come_before_the_folder(data_dir, tmp_path):
    with pytest.raises(ValueError, match="position_encoding='nope'"):
        train(recipe(model__position_encoding="nope"), tmp_path / "run", data_dir=data_dir)
    assert not (tmp_path / "run").exists()


# --- how a batch is divided


def first_step(changed, tmp_path, data_dir=None):
    """The loss of the first step, the norm of its gradient, and the gradient."""
    run = TrainingRun(changed, tmp_path / "x", data_dir)
    gradients = {}

    run.optimizer.zero_grad = lambda: gradients.update({name: p.grad for name, p in run.model.named_parameters()})
    loss, norm = run.train_step(next(run.batches()))
    return loss, norm, gradients


def without_dropout(**changes):
    return recipe(model__attention_dropout=0.0, training__clip_norm=None, **changes)


def flip_flop(**changes):
    return toy_recipe("flip_flop", training__batch_size=4, **changes)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (without_dropout, {"data__pack": "concat"}),
        (without_dropout, {"data__pack": "documents"}),
        # Rows of a batch have different numbers of labels: flip-flop has as many as there are reads.
        (flip_flop, {"data__loss": "answer"}),
        (flip_flop, {"data__loss": "all"}),
    ],
    ids=["concat", "documents", "answers", "toy"],
)
def test_accumulation_equals_the_whole_batch(make, changes, data_dir, tmp_path):
    folder = data_dir if make is without_dropout else None
    loss, norm, gradients = first_step(make(**changes), tmp_path, folder)
    assert gradients
    for micro_batch_size in (1, 2):
        changed = make(**changes, training__micro_batch_size=micro_batch_size)
        other_loss, other_norm, others = first_step(changed, tmp_path, folder)
        torch.testing.assert_close((other_loss, other_norm), (loss, norm), rtol=1e-5, atol=0)
        assert gradients.keys() == others.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_activation_checkpointing_changes_nothing(data_dir, tmp_path):
    loss, norm, _ = first_step(without_dropout(), tmp_path, data_dir)
    changed = without_dropout(training__activation_checkpointing=True)
    other_loss, other_norm, _ = first_step(changed, tmp_path, data_dir)
    torch.testing.assert_close((other_loss, other_norm), (loss, norm), rtol=1e-5, atol=0)


def test_bf16_is_used_and_close(data_dir, tmp_path):
    loss, norm, _ = first_step(without_dropout(), tmp_path, data_dir)
    # accelerate allows one precision a process
    AcceleratorState._reset_state(reset_partial_state=True)
    changed = without_dropout(training__mixed_precision="bf16")
    other_loss, other_norm, _ = first_step(changed, tmp_path, data_dir)
    assert other_loss != loss
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.testing.assert_close((other_loss, other_norm), (loss, norm), rtol=0.02, atol=0)


def launch(arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def write_recipe(folder, changed):

    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(changed.resolved()))
    return str(file)


TRAIN = ["-m", "whatwhere", "train"]


@pytest.mark.slow
def test_two_processes_equal_one(data_dir, tmp_path):
    """Uneven work: documents lose labels, so that the processes' shares differ; and each accumulates.

    (`accelerate launch --cpu --num_processes 2` would start one process.)
    """
    changed = recipe(model__attention_dropout=0.0, data__pack="documents", training__micro_batch_size=1)
    command = [*TORCHRUN, 2, *TRAIN, write_recipe(tmp_path, changed)]
    python(*command, "--output", tmp_path / "two", "--data-dir", data_dir)
    assert json.loads((tmp_path / "two" / "results.json").read_text())["processes"] == 2
    train(recipe(model__attention_dropout=0.0, data__pack="documents"), tmp_path / "one", data_dir=data_dir)
    lines, others = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(lines) == len(others) == 8
    for line, other in zip(lines, others):
        assert other == pytest.approx(line, rel=2e-4)
    weights, other_weights = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "one", tmp_path / "two")
    )
    for name, weight in weights.items():
        torch.testing.assert_close(other_weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)


SEE_STREAM = """
import json, re, sys, torch
from whatwhere.scripts.training.loop import TrainingRun
from whatwhere.scripts.training.recipe import load_recipe

run = TrainingRun(load_recipe(sys.argv[1]), sys.argv[2], sys.argv[3])
batches = run.batches()
text = run.data.tokenizer.decode(torch.cat([next(batches)["input_ids"].flatten() for _ in range(8)]))
seen = sorted(set(map(int, re.findall(r"train (\\d+):", text))))
with open(f"{sys.argv[2]}/{run.accelerator.process_index}.json", "w") as file:
    json.dump(seen, file)
run.accelerator.end_training()
"""


@pytest.mark.slow
def test_two_processes_share_a_stream(data_dir, tmp_path):
    """Each has its own documents; resumed, it is bitwise the same; one process cannot continue it."""
    changed = recipe(**STREAM, training__checkpoint_every=3)
    file, whole, parts = write_recipe(tmp_path, changed), tmp_path / "whole", tmp_path / "parts"
    (tmp_path / "see.py").write_text(SEE_STREAM)
    resumed = ["--output", parts, "--data-dir", data_dir, "--resume-from", "3"]
    for command in (
        [tmp_path / "see.py", file, tmp_path, data_dir],
        [*TRAIN, file, "--output", whole, "--data-dir", data_dir],
        [*TRAIN, file, *resumed],
    ):
        if "--resume-from" in command:
            # As if it had been stopped after step 3.
            shutil.copytree(whole, parts)
            (parts / "results.json").unlink()
        python(*TORCHRUN, 2, *command)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [{number % 2 for number in some} for some in seen] == [{0}, {1}]
    assert_same_run(parts, whole)
    state = json.loads((whole / "checkpoints" / "step-00000003" / "run.json").read_text())["streams"]
    assert len(state) == 2
    (parts / "results.json").unlink()
    with pytest.raises(ValueError, match=r"read by 2 processes, and cannot be continued by 1.*whatwhere prepare"):
        train(changed, parts, resume_from=3, data_dir=data_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason", "layout"),
    [
        (signal.SIGSTOP, r"has not answered for 12 seconds \(training\.ddp_timeout\)", {}),
        (signal.SIGKILL, "has ended", {}),
        (signal.SIGKILL, "has ended", {"dp_shard": 2}),
    ],
    ids=["frozen", "killed", "killed-fsdp"],
)
def test_another_process_stops_working(data_dir, tmp_path, number, reason, layout):
    """Without torchrun, which would end the other process."""
    changed = recipe(
        training__steps=100_000, training__checkpoint_every=5, training__ddp_timeout=12, distributed=layout
    )
    output, command = tmp_path / "run", [sys.executable, *TRAIN, write_recipe(tmp_path, changed)]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    one, other = (
        launch(
            [*command, "--output", str(output), "--data-dir", str(data_dir)],
            env={**group, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    )
    try:
        deadline = time.monotonic() + 300
        while not list(output.glob("checkpoints/step-*")):
            assert one.poll() is None, one.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        other.send_signal(number)
        said, _ = one.communicate(timeout=60)
    finally:
        other.kill()
        one.kill()
    assert one.returncode == 1, said
    message = said.splitlines()[-1]
    assert re.search(f"error: another of 2 processes {reason}", message), said
    assert re.search(r"Continue from the last checkpoint, 'step-0000\d+', with --resume\.", message)


def test_processes_must_divide_the_batch(data_dir, tmp_path, monkeypatch):
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 3))
    with pytest.raises(ValueError, match=r"training\.batch_size=4.*number of data-parallel processes, 3"):
        train(recipe(), tmp_path / "run", data_dir=data_dir)
    assert not (tmp_path / "run").exists()


def test_speed_and_memory(data_dir, tmp_path, monkeypatch):
    """Utilisation is reported where the peak of the device is known."""
    monkeypatch.setattr(loop, "peak_flops", lambda device: 1e12)
    train(recipe(training__steps=2), tmp_path / "run", data_dir=data_dir)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in logged if "loss" in line)
    assert line["tokens_per_second_per_device"] == line["tokens_per_second"]
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "run").config
    flops = line["tokens_per_second"] * flops_per_token(config, 24)
    assert line["model_flops_utilisation"] == pytest.approx(flops / 1e12)
    assert 0.1 < line["peak_memory_gb"] < 20


# --- the command line


SEE_IMPORTS = """
import json, sys
from whatwhere.scripts.training.loop import train
from whatwhere.scripts.training.recipe import parse_recipe

train(parse_recipe(json.loads(sys.argv[1])), sys.argv[2], data_dir=sys.argv[3])
print(json.dumps([name for name in sys.modules if name.startswith("whatwhere.scripts.")]))
"""


def test_a_run_of_text_imports_what_it_uses(data_dir, tmp_path):
    arguments = [json.dumps(recipe(training__steps=2).resolved()), tmp_path / "run", data_dir]
    imported = json.loads(python("-c", SEE_IMPORTS, *arguments).splitlines()[-1])
    unused = {"analysis", "cards", "commands", "conversion", "corpora", "genome", "music", "reproduction", "stream"}
    unused |= {"benchmark", "finetune", "plan", "toy_tasks"}
    assert "whatwhere.scripts.training.loop" in imported
    assert not [name for name in imported if unused & set(name.split("."))]


def test_command_line_interrupted_and_resumed(tmp_path, data_dir):
    """A real SIGTERM to a real process; the advice that it prints is right."""
    changed = recipe(training__steps=2000, evaluation__every=None)
    output = tmp_path / "a run"
    command = [sys.executable, *TRAIN, write_recipe(tmp_path, changed), "--output", str(output)]
    process = launch([*command, "--data-dir", str(data_dir)])
    deadline = time.monotonic() + 100
    while not (output / "metrics.jsonl").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    again = re.search(r"with a checkpoint\. Continue with: whatwhere (train --output .* --resume --data-dir .*)", said)
    assert "Traceback" not in said
    (checkpoint,) = (output / "checkpoints").glob("step-*")
    assert metrics(output)[-1]["step"] == int(checkpoint.name[5:])

    # finished in this process, after as many steps as it takes to see that it went on from there
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, int(checkpoint.name[5:]) + 1)
        with pytest.raises(SystemExit) as caught:
            cli.main(shlex.split(again[1]))
    assert caught.value.code == 128 + signal.SIGTERM
    assert metrics(output)[-1]["step"] == int(checkpoint.name[5:]) + 2


def test_errors_of_model_and_text_come_together(tmp_path):
    bad = recipe(data__source="local", data__splits=None, data__train_file="no.txt", model__hiden_size=8)
    with pytest.raises(ValueError, match=r"(?s)2 errors.*hiden_size.*data.train_file='no.txt' is not valid"):
        loop.train(bad, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_own_text(tmp_path, capsys):
    """Two files with their last lines held out; a resumed run has the same text."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}: line {i}\n" for i in range(200)))
    own = recipe(data__source="local", data__splits=None, data__train_file=str(tmp_path / "*.txt"))
    results = loop.train(own, tmp_path / "run", arguments=[])
    assert "the last 5% of each of the 2 documents are held out" in capsys.readouterr().err
    assert results["data"]["split"] == "validation"
    assert results["data"]["train_file"] == str(tmp_path / "*.txt")
    assert results["data"]["prompt"] == "line 190\na:"
    assert len(results["tokens_sha256"]) == 64
    assert "train_file" in (tmp_path / "run" / "recipe.yaml").read_text()


def test_bits_per_byte_of_a_tokenizer_that_changes_the_text(tmp_path, capsys):
    """They are per byte of the file; that they are not comparable is said, and in the results and the card."""
    text = "ﬁne ① café \uff54ext. " * 40
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.txt").write_text(text)
    tokenizer = train_bpe(260, [text])
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    files = {"data__train_file": str(tmp_path / "train.txt"), "data__validation_file": str(tmp_path / "held_out.txt")}
    files |= {"data__tokenizer": str(tmp_path / "tokenizer"), "data__sequence_length": 8}
    own = recipe(data__source="local", data__splits=None, training__steps=2, **files)
    results = loop.train(own, tmp_path / "run", arguments=[])
    bits, nats = results["metrics"]["bits_per_byte"]["value"], results["metrics"]["loss"]["value"] * results["tokens"]
    # Of each block of 8 tokens 7 are predicted.
    assert nats / math.log(2) / bits == pytest.approx(len(text.encode()) * 7 / 8, rel=0.05)
    assert "the validation split: the tokenizer changes the text of 1 of 1 documents" in capsys.readouterr().err
    assert results["changed_documents"] == 1
    assert "changes the text of 1 documents: bits per byte are not" in write_card(tmp_path / "run").read_text()


def test_a_tokenizer_without_bytes(tmp_path, capsys):
    backend = Tokenizer(models.WordLevel({"word": 0, "[EOS]": 1}, unk_token="word"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]").save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("word " * 2000)
    files = {"data__train_file": str(tmp_path / "a.txt"), "data__tokenizer": str(tmp_path / "words")}
    own = recipe(data__source="local", data__splits=None, training__steps=2, **files)
    assert set(loop.train(own, tmp_path / "run", arguments=[])["metrics"]) == {"loss", "perplexity"}
    assert "bits per byte cannot be computed with" in capsys.readouterr().err


def test_a_mixture_does_not_train_on_what_is_held_out(tmp_path, capsys):
    """Of any of its texts."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 99)
    mixture = [
        {"train_file": f"{tmp_path}/a.txt", "validation_file": f"{tmp_path}/b.txt", "weight": 1},
        {"train_file": str(tmp_path), "validation_file": f"{tmp_path}/c.txt", "weight": 1},
    ]
    mixed = data.load_data(recipe(data__source="mixture", data__splits=None, data__mixture=mixture))
    for part in mixed.batches.blocks.parts:
        assert set(part.text.read(0, part.text.tokens)) == {ord("a"), ord(" "), 256}
    assert "2 of 3 files are held out, and not trained on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_recipe"], "error: recipe 'no_such_recipe'"),
        (["demo_rope", "--set", "training.stepps=1"], "Did you mean 'training.steps'? Allowed: 'act"),
        (["demo_rope", "--set", "steps=1"], "Did you mean 'training.steps'? Allowed: 'data', "),
        (["demo_rope", "--set", "position_encoding=pope"], "Did you mean 'model.position_encoding'?"),
        (["demo_rope", "--set", "evaluation.batchsize=1"], "Did you mean 'training.batch_size'?"),
        (["demo_rope", "--set", "data.source=local", "--set", "data.splits={train: a, validation: b}"], "--data-dir"),
        (
            ["demo_rope", "--train-file", "no.txt"],
            "error: data.train_file='no.txt' is not valid: there is no such file",
        ),
        (["demo_rope", "--train-file", "no.txt", "--data-dir", "x"], "error: data_dir='x' has no effect"),
        (["demo_rope", "--data-dir", "x"], "error: data_dir='x' has no effect: no text has source='corpus'"),
    ],
)
def test_command_line_errors_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.delenv("WHATWHERE_DATA_DIR", raising=False)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", *arguments, "--output", str(tmp_path / "run")])
    assert message in str(caught.value.code)
    assert "\n" not in str(caught.value.code)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weight_decay_is_not_on_norms_and_biases(family):
    model = tiny_model(family, "fox", qk_norm=True, output_norm=True, output_gate=True)
    settings = TrainingRecipe(batch_size=1, steps=1, learning_rate=1e-3, weight_decay=0.1)
    optimizer, _ = build_optimizer(model, settings)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            exempt = parameter.ndim < 2 or "norm" in name
            assert group["weight_decay"] == (0.0 if exempt else 0.1), name
