"""`whatwhere task`: errors of toy checkpoints; questions in words; the command line."""

import json
import math
import re

import pytest
import torch
import transformers

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

from tiny import log_likelihood
from toys import toy_recipe
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import task as script
from whatwhere.scripts.evaluation.answers import count_errors, summarise
from whatwhere.scripts.toy_tasks.registry import task_config
from whatwhere.scripts.training.loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two seeds of a half-trained model, and one of another system of the same name."""
    folder = tmp_path_factory.mktemp("runs")
    tests = {"data__test_sets": {"in_distribution": {}, "dense": {"ignore": 0.0}}, "training__steps": 12}
    for name, changes in {
        "rope-0": {},
        "rope-1": {"seed": 1},
        "none-0": {"model__position_encoding": "none"},
    }.items():
        train(toy_recipe("flip_flop", **tests, **changes), folder / name)
    return folder


def scores(folder):
    sets = json.loads((folder / "results.json").read_text())["metrics"]["test_sets"]
    return {name: {key: value for key, value in each.items() if key != "loss"} for name, each in sets.items()}


def test_equals_the_final_evaluation_of_training(runs):
    folders = [runs / "rope-0", runs / "none-0"]
    entries = script.evaluate([str(folder) for folder in folders], batch_size=7)
    for folder, entry in zip(folders, entries):
        assert entry["test_sets"] == scores(folder)
        assert (entry["task"], entry["name"]) == ("flip_flop", folder.name)
    assert entries[0]["test_sets"]["dense"]["token_error"] > 0


def test_other_sets_samples_and_seeds(runs):
    folder = str(runs / "rope-0")
    (entry,) = script.evaluate([folder], sets={"reads": {"instructions": 2}, "same": {"ignore": 0.0}}, samples=5)
    assert {name: each["sequences"] for name, each in entry["test_sets"].items()} == {"reads": 5, "same": 5}
    assert entry["test_sets"]["reads"]["tokens"] == 5
    one, other = (
        script.evaluate([folder], sets={"dense": {"ignore": 0.0}}, samples=40, seed=seed)[0]["test_sets"]["dense"]
        for seed in (0, 1)
    )
    assert one == scores(runs / "rope-0")["dense"]
    assert one["tokens"] != other["tokens"]
    # The recipe says 40 for all sets; the nearest one counts.
    (entry,) = script.evaluate([folder], sets={"few": {"test_samples": 3}, "all": {}})
    assert {name: each["sequences"] for name, each in entry["test_sets"].items()} == {"few": 3, "all": 40}


def test_checkpoint_without_a_recipe(runs, tmp_path):
    """Needs --task, and has the task's own parameters."""
    folder = runs / "rope-0"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for saved in (model, transformers.AutoTokenizer.from_pretrained(folder)):
        saved.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint='.*give --task. Allowed: 'flip_flop'"):
        script.evaluate([str(tmp_path)])
    sets = {"short": {"instructions": 4, "ignore": 0.0, "test_samples": 40}}
    (entry,) = script.evaluate([str(tmp_path)], task="flip_flop", sets=sets)
    assert entry["test_sets"]["short"] == scores(folder)["dense"]
    _, configs, block = script.test_sets("x", None, task="counting", sets=None, samples=3, seed=2)
    assert {name: config.pass_weight for name, config in configs.items()} == {
        "in_distribution": 50,
        "longer": 100,
        "shorter": 10,
    }
    assert {(config.test_samples, config.seed) for config in configs.values()} == {(3, 2)}
    assert block is None


def test_command_line(runs, tmp_path, capsys):
    folders = [str(runs / name) for name in ("rope-0", "rope-1")]
    script.main([*folders, "--sets", 'dense={"ignore": 0.0}', "--json", str(tmp_path / "out.json")])
    content = json.loads((tmp_path / "out.json").read_text())
    printed = capsys.readouterr().out.strip()
    assert printed == f"{script.table(content['checkpoints'])}\nWritten: {tmp_path / 'out.json'}"
    error = scores(runs / "rope-1")["dense"]["token_error"]
    assert f"| rope-1 | dense | {100 * error:.2f} % |" in printed
    assert [entry["test_sets"]["dense"] for entry in content["checkpoints"]] == [
        scores(runs / name)["dense"] for name in ("rope-0", "rope-1")
    ]
    assert content["command"].startswith("whatwhere task ")


def test_mistakes(runs, refuses):
    table = (
        ("--task", "flipflop", "task='flipflop'"),
        ("--samples", "0", "--samples"),
        ("--batch-size", "0", "--batch-size"),
        ("--sets", "sparse", "--sets"),
        ("--sets", "sparse=[1]", "--sets"),
        ("--sets", 'a={"ignor": 1}', "'ignor'"),
        ("--task", "alice", "--sets", 'a={"sentences": 1}', "sentences=1"),
        ("--device", "gpu", "device='gpu'"),
        ("--task", "alice", "Alice was"),
        ("--task", "counting", "symbols of the task"),
        (runs / "rope-0", "rope-0' is given twice"),
    )
    refuses("task", [(runs / "rope-0", *row) for row in table])


