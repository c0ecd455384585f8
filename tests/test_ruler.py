"""RULER's tasks: their texts fit into the length and contain the answer, scores, and the command."""

import json

import pytest

from tiny import tiny_model
from whatwhere.scripts import cli
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import length as script
from whatwhere.scripts.evaluation import ruler, scorer
from whatwhere.scripts.processes import Processes

# A byte-level tokenizer needs longer texts than a trained one.
LENGTHS = (1024, 3000, 16384)
SIZES = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    for name, encoding in (("pope", "pope"), ("absolute", "absolute")):
        model = tiny_model("gpt2", encoding, **SIZES, num_key_value_heads=2, max_position_embeddings=1024)
        model.save_pretrained(folder / name)
        build_tokenizer("bytes").save_pretrained(folder / name)
    return folder


@pytest.mark.parametrize("task", ruler.TASKS)
def test_texts_fit_and_contain_the_answer(task):
    tokenizer = build_tokenizer("bytes")
    found = {length: ruler.generate(task, tokenizer, length, 3) for length in (256, *LENGTHS)}
    assert found[256] is None
    assert found[16384] is not None
    for length, samples in found.items():
        for sample in samples or []:
            text = f"{sample['input']} {sample['gen_prefix']}"
            assert len(tokenizer(text).input_ids) + ruler.TASKS[task] <= length
            assert sample["outputs"]
            assert all(answer in text for answer in sample["outputs"])
    assert ruler.generate(task, tokenizer, 16384, 3) == found[16384]
    assert ruler.generate(task, tokenizer, 16384, 3, seed=1) != found[16384]


class Oracle:
    """Answers with the expected strings of every second sample."""

    def __new__(cls, checkpoint, loading, batch_size):
        from lm_eval.models.huggingface import HFLM

        # The requests are divided as in `scorer`, without a model of a useful size.
        options = {"backend": "causal", "device": "cpu", "trust_remote_code": False}
        model = scorer.scorer(loading.processes, pretrained=checkpoint, **options)

        def answers(self, requests, disable_tqdm=False):
            assert all(request.args[0].endswith(request.doc["gen_prefix"]) for request in requests)
            return [", ".join(r.doc["outputs"]) if r.doc_id % 2 else "nothing" for r in requests]

        HFLM.generate_until = answers
        return model


def test_scores(root, monkeypatch, tmp_path, capsys):
    from lm_eval.models.huggingface import HFLM

    monkeypatch.setattr(HFLM, "generate_until", HFLM.generate_until)
    monkeypatch.setattr(ruler, "load_scorer", Oracle)
    arguments = ["length", str(root / "pope"), str(root / "absolute"), "--tasks", "ruler", "--windows", "1x,2048"]
    cli.main([*arguments, "--samples", "4", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "ruler.json").read_text())
    pope, absolute = found["checkpoints"]
    short, long = pope["cells"]
    assert (short["length"], long["length"]) == (1024, 2048)
    assert "niah_single_1" in short["tasks"]
    assert "vt" not in short["tasks"]
    for cell in (short, long, absolute["cells"][0]):
        assert cell["tasks"]
        for score in cell["tasks"].values():
            assert score["value"] == pytest.approx(0.5)
            # The scores are 0, 1, 0, 1.
            assert score["standard_error"] == pytest.approx((1 / 12) ** 0.5)
    assert absolute["cells"][1]["tasks"] == {}
    assert "1024" in absolute["cells"][1]["reason"]
    printed = capsys.readouterr().out
    assert "50.0 ± 28.9" in printed
    assert "not supported" in printed


def test_processes_share_the_answers(monkeypatch):
    def gathered(own):
        # The other of two processes has items 1, 3.
        return [*own, (1, "b"), (3, "d")]

    monkeypatch.setattr("accelerate.utils.gather_object", gathered)
    assert Processes(2).joined(["a", "c"], 4) == ["a", "b", "c", "d"]
    assert Processes().joined(["a", "b"], 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "ruler", "--documents", "3"], "--documents has no effect with --tasks ruler"),
        (["--tasks", "ruler", "--metric", "bits_per_byte"], "--metric has no effect with --tasks ruler"),
        (["--samples", "3"], "--samples has no effect without --tasks"),
    ],
)
def test_options_without_effect_are_refused(root, arguments, message):
    with pytest.raises(ValueError, match=message):
        script.main([str(root / "pope"), *arguments])


@pytest.mark.slow
def test_two_processes_equal_one(root, tmp_path, two_processes):
    """Three samples, so that shares are uneven."""
    arguments = ["length", str(root / "pope"), "--tasks", "ruler", "--windows", "1024,2048", "--samples", "3"]
    cli.main([*arguments, "--output", str(tmp_path / "one"), "--device", "cpu"])
    printed = two_processes(*arguments, "--output", tmp_path / "two")
    assert printed.count("Recall") == 1
    one, two = (json.loads((tmp_path / name / "ruler.json").read_text()) for name in ("one", "two"))
    assert one["checkpoints"] == two["checkpoints"]
    assert all("niah_single_1" in cell["tasks"] for cell in one["checkpoints"][0]["cells"])
