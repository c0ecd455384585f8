"""`whatwhere reproduce conversion`: source, conversions, training and measurements of tiny models; the report."""

import json
from pathlib import Path

import pytest

pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')

from whatwhere.scripts.commands import reproduce
from whatwhere.scripts.reproduction import conversion_table, measures
from whatwhere.scripts.training.recipe import load_recipe

TINY = [
    "data.source=stdlib",
    "data.splits=null",
    "data.tokenizer=bytes",
    "data.vocab_size=null",
    "data.sequence_length=16",
    "model.hidden_size=12",
    "model.intermediate_size=12",
    "model.num_hidden_layers=3",
    "training.steps=20",
    "training.batch_size=8",
    "training.warmup_steps=0",
    "training.checkpoint_every=null",
    "evaluation.every=null",
    "evaluation.final_blocks=2",
]
SYSTEMS = {
    "continued": conversion_table.System("RoPE"),
    "plan": conversion_table.System(
        "RoPE, RoPE, PoPE", ["rope", "rope", "pope"], {"pope": {"use_delta": True}}, new_rate=0.1
    ),
}


@pytest.fixture
def tiny(monkeypatch):
    recipe = load_recipe(conversion_table.RECIPE, TINY)
    monkeypatch.setattr(conversion_table, "load_recipe", lambda name: recipe)
    monkeypatch.setattr(conversion_table, "SYSTEMS", SYSTEMS)
    monkeypatch.setattr(conversion_table, "PERCENT", (10,))
    monkeypatch.setattr(conversion_table, "MULTIPLES", (1, 2))
    monkeypatch.setattr(conversion_table, "TEXTS", ({"corpus": "stdlib", "document_limit": None, "text_tokens": 64},))
    monkeypatch.setattr(conversion_table, "TEXT", "stdlib")
    measure = measures.length.main

    def main(words):
        measure(words)
        # Only results of named corpora have the text in their name.
        (Path(words[0]) / "length.json").rename(Path(words[0]) / "length_stdlib.json")

    monkeypatch.setattr(measures.length, "main", main)


@pytest.mark.slow
def test_everything_once(tiny, tmp_path):
    conversion_table.train(tmp_path, list(SYSTEMS), None)
    folder = tmp_path / conversion_table.RECIPE
    assert {path.name for path in folder.iterdir()} == {
        "source",
        *("continued-0", "continued-10", "plan-0", "plan-10"),
    }
    settings = json.loads((folder / "plan-10" / "finetune.json").read_text())
    assert (settings["steps"], settings["batch_size"] * settings["accumulation"]) == (2, 8)
    assert settings["new_learning_rate"] == 0.1
    report = conversion_table.collect(tmp_path, list(SYSTEMS))
    assert [(row["system"], row["percent"]) for row in report["rows"]] == [
        ("source", 0),
        *((name, percent) for name in SYSTEMS for percent in (0, 10)),
    ]
    record = folder / "plan-0" / "conversion.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "source_weights_sha256": "other"}))
    with pytest.raises(ValueError, match="is a conversion of another source"):
        conversion_table.train(tmp_path, list(SYSTEMS), None)


def test_report(tmp_path):
    lengths = {str(2**k): 100.0 + k for k in range(5)}
    text = {"pg19": lengths, "wikitext103": {**lengths, "1": 50.0}}
    rows = [{"system": "source", "label": "the source", "percent": 0, "perplexity": text}]
    for percent in (0, 1, 3, 10):
        less = {"pg19": {multiple: value - percent for multiple, value in lengths.items()}}
        rows.append({"system": "pope", "label": "PoPE", "percent": percent, "perplexity": {**text, **less}})
    source = {"length": 512, "tokens_trained": 9830400, "parameters": 3443136, "seed": 0}
    files = conversion_table.write({"rows": rows, "source": source}, tmp_path, "conversion_small")
    assert {file.name for file in files} == {f"conversion_small.{end}" for end in ("json", "md", "png", "svg")}
    said = (tmp_path / "conversion_small.md").read_text()
    assert "3,443,136 parameters, trained on 9.8 million tokens in sequences of 512, seed 0" in said
    assert "| PoPE | 10 | 50.0 | 104.0 | 90.0 | 91.0 | 92.0 | 93.0 | 94.0 |" in said


def test_nothing_to_report(tmp_path, monkeypatch):
    words = ["conversion", "--small", "--output", str(tmp_path), "--report-only"]
    with pytest.raises(ValueError, match="source' is not a finished and measured run"):
        conversion_table.main(reproduce.parser().parse_args(words), words)
    words += ["--seeds", "0"]
    with pytest.raises(ValueError, match="--seeds has no effect with conversion"):
        conversion_table.main(reproduce.parser().parse_args(words), words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one process"):
        conversion_table.main(reproduce.parser().parse_args(words[:-2]), words[:-2])
