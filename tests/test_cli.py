"""The command `whatwhere`; test_docs.py and test_packaging.py run its help and its commands."""

import re

import pytest
import torch.distributed as dist

import whatwhere_cli as cli
from processes import python
from whatwhere.scripts.evaluation import checkpoints
from whatwhere.scripts.evaluation.length_report import METRICS
from whatwhere.scripts.evaluation.variants import VARIANTS
from whatwhere.scripts.evaluation.zero_shot import TASKS
from whatwhere.scripts.reproduction.tables import TABLES
from whatwhere.scripts.toy_tasks.registry import PROBES
from whatwhere.scripts.toy_tasks.registry import TASKS as TOY_TASKS
from whatwhere.scripts.training.finetune import FinetuneSettings
from whatwhere_cli import finetune as cli_finetune
from whatwhere_cli import length as cli_length
from whatwhere_cli import reproduce as cli_reproduce
from whatwhere_cli import task as cli_task
from whatwhere_cli import zero_shot as cli_zero_shot


def test_the_process_group_ends_with_the_command(capsys):
    """Without this, gloo sometimes aborts the processes when they exit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cli.main(["plan", "demo_rope"])
    assert "parameters" in capsys.readouterr().out
    assert not dist.is_initialized()


def test_help_and_mistakes_take_no_import():
    """Of PyTorch or Transformers, for which a user would wait for seconds."""
    code = """
import contextlib, io, sys
import whatwhere_cli as cli
for _, name, *_ in cli.COMMANDS:
    for arguments in ([name, "--help"], [name, "--no-such-option"]):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                cli.main(arguments)
        except SystemExit as stop:
            assert (stop.code == 0) == ("--help" in arguments), arguments
        else:
            raise AssertionError(arguments)
print({*sys.modules} & {"torch", "transformers", "huggingface_hub", "numpy", "whatwhere"})
"""
    assert python("-c", code) == "set()\n"


def test_parsers_list_what_there_is():
    assert set(cli_length.METRICS) == set(METRICS)
    assert cli_length.VARIANTS == VARIANTS
    assert list(cli_zero_shot.TASKS) == list(TASKS)
    assert list(cli_task.TASKS) == [*TOY_TASKS, *PROBES]
    tables = next(action for action in cli_reproduce.parser()._actions if action.dest == "table")
    assert list(tables.choices) == [*TABLES, *cli_reproduce.OWN]


def test_options_of_fine_tuning_are_its_settings():
    actions = {action.dest: action for action in cli_finetune.parser()._actions}
    assert (
        actions.keys() - {"help", "output", "resume", "resume_from", "data_dir"} == FinetuneSettings.model_fields.keys()
    )
    for name, field in FinetuneSettings.model_fields.items():
        # A default that the help states is the one that there is.
        if found := re.fullmatch(r"(?:.*; )?default ([\d.e-]+)", actions[name].help or ""):
            assert float(found[1]) == field.default, name


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("train demo_rope --steps 10", "--set training.steps=10"),
        ("train demo_rope --position-encoding=cope", "--set model.position_encoding=cope"),
        ("prepare demo_rope --batch-size", "--set training.batch_size=..."),
        ("train demo_rope --trian-file a", "--train-file"),
        ("push run me/run --license mit", "--licence"),
        ("analysis maps run --text_field a", "--text-field"),
        ("convert llama --position_encoding cope --output out", "--position-encoding"),
    ],
)
def test_an_unknown_option_has_the_one_that_is_meant(arguments, meant, refused):
    assert f"Did you mean {meant!r}?" in refused(*arguments.split())


@pytest.mark.parametrize("command", ["length", "convert", "finetune"])
def test_folders_that_do_not_exist(command, tmp_path, monkeypatch, refused):
    """Paths are not looked up on the Hub; for what may be an id, the Hub is asked once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "transformers.utils.hub.is_offline_mode", lambda: pytest.fail("the Hub is asked by Transformers")
    )
    monkeypatch.setattr(checkpoints, "get_session", lambda: pytest.fail("the network was used"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "pope").mkdir(parents=True)
    more = {
        "length": ["--validation-file", "a.txt"],
        "convert": ["--position-encoding", "cope", "--output", "out"],
        "finetune": ["--output", "out"],
    }[command]
    (tmp_path / "a.txt").write_text("text")
    for name in ("runs/poep", "./runs/poep", f"{tmp_path}/runs/poep", "runs/poep/last", "~/poep"):
        message = refused(command, name, *more)
        assert "there is no such folder" in message
        assert ("Did you mean" in message) == (name not in ("~/poep", "runs/poep/last")), message

    def no_answer():
        raise OSError("no route")

    monkeypatch.setattr(checkpoints, "get_session", no_answer)
    message = refused(command, "rnus/pope", *more)
    assert "the Hub does not answer (OSError). Did you mean 'runs/pope'?" in message