def test_checkpoint_errors(runs, tmp_path, refused):
    with pytest.raises(ValueError, match=r"config\.json"):
        script.evaluate([str(tmp_path)], task="flip_flop")
    for sets in (None, {"few": {"test_samples": 3}}):
        with pytest.raises(ValueError, match=r"task='flipflop' is not valid. Did you mean 'flip_flop'\?"):
            script.evaluate([str(runs / "rope-0")], task="flipflop", sets=sets)
    (tmp_path / "recipe.yaml").write_bytes((runs / "rope-0" / "recipe.yaml").read_bytes())
    with pytest.raises(ValueError, match="not finished"):
        script.evaluate([str(tmp_path)])
    for command in (["length", "--data", "stdlib"], ["compare", str(runs / "rope-0")]):
        assert f"whatwhere train --output {tmp_path} --resume" in refused(*command, str(tmp_path))
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"results.json' is not valid JSON"):
        script.evaluate([str(tmp_path)])
    text = {"name": "text", "data": {"source": "stdlib", "sequence_length": 8}, "model": {}, "training": {}}
    results = json.loads((runs / "rope-0" / "results.json").read_text())
    (tmp_path / "results.json").write_text(json.dumps({**results, "recipe": text}))
    with pytest.raises(ValueError, match=r"data.source: stdlib\): give --task"):
        script.evaluate([str(tmp_path)])
    absolute = toy_recipe("flip_flop", model__position_encoding="absolute", training__steps=1)
    train(absolute, tmp_path / "absolute")
    with pytest.raises(ValueError, match=r"up to 10 tokens.* at most 8"):
        script.evaluate([str(tmp_path / "absolute")], sets={"long": {"instructions": 5}})


# --- counting errors


def test_count_errors_by_hand():
    # The most likely token is 2 everywhere, but 1 at (1, 0).
    logits = torch.zeros(3, 4, 5)
    logits[..., 2] = 1
    logits[1, 0, 1] = 2
    labels = torch.full((3, 4), -100)
    labels[0, 1:3] = torch.tensor([2, 3])
    labels[1, 1] = 1
    # nothing comes before it
    labels[2, 0] = 4
    counts = count_errors(logits, labels)
    assert counts.tolist() == [3, 1, 2, 1]
    assert summarise(counts.tolist()) == {"token_error": 1 / 3, "sequence_error": 0.5, "tokens": 3, "sequences": 2}


@pytest.mark.slow
def test_two_processes_equal_one(runs, stock, two_processes, tmp_path):
    """One process has 3 of 5 samples, and 2 questions of each test set, with 6 answers."""
    for saved in stock:
        saved.save_pretrained(tmp_path / "stock")
    for arguments in (
        [runs / "rope-0", "--samples", 5, "--batch-size", 1],
        [tmp_path / "stock", "--task", "alice", "--samples", 2],
    ):
        printed = two_processes("task", *arguments, "--json", tmp_path / "two.json")
        script.main([*map(str, arguments), "--device", "cpu", "--json", str(tmp_path / "one.json")])
        two, one = (json.loads((tmp_path / f"{name}.json").read_text())["checkpoints"] for name in ("two", "one"))
        assert printed.count("| checkpoint |") == 1
        for name, scores_ in one[0]["test_sets"].items():
            found = two[0]["test_sets"][name]
            assert {**found, "probability": 0} == {**scores_, "probability": 0}
            assert found.get("probability", 0) == pytest.approx(scores_.get("probability", 0), rel=1e-5)


# --- questions in words


@pytest.fixture(scope="module")
def stock():
    """A stock model that was trained on nothing, with bytes as tokens."""
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=258, n_positions=2048, n_embd=16, n_layer=1, n_head=2, bos_token_id=256, eos_token_id=256
    )
    config.initializer_range = 0.5
    return transformers.GPT2LMHeadModel(config).eval(), build_tokenizer("bytes")


def test_alice_by_hand(stock):
    model, tokenizer = stock
    config = task_config("alice", {"test_samples": 6})
    report = script.ask(model, tokenizer, config)
    right, probability, answers = [], 0.0, []
    for index in range(6):
        row = config.row(config.sample("test", index))
        prompt = row["prompt"] + "\n\nAnswer:"
        likelihoods = [log_likelihood(model, tokenizer, prompt, f" {number}") for number in range(6)]
        weights = [math.exp(each - max(likelihoods)) for each in likelihoods]
        answers.append(int(row["answer"]))
        right.append(weights.index(max(weights)) == answers[-1])
        probability += weights[answers[-1]] / sum(weights)
    assert report["questions"] == 6
    assert report["accuracy"] == sum(right) / 6
    assert report["probability"] == pytest.approx(probability / 6, rel=1e-5)
    assert report["most_common"] == max(map(answers.count, answers)) / 6


def test_alice_on_the_command_line(stock, tmp_path, capsys):
    for saved in stock:
        saved.save_pretrained(tmp_path)
    arguments = ["--task", "alice", "--samples", "2", "--json", str(tmp_path / "out.json")]
    script.main([str(tmp_path), *arguments])
    content = json.loads((tmp_path / "out.json").read_text())
    (entry,) = content["checkpoints"]
    assert set(entry["test_sets"]) == {"paper", "sentences_2", "sentences_3", "sentences_5"}
    shown = capsys.readouterr().out
    assert "| right answers | probability of the right answer | always the most common answer |" in shown
    assert re.search(r"\| paper \| .* \| 100.00 % \|\n", shown)
    paper = entry["test_sets"]["paper"]
    assert (paper["questions"], paper["most_common"], list(paper["accuracy_by_place"])) == (2, 1.0, ["earlier"])
