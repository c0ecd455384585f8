"""`make demo`, whole, with models that learn nothing; its continuation after an interruption."""

import json
import re

import pytest
from huggingface_hub import ModelCard

from whatwhere.scripts import cli
from whatwhere.scripts.commands import demo
from whatwhere.scripts.errors import TrainingError

TINY = [
    "training.batch_size=2",
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "data.sequence_length=128",
    "evaluation.blocks=2",
    "evaluation.final_blocks=2",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished demo, and what it printed."""
    folder = tmp_path_factory.mktemp("demo")
    settings = [argument for setting in TINY for argument in ("--set", setting)]
    sizes = ["--set", "training.steps=2", "--set", "training.warmup_steps=0"]
    with pytest.MonkeyPatch.context() as patch:
        # lm-eval and the clean process have caches of their own here.
        for name in ("HF_MODULES_CACHE", "HF_DATASETS_CACHE"):
            patch.setenv(name, str(folder / name.lower()))
        patch.chdir(folder)
        printed: list[str] = []
        write = lambda *words, end="\n", **options: printed.append(" ".join(map(str, words)) + end)  # noqa: E731
        patch.setattr("builtins.print", write)
        demo.main([*sizes, *settings])
    return folder / "demo", "".join(printed)


@pytest.mark.slow
def test_table_and_figure(finished):
    folder, printed = finished
    content = json.loads((folder / "length.json").read_text(encoding="utf-8"))
    assert [checkpoint["name"] for checkpoint in content["checkpoints"]] == list(demo.ENCODINGS)
    # The same text for all of them.
    assert len({checkpoint["tokens_sha256"] for checkpoint in content["checkpoints"]}) == 1
    for checkpoint in content["checkpoints"]:
        assert [cell["length"] for cell in checkpoint["cells"]] == [128, 256, 512, 1024, 1280]
        assert {cell["tokens"] for cell in checkpoint["cells"]} == {16 * 1280}
        row = next(line for line in printed.splitlines() if line.startswith(f"| {checkpoint['name']} "))
        for cell in checkpoint["cells"]:
            assert 7 < cell["bits_per_byte"] < 9, "an untrained model knows nothing about bytes"
            assert f"{cell['bits_per_byte']:.3f}" in row
            assert cell["dropped_tokens"] == 0, "the same tokens at every length"
    assert (folder / "length.png").stat().st_size > 10_000
    assert (folder / "length.svg").is_file()


@pytest.mark.slow
def test_same_recipe_and_seed(finished):
    folder, _ = finished
    recipes = []
    for encoding in demo.ENCODINGS:
        recipe = json.loads((folder / encoding / "results.json").read_text(encoding="utf-8"))["recipe"]
        assert recipe["training"]["steps"] == 2
        assert recipe["model"].pop("position_encoding") == encoding
        recipe.pop("name")
        recipes.append(recipe)
    assert recipes[0] == recipes[1] == recipes[2]


@pytest.mark.slow
def test_cards(finished):
    folder, _ = finished
    for encoding in demo.ENCODINGS:
        card = ModelCard.load(folder / encoding / "README.md")
        measured = json.loads((folder / encoding / "length.json").read_text(encoding="utf-8"))
        assert encoding in card.data.tags
        assert [entry["name"] for entry in measured["checkpoints"]] == [encoding]
        assert f"{measured['checkpoints'][0]['cells'][4]['perplexity']:.2f}" in card.text
        assert "](length.png)" in card.text
        assert (folder / encoding / "length.png").is_file()
        scored = any(result.dataset_type == demo.TASK for result in card.data.eval_results)
        assert scored == (encoding == demo.CHOSEN)


@pytest.mark.slow
def test_lm_eval_and_clean_process(finished):
    folder, printed = finished
    scores = json.loads((folder / demo.CHOSEN / "lm_eval.json").read_text(encoding="utf-8"))
    task = scores["tasks"][demo.TASK]
    assert task["samples"] > 5
    assert (task["shots"], task["split"]) == (0, "test")
    assert 7 < task["metrics"]["bits_per_byte"]["value"] < 9
    assert scores["command"].startswith("whatwhere demo ")
    # It starts with the prompt: nothing asked whether the code may run.
    assert printed.split(f"=== {demo.CHOSEN} in a clean process\n")[1].startswith(demo.PROMPT)


@pytest.mark.slow
def test_wall_times(finished):
    _, printed = finished
    assert len(re.findall(r"^=== .*: \d+\.\d s$", printed, re.MULTILINE)) == 5


@pytest.mark.slow
def test_a_finished_run_of_the_same_recipe_is_reused(finished):
    folder, _ = finished
    overrides = ["training.steps=2", "training.warmup_steps=0", *TINY]
    written = (folder / "rope" / "model.safetensors").stat().st_mtime_ns
    demo.train({"rope": folder / "rope"}, overrides)
    assert (folder / "rope" / "model.safetensors").stat().st_mtime_ns == written
    # An interrupted run has a recipe and no results. It is continued, and gives the same numbers.
    results = folder / "rope" / "results.json"
    metrics = json.loads(results.read_text(encoding="utf-8"))["metrics"]
    results.unlink()
    with pytest.raises(TrainingError, match="training failed: rope"):
        demo.train({"rope": folder / "rope"}, [*overrides, "seed=1"])
    demo.train({"rope": folder / "rope"}, overrides)
    assert json.loads(results.read_text(encoding="utf-8"))["metrics"] == metrics


@pytest.mark.slow
def test_a_clean_process_that_fails_is_an_error(tmp_path):
    with pytest.raises(TrainingError, match="clean process failed"):
        demo.continue_prompt(tmp_path, "x")


def test_bad_output(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--output", str(tmp_path / "file")])
    assert str(stop.value.code).startswith("error: output=")
