"""Every command as a process: its exit status, where the output can have ASCII characters only."""

import json

import pytest
import yaml

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')
pytest.importorskip("lm_eval", reason='needs pip install "whatwhere[eval]"')

from hub_server import Hub
from processes import python
from runs import recipe, save_stock_llama, write_texts
from toys import toy_recipe
from whatwhere.scripts.training.loop import train

# Runs each command as `python -m whatwhere`, in a process forked from one that has imported the libraries.
FORKS = """
import gc, json, os, runpy, sys
import lm_eval.models.huggingface, matplotlib.pyplot, transformers
import whatwhere.scripts.training.loop
# Processes end faster.
gc.freeze()
found = []
for arguments in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if not (child := os.fork()):
        sys.argv = ["whatwhere", *arguments]
        sys.stdin = open(os.devnull)
        print("$ whatwhere", *arguments, file=sys.stderr)
        runpy.run_module("whatwhere", run_name="__main__")
    found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with open("statuses.json", "w") as file:
    json.dump(found, file)
"""

RUN, OTHER, OUTPUT = "runs/caf\N{LATIN SMALL LETTER E WITH ACUTE}", "runs/none", "--output"
WINDOWS = ["--windows", "8,16", "--validation-file", "test.jsonl", "--device", "cpu"]
SUCCEED = [
    ["--help"],
    ["--version"],
    ["plan", "recipe.yaml"],
    ["prepare", "recipe.yaml", "--data-dir", "."],
    ["train", "recipe.yaml", "--data-dir", ".", OUTPUT, RUN],
    ["train", "recipe.yaml", "--data-dir", ".", "--set", "model.position_encoding=none", OUTPUT, OTHER],
    ["convert", "llama", "--position-encoding", "pope", OUTPUT, "pope"],
    ["finetune", "llama", "--train-file", "train.jsonl", "--steps", "1", "--sequence-length", "16", OUTPUT, "tuned"],
    ["length", RUN, OTHER, *WINDOWS],
    ["task", "task", "--device", "cpu"],
    ["compare", RUN, OTHER],
    ["reproduce", "--help"],
    ["demo", "--help"],
    ["analysis", "frequencies", RUN, "--validation-file", "test.jsonl", "--device", "cpu", OUTPUT, "figures"],
    ["card", RUN, OTHER],
    ["push", RUN, "me/model"],
    ["benchmark", "--parts", "attention", "--lengths", "32", "--heads", "2", "--head-dim", "16", "--repeats", "1"],
    ["gpu-check", "--device", "cpu", "--case", "plain float16 D=16 1x2/2x1/40 packed"],
    ["kernel-hub", "attention"],
    ["zero-shot", "--print-task-folder"],
]
# Mistakes that are found early, and those that argparse finds.
FAIL = [
    (["trian"], 1),
    (["train", "no_recipe"], 1),
    (["prepare", "no_recipe"], 1),
    (["plan", "no_recipe"], 1),
    (["convert", "llama", "--position-encoding", "ropee", OUTPUT, "out"], 1),
    (["finetune", "llama", "--train-file", "missing.txt", OUTPUT, "out"], 1),
    (["length", RUN, "--windows", "0"], 1),
    (["task", RUN], 1),
    (["compare", RUN], 2),
    (["reproduce", "cope_5", "--small", "--report-only", OUTPUT, "tables"], 1),
    (["demo", OUTPUT, "recipe.yaml"], 1),
    (["card", "runs"], 1),
    (["push", "runs", "me/model"], 1),
    (["push", RUN], 2),
    (["kernel-hub", "recipe.yaml"], 2),
]


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """The folder in which the commands ran, and the exit status of each."""
    place = tmp_path_factory.mktemp("commands")
    write_texts(place)
    values = recipe(training__steps=2, evaluation__every=2).resolved()
    (place / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    save_stock_llama(place / "llama")
    train(toy_recipe("counting", training__steps=1), place / "task")
    commands = [*SUCCEED, *(arguments for arguments, _ in FAIL)]
    with Hub() as hub:
        names = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_me"}
        names |= {"HF_HOME": str(place / "home"), "PYTHONIOENCODING": "ascii", "TRITON_INTERPRET": "1"}
        python("-c", FORKS, json.dumps(commands), env=names, cwd=place)
    found = json.loads((place / "statuses.json").read_text(encoding="utf-8"))
    return place, dict(zip(map(tuple, commands), found))


@pytest.mark.parametrize("arguments", SUCCEED, ids=lambda arguments: " ".join(arguments[:1]))
def test_success_is_zero(statuses, arguments):
    assert statuses[1][tuple(arguments)] == 0


@pytest.mark.parametrize(
    ("arguments", "status"), FAIL, ids=lambda one: " ".join(one[:1]) if isinstance(one, list) else ""
)
def test_a_mistake_is_not_zero(statuses, arguments, status):
    assert statuses[1][tuple(arguments)] == status


def test_what_could_not_be_printed_is_written(statuses):
    place, _ = statuses
    card = (place / RUN / "README.md").read_text(encoding="utf-8")
    assert "caf\N{LATIN SMALL LETTER E WITH ACUTE}" in card
    assert list(place.glob("**/length*.png"))
