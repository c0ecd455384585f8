"""The folder of a run: what it says about the run, what it refuses, and how its files come about."""

import json

import pytest

pytest.importorskip("filelock", reason='needs pip install "whatwhere[train]"')

from whatwhere.scripts.checks import differences
from whatwhere.scripts.errors import TrainingError, reported
from whatwhere.scripts.training.run_folder import RunFolder

SETTINGS = {"steps": 3, "rate": 1e-5, "sizes": (1, 2), "training": {"compile": False}}


@pytest.mark.parametrize("record", ["recipe.yaml", "finetune.json"])
def test_state_of_a_run(tmp_path, record):
    folder = RunFolder(tmp_path / "run", record)
    assert (folder.state(SETTINGS), folder.results(), folder.is_begun) == ("missing", None, False)
    folder.begin(False, SETTINGS)
    with pytest.raises(TrainingError, match="no run to resume"):
        folder.begin(True, SETTINGS)
    folder.path.mkdir()
    folder.write_record({**SETTINGS, "sizes": [1, 2]})
    assert folder.state(SETTINGS) == "started"
    folder.begin(True, SETTINGS)
    with pytest.raises(TrainingError, match="steps: 3 → 4"):
        folder.begin(True, {**SETTINGS, "steps": 4})
    folder.begin(True, {**SETTINGS, "training": {"compile": True}, "distributed": {"tp": 2}})
    with pytest.raises(TrainingError, match="is not empty"):
        folder.begin(False, SETTINGS)
    for name in ("step-00000009", "step-00000010", "best-00000011.safetensors", ".step-00000012"):
        (folder.path / "checkpoints" / name).mkdir(parents=True)
    assert folder.state() == "interrupted after step 10"
    (folder.path / "results.json").write_text(json.dumps({"recipe": {**SETTINGS, "sizes": [1, 2]}}))
    assert folder.state(SETTINGS) == "done"
    with pytest.raises(TrainingError, match="rate: 1e-05 → 2"):
        folder.results({**SETTINGS, "rate": 2})
    with pytest.raises(TrainingError, match="finished run"):
        folder.begin(True, SETTINGS)
    (folder.path / "results.json").write_text("{")
    with pytest.raises(TrainingError, match=r"results\.json' cannot be read"):
        folder.results()


def test_draft_is_moved_with_the_results_last(tmp_path, monkeypatch):
    folder, moved = RunFolder(tmp_path), []
    replace = type(tmp_path).replace
    monkeypatch.setattr(type(tmp_path), "replace", lambda self, to: (moved.append(to.name), replace(self, to)))
    with folder.draft() as draft:
        for name in ("a", "results.json", "z"):
            (draft / name).write_text(name)
    assert moved[2:] == ["results.json"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "results.json", "z"]


def test_differences():
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "d": 4}) == ["a.b: 1 → 3", "c: 2 → None", "d: None → 4"]


def test_errors_and_interruptions_end_the_process(capsys):
    with pytest.raises(SystemExit) as stop, reported("length", ["x"]):
        raise TrainingError("reason")
    assert stop.value.code == "error: reason"
    with pytest.raises(SystemExit) as stop, reported("length", ["x"]):
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert capsys.readouterr().err == "interrupted. Start again with: whatwhere length x\n"


@pytest.mark.parametrize(
    ("variables", "command"),
    [
        ({}, "Start again with: whatwhere length 'a b'"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "torchrun --nproc_per_node 2 -m whatwhere length 'a b'"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            "-m whatwhere length 'a b' (on every node, after the launcher",
        ),
    ],
)
def test_the_command_after_an_interruption(variables, command, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit), reported("length", ["a b"]):
        raise KeyboardInterrupt
    assert command in capsys.readouterr().err


def test_commands_that_continue(capsys):
    for name, arguments, command in (
        ("prepare", ["demo_rope"], "whatwhere prepare demo_rope"),
        ("benchmark", ["--quick"], "whatwhere benchmark --quick --resume"),
        ("benchmark", ["--resume"], "whatwhere benchmark --resume"),
    ):
        with pytest.raises(SystemExit), reported(name, arguments):
            raise KeyboardInterrupt
        assert capsys.readouterr().err == f"interrupted. Continue with: {command}\n"
