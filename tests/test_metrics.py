"""The metric agrees with values computed by hand, and in a Trainer with the model's loss."""

import math

import pytest
import torch

pytest.importorskip("evaluate", reason='needs pip install "whatwhere[eval]"')

from tiny import tiny_model, tokens
from whatwhere.scripts.evaluation.bits_per_byte import BitsPerByte, text_losses


def test_bits_per_byte(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("the metric tried to open a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    metric = BitsPerByte(cache_dir=str(tmp_path))
    # 8 nats on 6 bytes: "é" has two, "€" three.
    scores = metric.compute(predictions=[3.0, 4.0, 1.0], references=["a", "é", "€"])
    assert scores["bytes"] == 6
    assert scores["bits_per_byte"] == pytest.approx(8 / (6 * math.log(2)), rel=1e-12)
    # A uniform guess over bytes costs 8 bits each.
    assert metric.compute(predictions=[4 * math.log(256)], references=["abcd"])["bits_per_byte"] == pytest.approx(8)
    with pytest.raises(ValueError, match="at least one byte"):
        metric.compute(predictions=[1.0], references=[""])


def test_losses_of_texts():
    model, ids = tiny_model("llama", "rope"), tokens(2, 7)
    labels = ids.clone()
    labels[1, 5:] = -100
    with torch.no_grad():
        output = model(ids, labels=labels)
    torch.testing.assert_close(text_losses(output.logits, labels).sum() / (6 + 4), output.loss)
