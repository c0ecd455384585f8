"""Interrupted, killed and damaged runs of `train` and `finetune`: exact resume, what it refuses, and locks."""

import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import socket
import threading
import time

import pytest
import torch
import yaml

pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')

from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

import whatwhere_cli as cli
from runs import (
    ANOTHER,
    STREAM,
    assert_same_run,
    fine_tuning,
    interrupt,
    kill,
    metrics,
    mixture,
    recipe,
    save_stock_llama,
    start,
    write_texts,
)
from tiny import slow_but
from whatwhere.scripts.cards import folder as cards
from whatwhere.scripts.conversion import folder as conversion
from whatwhere.scripts.errors import TrainingError, reported
from whatwhere.scripts.training import loop
from whatwhere.scripts.training.checkpoint import Checkpoints
from whatwhere.scripts.training.loop import TrainingRun, train
from whatwhere.scripts.training.run_folder import RunFolder
from whatwhere.scripts.writing import replacing

SHARD = "shard-00001-model-00001-of-00001.safetensors"
# peft 0.21 asks the model by the name that transformers has replaced.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    torch.manual_seed(0)
    return save_stock_llama(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def settings_of(stock):
    """Returns the settings of a run of a kind; those that all kinds have can be changed."""
    own = {
        "tuned": {},
        "tuned-stream": {"position_encoding": "cope", "streaming": True, "shuffle_buffer": 4},
        "tuned-lora": {"position_encoding": "cope", "lora": True, "lora_rank": 2, "lora_dropout": 0.1},
    }

    def settings(kind, **changes):
        if kind == "train":
            return recipe(**{f"training__{name}": value for name, value in changes.items()})
        return fine_tuning(stock, **own[kind], **changes)

    return settings


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    output = tmp_path_factory.mktemp("finished") / "run"
    return output, train(recipe(), output, data_dir=data_dir)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- of both commands


@pytest.mark.parametrize(
    ("kind", "number"),
    slow_but(
        [("train", signal.SIGTERM), ("tuned-stream", signal.SIGTERM)],
        [
            *(("train", number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),
            *(("tuned-stream", signal.SIGTERM), ("tuned-lora", signal.SIGTERM)),
        ],
    ),
    ids=str,
)
def test_interrupted_run_resumes_exactly(settings_of, data_dir, tmp_path, kind, number):
    settings, output, whole = settings_of(kind), tmp_path / "run", tmp_path / "whole"
    results = start(settings, whole, data_dir=data_dir)
    interrupt(settings, output, 3, data_dir, number)
    assert not (output / "results.json").exists()
    saved = [name for file in (output / "checkpoints/step-00000004").glob("*.safetensors") for name in load_file(file)]
    torch.rand(7)
    resumed = start(settings, output, resume=True, data_dir=data_dir)
    assert_same_run(output, whole)
    for key in ("metrics", "metrics_before"):
        assert resumed.get(key) == results.get(key)
    count = len(load_file(next(whole.glob("*model.safetensors"))))
    assert len([name for name in saved if name.startswith("optimizer.")]) == 3 * count
    assert len([name for name in saved if name.startswith("model.")]) == count, "frozen weights are not saved"


@pytest.mark.parametrize("command", ["train", "finetune"])
def test_the_command_after_an_interruption_continues(stock, data_dir, tmp_path, monkeypatch, capsys, command):
    """Of a run with options of every kind; before it has begun, it is the command itself."""
    file, text = tmp_path / "tiny.yaml", tmp_path / "a.txt"
    file.write_text(yaml.safe_dump(recipe().resolved()))
    text.write_text("how now brown cow, " * 100)
    new = ["--output", str(tmp_path / "new")]
    begun, record, last, refusals = {
        "train": (
            [str(file), "--set", "training.steps=4", "--set", "seed=3", "--data-dir", str(data_dir)],
            "recipe.yaml",
            ["--data-dir", str(data_dir)],
            [(["--resume"], "error: no --output is given"), ([], "error: no RECIPE is given")],
        ),
        "finetune": (
            [
                stock,
                "--train-file",
                str(text),
                "--steps",
                "4",
                "--sequence-length",
                "24",
                "--batch-size",
                "2",
                "--lora",
            ],
            "finetune.json",
            [],
            [
                (["--output", str(tmp_path / "run"), "--resume", "auto", "--lora-rank", "2"], "lora_rank: 16 → 2"),
                (new, "error: no CHECKPOINT is given"),
            ],
        ),
    }[command]
    begun = [command, *begun]
    cli.main([*begun, "--output", str(tmp_path / "whole")])
    printed = capsys.readouterr().out
    score = json.loads((tmp_path / "whole/results.json").read_text())["metrics"]["loss"]["value"]
    assert re.search(
        rf"{tmp_path}/whole: rope, .*[\d,]+ parameters, 4 steps in \d+ s\n(before, .*\n)?"
        rf"(after, )?.*, (test|validation) split: loss {score:.4g}, perplexity per byte [\d.]+, bits per byte [\d.]+\n",
        printed,
    )
    assert (f"\nNext: whatwhere length {tmp_path}/whole\n" in printed) == (command == "train")
    # The card is written once, or again if the process ended before it was written.
    card = tmp_path / "whole/README.md"
    whole = card.read_text(encoding="utf-8")
    assert ("tiny" if command == "train" else "LoRA") in whole
    body = ModelCard(whole).text.partition("<!--")[0]
    card.unlink()
    cli.main([*begun, "--output", str(tmp_path / "whole"), "--resume", "auto"])
    # PEFT's own card, which the first one replaced, has a further tag.
    assert ModelCard.load(card).text.partition("<!--")[0] == body
    card.write_text("edited", encoding="utf-8")
    cli.main([*begun, "--output", str(tmp_path / "whole"), "--resume", "auto"])
    assert card.read_text(encoding="utf-8") == "edited"
    capsys.readouterr()

    def command_of(method, replacement):
        with monkeypatch.context() as patch:
            patch.setattr(TrainingRun, method, replacement)
            with pytest.raises(SystemExit):
                cli.main([*begun, "--output", str(tmp_path / "run")])
        return capsys.readouterr().err.rstrip().rpartition(" with: ")[2]

    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    assert command_of("__init__", stopped) == shlex.join(["whatwhere", *begun, "--output", str(tmp_path / "run")])
    train_step = TrainingRun.train_step

    def interrupted(self, batch):
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return train_step(self, batch)

    again = command_of("train_step", interrupted)
    assert again == shlex.join(["whatwhere", command, "--output", str(tmp_path / "run"), "--resume", *last])
    cli.main(shlex.split(again)[1:])
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    for arguments, message in ((*new, "--resume"), f"has no run to resume: it has no {record}"), *refusals:
        with pytest.raises(SystemExit, match=re.escape(message)):
            cli.main([command, *arguments])


@pytest.mark.parametrize(
    ("kind", "immaterial"),
    [
        ("train", {"micro_batch_size": 1, "activation_checkpointing": True, "chunked_loss": True, "ddp_timeout": 5}),
        ("tuned", {"save_every": 7, "activation_checkpointing": True}),
    ],
)
def test_what_resume_refuses(settings_of, data_dir, tmp_path, kind, immaterial):
    output, done, settings = tmp_path / "run", tmp_path / "done", settings_of(kind)
    results = start(settings, tmp_path / "whole", data_dir=data_dir)
    interrupt(settings, output, 1, data_dir)
    shutil.copytree(output, done)
    (done / "results.json").write_text("{}")
    before = files_of(tmp_path)
    changed = settings_of(kind, weight_decay=0.5)
    for folder, given, options, message in (
        (output, changed, {"resume": True}, r"weight_decay: 0\.\d → 0\.5\."),
        (output, settings, {}, r"is not empty.*--resume"),
        (done, settings, {"resume": True}, r"finished run.* nothing to resume; to train further, fine-tune"),
        (done, settings, {"resume": "auto", "resume_from": 2}, "finished run"),
        (tmp_path / "nothing", settings, {"resume": True}, "no run to resume"),
    ):
        with pytest.raises(TrainingError, match=message):
            start(given, folder, data_dir=data_dir, **options)
    assert before == files_of(tmp_path)
    # What does not change the result may change.
    resumed = start(settings_of(kind, **immaterial), output, resume=True, data_dir=data_dir)
    assert resumed["metrics"]["loss"]["value"] == pytest.approx(results["metrics"]["loss"]["value"], rel=1e-4)
    for line, expected in zip(metrics(output), metrics(tmp_path / "whole"), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


# --- of `finetune`


def test_resume_refuses_a_changed_checkpoint_or_batch_size(stock, data_dir, tmp_path, monkeypatch):
    """`--batch-size` is for each process, whose number may change; both are noticed before the data are read."""
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "run"
    shutil.copytree(stock, checkpoint)
    settings = fine_tuning(str(checkpoint))
    interrupt(settings, output, 1, data_dir)
    monkeypatch.setattr(loop, "load_data", lambda *_: pytest.fail("the data were read"))
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "1")
        read = Checkpoints.read
        patch.setattr(Checkpoints, "read", lambda *arguments: {**read(*arguments), "batch_size": 8})
        with pytest.raises(TrainingError, match=r"with 8 sequences a step, now these are .* as before, 1\."):
            start(settings, output, resume=True, data_dir=data_dir)
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    model.config.rope_parameters["rope_theta"] = 3.0
    model.save_pretrained(checkpoint)
    with pytest.raises(TrainingError, match=r"with checkpoint=.*checkpoint', whose files have changed"):
        start(settings, output, resume=True, data_dir=data_dir)


def test_resume_of_a_run_of_an_earlier_version(stock, data_dir, tmp_path):
    """The options of distillation are no longer there: unused, they change nothing; a run with them is refused."""
    settings, output = fine_tuning(stock), tmp_path / "run"
    start(settings, tmp_path / "whole", data_dir=data_dir)
    interrupt(settings, output, 1, data_dir)
    record = output / "finetune.json"
    resume = ["finetune", "--output", str(output), "--resume", "--data-dir", str(data_dir)]
    record.write_text(json.dumps({**settings.resolved(), "distill_from": "source", "distill": "attention"}))
    with pytest.raises(SystemExit, match=r"other settings .*: distill_from: 'source' → None"):
        cli.main(resume)
    record.write_text(json.dumps({**settings.resolved(), "distill_from": None, "distill": "logits"}))
    cli.main(resume)
    assert_same_run(output, tmp_path / "whole")


# --- of `train`, whose loop is that of `finetune`


def test_resume_refuses_another_text(data_dir, tmp_path):
    output, other = tmp_path / "run", tmp_path / "other text"
    interrupt(recipe(), output, 1, data_dir)
    before = files_of(output)
    other.mkdir()
    for file in data_dir.iterdir():
        (other / file.name).write_text(file.read_text().replace("cow", "sow"))
    with pytest.raises(TrainingError, match=r"other text.*: train, validation, test\.$"):
        train(recipe(), output, resume=True, data_dir=other)
    for split in ("train", "validation"):
        shutil.copy(data_dir / f"{split}.jsonl", other)
        with pytest.raises(TrainingError, match="other text") as caught:
            train(recipe(), output, resume=True, data_dir=other)
    assert str(caught.value).endswith(": test.")
    assert before == files_of(output)


def test_signals_are_held_until_the_checkpoint_is_written(data_dir, tmp_path, monkeypatch):
    """Also until the last one."""
    write, before, during = Checkpoints._write, signal.getsignal(signal.SIGTERM), []

    def slowly(self, *arguments):
        time.sleep(0.3)
        write(self, *arguments)
        during.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(Checkpoints, "_write", slowly)
    loop.train(recipe(), tmp_path / "run", data_dir=data_dir, arguments=[])
    assert during
    assert before not in during


def test_killed_run_resumes_exactly(finished, data_dir, tmp_path):
    """Killed outright: the steps after the last checkpoint are made again, a half-written line and checkpoint go."""
    output = tmp_path / "run"
    changed = recipe(training__checkpoint_every=2)
    kill(changed, output, 5, data_dir)
    assert [line["step"] for line in metrics(output)][-1] == 5
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    (output / "checkpoints" / ".step-00000005").mkdir()
    train(changed, output, resume=True, data_dir=data_dir)
    assert_same_run(output, finished[0])
    # `keep_checkpoints` is 2
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("method", ["train", "finish"], ids=["before the first step", "after the last step"])
def test_resume_without_steps_in_between(finished, data_dir, tmp_path, monkeypatch, method):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(recipe(), output, data_dir=data_dir)
    train(recipe(), output, resume=True, data_dir=data_dir)
    assert_same_run(output, finished[0])


@pytest.mark.parametrize(
    "changes",
    [
        STREAM,
        {**STREAM, "data__workers": 2, "data__pack": "documents"},
        {**STREAM, "data__workers": 0, "data__pack": "separate"},
        mixture(ANOTHER, **STREAM, data__workers=0),
        mixture(ANOTHER, evaluation__final_blocks=3),
    ],
    ids=["stream", "two workers", "no worker", "streams", "mixture"],
)
def test_streams_and_mixtures_resume_exactly(changes, data_dir, tmp_path):
    changed = recipe(**changes)
    train(changed, tmp_path / "whole", data_dir=data_dir)
    interrupt(changed, tmp_path / "run", 2, data_dir)
    train(changed, tmp_path / "run", resume=True, data_dir=data_dir)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_stream_is_resumed_by_as_many_workers(data_dir, tmp_path):
    interrupt(recipe(**STREAM), tmp_path / "run", 2, data_dir)
    with pytest.raises(ValueError, match="workers=2 is not valid: the run's stream was read by 1 in each process"):
        train(recipe(**STREAM, data__workers=2), tmp_path / "run", resume=True, data_dir=data_dir)


EVERY_TWO = recipe(training__checkpoint_every=2)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, data_dir):
    """The folder of a run with checkpoints after the steps 2 and 4; `finished` is what it comes to."""
    output = tmp_path_factory.mktemp("interrupted") / "run"
    interrupt(EVERY_TWO, output, 3, data_dir)
    return output


@pytest.fixture
def copied(interrupted, tmp_path):
    """A copy of it."""
    return shutil.copytree(interrupted, tmp_path / "run")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return open, (self.file, "w")


def test_resume_executes_nothing(finished, copied, data_dir, tmp_path):
    files = [path for path in copied.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".jsonl", ".yaml"}
    for name in ("custom_checkpoint_0.pkl", "random_states_0.pkl", "optimizer.bin", "scheduler.bin"):
        (copied / "checkpoints" / "step-00000004" / name).write_bytes(pickle.dumps(Trap(tmp_path / name)))
    train(EVERY_TWO, copied, resume=True, data_dir=data_dir)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert_same_run(copied, finished[0])


def test_earlier_checkpoints_are_refused(copied, data_dir, tmp_path):
    folder = copied / "checkpoints" / "step-00000004"
    (folder / "manifest.json").unlink()
    (folder / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps(Trap(tmp_path / "trap")))
    with pytest.raises(TrainingError, match=r"step-00000004' was written by an earlier version.*pickled"):
        train(EVERY_TWO, copied, resume=True, data_dir=data_dir)
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
@pytest.mark.parametrize("name", [SHARD, "run.json", "manifest.json"])
def test_damaged_checkpoint(copied, data_dir, name, damage):
    """The file is named, nothing is changed, and the checkpoint before it is offered."""
    file = copied / "checkpoints" / "step-00000004" / name
    content = bytearray(file.read_bytes())
    if damage == "changed":
        # a digit of a random state or of a checksum, or a bit of a weight
        content[-60] ^= 1
    file.write_bytes(content[:-30] if damage == "cut" else content)
    if damage == "missing":
        file.unlink()
    before = {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}
    with pytest.raises(TrainingError) as caught:
        train(EVERY_TWO, copied, resume=True, data_dir=data_dir)
    message = str(caught.value)
    assert str(file) in message or (name == "manifest.json" and "step-00000004" in message)
    assert message.endswith("'step-00000002' is intact: continue from it with --resume-from 2.")
    assert before == {path: path.read_bytes() for path in copied.rglob("*") if path.is_file()}


def test_resume_from_an_earlier_checkpoint(finished, copied, data_dir):
    (copied / "checkpoints" / "step-00000004" / "run.json").write_text("")
    with pytest.raises(TrainingError, match=r"--resume-from 3 is not valid.*Allowed: 2, 4\.$"):
        train(EVERY_TWO, copied, resume="auto", resume_from=3, data_dir=data_dir)
    train(EVERY_TWO, copied, resume_from=2, data_dir=data_dir)
    assert_same_run(copied, finished[0])
    assert sorted(path.name for path in (copied / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("command", ["train", "finetune"])
@pytest.mark.parametrize("place", ["card", "sample", "results"])
def test_ctrl_c_after_the_last_step(stock, data_dir, tmp_path, monkeypatch, capsys, command, place):
    """The command that is advised finishes the run."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe(training__steps=2).resolved()))
    (tmp_path / "a.txt").write_text("how now brown cow, " * 100)
    sizes = ["--steps", "2", "--sequence-length", "24", "--batch-size", "2"]
    begun = {
        "train": [str(tmp_path / "tiny.yaml"), "--data-dir", str(data_dir)],
        "finetune": [stock, "--train-file", str(tmp_path / "a.txt"), *sizes],
    }[command]

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(
            *{"card": (cards, "model_card"), "sample": (cards, "take_sample"), "results": (loop, "_commit")}[place],
            interrupted,
        )
        with pytest.raises(SystemExit) as stop:
            cli.main([command, *begun, "--output", str(tmp_path / "run")])
    assert stop.value.code == 128 + signal.SIGINT
    advice = capsys.readouterr().err.splitlines()[-1]
    assert advice.startswith("SIGINT received: interrupted. Continue with: whatwhere "), advice
    cli.main(shlex.split(advice.partition(": whatwhere ")[2]))
    card = (tmp_path / "run/README.md").read_text(encoding="utf-8")
    assert "No results are recorded" not in card
    assert "bits per byte" in card


def test_no_checkpoint_is_whole(copied, data_dir):
    for file in copied.rglob("shard-*"):
        file.unlink()
    with pytest.raises(TrainingError, match=r"shard-00001-.*No earlier checkpoint is intact: start again"):
        train(EVERY_TWO, copied, resume=True, data_dir=data_dir)


def test_full_disk(finished, data_dir, tmp_path, monkeypatch):
    """A checkpoint that cannot be written stops the run, which continues from the one before."""
    output, changed = tmp_path / "run", recipe(training__checkpoint_every=2)
    train_step, (soft, hard) = TrainingRun.train_step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def filling_the_disk(self, batch):
        if self.step == 3:
            self.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
        if self.step == 5:
            raise AssertionError("the run went on")
        result = train_step(self, batch)
        if self.step == 4:
            # Written in the background.
            self.checkpoints._thread.join()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "train_step", filling_the_disk)
        try:
            with pytest.raises(TrainingError, match=r"step-00000004' cannot be written: .*step-00000002'.*--resume"):
                train(changed, output, data_dir=data_dir)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000002"]
    train(changed, output, resume=True, data_dir=data_dir)
    assert_same_run(output, finished[0])


@pytest.fixture
def full_disk():
    """Files of more than 1 KB cannot be written: what the libraries raise is what they raise on a full disk."""
    (soft, hard) = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_weights(folder):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"weight": torch.zeros(1000)}, folder / "model.safetensors")


def write_tokenizer(folder):
    tokenizer = Tokenizer.from_str(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    tokenizer.add_tokens([f"{number:020}" for number in range(100)])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_plain(folder):
    (folder / "file").write_bytes(bytes(2000))


@pytest.mark.parametrize("write", [write_weights, write_tokenizer, write_plain])
def test_a_full_disk_is_no_traceback(full_disk, tmp_path, write):
    with pytest.raises(SystemExit, match="File too large"), reported("convert", []):
        write(tmp_path)
    checkpoints = Checkpoints(RunFolder(tmp_path), keep=2, timeout=0)
    with pytest.raises(TrainingError, match="cannot be written: File too large"), checkpoints.writing(tmp_path):
        write(tmp_path)


def test_convert_on_a_full_disk(stock, refused, monkeypatch, request, tmp_path):
    load = conversion.convert_checkpoint

    def then_the_disk_is_full(*arguments, **options):
        found = load(*arguments, **options)
        request.getfixturevalue("full_disk")
        # Otherwise the first file of code is too large.
        monkeypatch.setattr(type(found[0]), "save_pretrained", lambda self, folder: write_weights(folder))
        return found

    monkeypatch.setattr(conversion, "convert_checkpoint", then_the_disk_is_full)
    message = refused("convert", stock, "--position-encoding", "cope", "--output", tmp_path / "out")
    assert message == f"error: {str(tmp_path / 'out')!r} cannot be written: File too large."
    assert list((tmp_path / "out").iterdir()) == []


def test_checkpoints_are_written_in_the_background(tmp_path, monkeypatch):
    """A file system that does not answer keeps no failed process alive; a step may be saved again."""
    checkpoints, write = Checkpoints(RunFolder(tmp_path), keep=2, timeout=0), Checkpoints._write
    draft = tmp_path / "checkpoints" / ".step-00000001"
    draft.mkdir(parents=True)
    (draft / "shard-00001-of-00009.safetensors").write_text("of a killed run")
    state = {"step": 1, "best": None}
    for value in (1.0, 2.0):
        checkpoints.save({"model.weight": torch.full((2,), value)}, state)
        checkpoints.wait()
    (folder,) = (tmp_path / "checkpoints").iterdir()
    (shard,) = folder.glob("*.safetensors")
    assert load_file(shard)["model.weight"].tolist() == [2, 2]
    assert checkpoints.read(None) == state

    answer = threading.Event()

    def waiting(self, *arguments):
        answer.wait()
        raise OSError("no answer")

    monkeypatch.setattr(Checkpoints, "_write", waiting)
    checkpoints.save({}, state)
    checkpoints.wait(failed=True)
    assert checkpoints._thread.is_alive()
    assert checkpoints._thread.daemon
    assert not checkpoints.has_failed
    answer.set()
    checkpoints._thread.join()
    assert checkpoints.has_failed
    monkeypatch.setattr(Checkpoints, "_write", write)
    with pytest.raises(OSError, match="no answer"):
        checkpoints.wait()
    assert not checkpoints.has_failed


def test_leftovers_are_removed(finished, copied, data_dir):
    for folder in (copied / ".final", copied / "checkpoints" / ".step-00000005"):
        folder.mkdir()
        (folder / ".tmpAbCdEf").write_text("half a file")
    (copied / "checkpoints" / ".tmpAbCdEf").write_text("half a file")
    for name in (".recipe.yaml.partial", ".recipe.yaml.0123abcd.partial", ".metrics.jsonl.0123abcd.partial"):
        (copied / name).write_text("half")
    # of a run that was killed
    (copied / ".lock").touch()
    (copied / ".lock.json").write_text('{"pid": 1, "host": "gone"}')
    train(EVERY_TWO, copied, resume=True, data_dir=data_dir)
    assert [path.name for path in copied.rglob(".*")] == [".lock"]
    assert_same_run(copied, finished[0])


def test_files_of_others_stay(data_dir, tmp_path):
    """A folder with hidden files that no run wrote is not empty."""
    output = tmp_path / "run"
    (output / ".tmp_mine").mkdir(parents=True)
    (output / ".notes.partial").write_text("mine")
    with pytest.raises(TrainingError, match="is not empty"):
        train(recipe(), output, data_dir=data_dir)
    assert sorted(path.name for path in output.iterdir() if not path.name.startswith(".lock")) == [
        ".notes.partial",
        ".tmp_mine",
    ]


def test_two_processes_replace_one_file(tmp_path):
    file = tmp_path / "length.json"
    with replacing(file) as first, replacing(file) as second:
        first.write_text("first")
        second.write_text("second")
    # The one that ends last.
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]


def test_files_are_replaced_as_a_whole(copied, data_dir, monkeypatch):
    """A disk that fails while recipe.yaml or metrics.jsonl is written: the old file stays."""
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n')
    before = {name: (copied / name).read_bytes() for name in ("recipe.yaml", "metrics.jsonl")}

    def failing(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(TrainingError, match=r"metrics\.jsonl' cannot be written: No space left.*step-00000004'"):
            train(EVERY_TWO, copied, resume=True, data_dir=data_dir)
    assert before == {name: (copied / name).read_bytes() for name in before}


@pytest.mark.parametrize("line", ["half", "{}", "1"], ids=["cut", "without a step", "a number"])
def test_damaged_metrics(copied, data_dir, line):
    file = copied / "metrics.jsonl"
    file.write_text(f"{line}\n{file.read_text()}")
    with pytest.raises(TrainingError, match=r"metrics\.jsonl' is damaged: not every .*Remove that line, and resume"):
        train(EVERY_TWO, copied, resume=True, data_dir=data_dir)


@pytest.mark.parametrize("content", ["", "- 1", "{"], ids=["empty", "a list", "cut"])
def test_damaged_recipe(copied, data_dir, content):
    (copied / "recipe.yaml").write_text(content)
    with pytest.raises(TrainingError, match=r"recipe\.yaml' cannot be read"):
        train(EVERY_TWO, copied, resume=True, data_dir=data_dir)


def test_one_run_a_folder(data_dir, tmp_path, monkeypatch):
    """A second run fails with an error that names the locking process; the first continues."""
    output, train_step, refused = tmp_path / "run", TrainingRun.train_step, []

    def while_another_starts(self, batch):
        for resume in (False, True):
            with pytest.raises(TrainingError) as caught:
                train(recipe(), output, resume=resume, data_dir=data_dir)
            refused.append(str(caught.value))
        return train_step(self, batch)

    monkeypatch.setattr(TrainingRun, "train_step", while_another_starts)
    train(recipe(training__steps=2), output, data_dir=data_dir)
    assert len(refused) == 4
    expected = f"output={str(output)!r} is in use: process {os.getpid()} on {socket.gethostname()} is training there."
    assert all(message.startswith(expected) for message in refused)
    assert [path.name for path in output.glob(".*")] == [".lock"]


# Forking a process with threads is deprecated; this child ends at once. (Another would import for seconds.)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lock_of_a_killed_process(tmp_path):
    child = os.fork()
    if child == 0:
        try:
            with RunFolder(tmp_path).lock():
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert (tmp_path / ".lock").exists()
    with RunFolder(tmp_path).lock():
        assert json.loads((tmp_path / ".lock.json").read_text())["pid"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
