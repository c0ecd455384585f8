"""Our metrics load by path, without a network, and agree with values computed by hand."""

import importlib.util
import math
from pathlib import Path

import pytest

evaluate = pytest.importorskip("evaluate", reason='needs pip install "whatwhere[eval]"')

METRICS = Path(importlib.util.find_spec("whatwhere.scripts").submodule_search_locations[0]) / "metrics"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a metric offline; any network access fails."""

    def refuse(*arguments, **options):
        raise AssertionError("a metric tried to open a connection")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("evaluate.config.HF_EVALUATE_OFFLINE", True)
    return lambda name: evaluate.load(str(METRICS / name), cache_dir=str(tmp_path))


def test_bits_per_byte(load):
    metric = load("bits_per_byte")
    # 8 nats on 6 bytes: "é" has two, "€" three
    texts = ["a", "é", "€"]
    scores = metric.compute(predictions=[3.0, 4.0, 1.0], references=texts)
    assert scores["bytes"] == 6
    assert scores["bits_per_byte"] == pytest.approx(8 / (6 * math.log(2)), rel=1e-12)
    # a uniform guess over bytes costs 8 bits each
    assert metric.compute(predictions=[4 * math.log(256)], references=["abcd"])["bits_per_byte"] == pytest.approx(8)


def test_bits_per_byte_refuses_no_text(load):
    with pytest.raises(ValueError, match="at least one byte"):
        load("bits_per_byte").compute(predictions=[1.0], references=[""])


def test_token_error(load):
    metric = load("token_error")
    scores = metric.compute(
        predictions=[[1, 2, 3], [4, 5, 6], [7, 8, 9], [0, 0, 0]],
        references=[[1, 2, 3], [4, 0, 0], [-100, 8, 0], [-100, -100, -100]],
    )
    # 8 tokens count, 3 are wrong; 3 sequences count, 2 are wrong
    assert scores == {"token_error": pytest.approx(300 / 8), "sequence_error": pytest.approx(200 / 3)}
    scores = metric.compute(predictions=[[1, 2]], references=[[9, 2]], ignore_index=9)
    assert scores == {"token_error": 0.0, "sequence_error": 0.0}


def test_token_error_refuses_bad_shapes(load):
    metric = load("token_error")
    with pytest.raises(ValueError, match="same length"):
        metric.compute(predictions=[[1, 2]], references=[[1]])
    with pytest.raises(ValueError, match="none is left"):
        metric.compute(predictions=[[1]], references=[[-100]])
