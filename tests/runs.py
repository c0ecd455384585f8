"""Runs of a second: their settings, their interruption, and their comparison."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from toys import with_changes
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.errors import Interrupted
from whatwhere.scripts.training.finetune import FinetuneSettings, finetune
from whatwhere.scripts.training.loop import TrainingRun, train
from whatwhere.scripts.training.recipe import parse_recipe

SPLITS = {split: f"{split}.jsonl" for split in ("train", "validation", "test")}
# What differs between two runs that are otherwise equal.
CLOCK = {
    "data_wait_seconds",
    "peak_memory_gb",
    "samples_per_second",
    "sequences_per_second",
    "tokens_per_second",
    "tokens_per_second_per_device",
}


def write_texts(folder):
    """Writes the splits of a text, and returns the folder."""
    for split, count in (("train", 12), ("validation", 3), ("test", 3)):
        rows = [{"text": f"{split} {i}: " + "é how now brown cow, " * (3 + i % 4)} for i in range(count)]
        (folder / SPLITS[split]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(**changes):
    """A recipe that trains in a second; keys are written `training__steps`."""
    values = {
        "name": "tiny",
        "data": {
            "source": "local",
            "splits": SPLITS,
            "sequence_length": 24,
        },
        "model": {
            "family": "llama",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            # so that a resumed run depends on the state of the random numbers
            "attention_dropout": 0.1,
        },
        "training": {
            "steps": 6,
            "batch_size": 4,
            "learning_rate": 0.01,
            "warmup_steps": 1,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "log_every": 1,
        },
        "evaluation": {"every": 3, "blocks": 3},
    }
    return parse_recipe(with_changes(values, changes))


def mixture(other, **changes):
    """The changes of a recipe with two texts, the second of which is `other`."""
    texts = [{"source": "local", "splits": SPLITS, "weight": 0.75}, {**other, "weight": 0.25}]
    return {"data__source": "mixture", "data__splits": None, "data__mixture": texts, **changes}


ANOTHER = {"source": "local", "splits": {**SPLITS, "train": "validation.jsonl"}}
STREAM = {"data__streaming": True, "data__shuffle_buffer": 4, "evaluation__final_blocks": 3}


def save_stock_llama(folder):
    """Saves a stock Llama with the tokenizer of bytes, and returns its folder as text."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": 258, "bos_token_id": 256, "eos_token_id": 256}
    LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, **sizes, **tokens)).save_pretrained(folder)
    build_tokenizer("bytes").save_pretrained(folder)
    return str(folder)


def fine_tuning(checkpoint, **changes):
    """The settings of a fine-tuning of a second."""
    values = {"data": "local", "splits": SPLITS, "sequence_length": 24, "steps": 6, "batch_size": 4, "warmup_steps": 1}
    values |= {"learning_rate": 0.01, "evaluation_blocks": 3}
    return FinetuneSettings(checkpoint=checkpoint, **{**values, **changes})


def start(settings, output, **options):
    """Trains or fine-tunes, by the settings."""
    return (finetune if isinstance(settings, FinetuneSettings) else train)(settings, output, **options)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in CLOCK} for line in lines]


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    weights, others = (load_file(next(folder.glob("*model.safetensors"))) for folder in (one, other))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, others[name]), name


def stop_after(monkeypatch, step, number=signal.SIGTERM):
    """Sends this process a signal in the step after `step`."""
    train_step = TrainingRun.train_step

    def interrupted(self, batch):
        if self.step == step:
            signal.raise_signal(number)
        return train_step(self, batch)

    monkeypatch.setattr(TrainingRun, "train_step", interrupted)


def interrupt(changed, output, step, data_dir=None, number=signal.SIGTERM):
    """Trains until a signal in the step after `step`, which is finished."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, step, number)
        with pytest.raises(Interrupted, match=f"after step {step + 1}") as caught:
            start(changed, output, data_dir=data_dir)
    assert caught.value.number == number


class Killed(BaseException):
    pass


def kill(changed, output, step, data_dir):
    """Trains until the step after `step`, where nothing is saved any more."""
    train_step = TrainingRun.train_step

    def killed(self, batch):
        if self.step == step:
            # A killed process would have no thread that still writes or deletes checkpoints.
            self.checkpoints.wait()
            raise Killed
        return train_step(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "train_step", killed)
        with pytest.raises(Killed):
            start(changed, output, data_dir=data_dir)
