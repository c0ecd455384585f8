"""Model cards: made from files alone, the same bytes each time; the Hub's parser reads them, and their snippets run."""

import copy
import json
import logging
import pathlib
import re
import shutil

import peft
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from processes import python
from whatwhere import (
    WhatWhereGPT2Config,
    WhatWhereLlamaConfig,
    WhatWhereLlamaForCausalLM,
    list_position_encodings,
)
from whatwhere.model_card import _TRAINERS as TRAINERS
from whatwhere.model_card import PAPERS, citation, complete_card, read_card, weights_fingerprint
from whatwhere.scripts.cards.content import Facts, model_card
from whatwhere.scripts.cards.folder import card_of_run as card_at_end
from whatwhere.scripts.commands import card as command
from whatwhere.scripts.commands import compare, convert
from whatwhere.scripts.commands.push import staged
from whatwhere.scripts.conversion.record import card_metadata
from whatwhere.scripts.data import corpora
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.curves import read_curves
from whatwhere.scripts.evaluation.data_description import NO_TEXT, describe_data, is_transfer
from whatwhere.scripts.evaluation.results import read_results
from whatwhere.scripts.reproduction import report
from whatwhere.scripts.training.held_out import prompt_of
from whatwhere.scripts.training.recipe import load_recipe
from whatwhere.scripts.writing import write_json

SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "model_cards"
ORIGIN = {"command": "whatwhere length runs/tiny", "date": "2031-02-03T04:05:06+00:00", "versions": {"torch": "9.8.7"}}
TRAINING = {
    "metrics": {"bits_per_byte": {"value": 2.34567}, "perplexity": {"value": 50.831}},
    "data": {
        "source": "corpus",
        "dataset": None,
        "splits": {"train": "wikipedia_en:train[:9]", "test": "wikitext103_v1:test"},
        "split": "test",
        "place": "local files",
    },
    "length": 32,
    "tokens": 12345,
    "tokens_trained": 108642,
    "recipe": {"name": "tiny_small", "data": {"source": "corpus"}, "training": {"steps": 77}},
    "seed": 3,
    "steps": 77,
    "parameters": 54321,
    "seconds": 89.625,
    "device": "cpu",
    "commit": "0a1b2c3d",
    **ORIGIN,
    "command": "whatwhere train tiny_small --set seed=3 --output runs/tiny",
}
METRICS = [
    {"step": 10, "loss": 5.0},
    {"step": 20, "loss": 4.0},
    {"step": 20, "validation_loss": 4.5, "validation_perplexity": 90.0171},
    {"step": 30, "loss": 3.0},
    {"step": 40, "loss": 2.0},
    {"step": 40, "validation_loss": 4.75, "validation_perplexity": 115.584},
]


def task(samples, limit, **metrics):
    scores = {name: {"value": value, "standard_error": 0.0321} for name, value in metrics.items()}
    return {"metrics": scores, "version": 1.0, "shots": 0, "samples": samples, "split": "test", "limit": limit}


ZERO_SHOT = {
    "tasks": {
        "lambada_openai": task(100, None, acc=0.1234, perplexity=1123299.7),
        "piqa": task(10, 10, acc=0.8765),
    },
    "truncated_requests": 7,
    "max_length": 32,
    **ORIGIN,
}


def cell(length, perplexity, *, reached=True):
    """A measurement as in `length_pg19.json`."""
    found = {"length": length, "multiple": length / 32, "reached": reached, "reason": None if reached else "too long"}
    numbers = {"perplexity": perplexity, "loss": 3.0, "standard_error": 0.01, "bits_per_byte": 1.2345, "tokens": 960}
    return {**found, **(numbers if reached else dict.fromkeys(numbers))}


def entry(name, weights, cells, *, variant=None, encoding="pope"):
    by_position = [{"length": 64, "edges": [0, 16, 64], "loss": [4.0, 3.0], "tokens": [240, 720]}]
    about = {"name": name, "variant": variant, "weights": weights, "trained_length": 32, "position_encoding": encoding}
    return {**about, "tokens_sha256": "0", "cells": cells, "by_position": by_position}


DATA = {"corpus": "pg19", "split": "test", "place": "local files", "joined": False, "documents": 4}
DATA |= {"document_limit": None, "text_tokens": None}


def run_folder(folder, *, encoding="pope", tokenizer="bytes", seed=0, **results):
    """A finished run of a model with random weights."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(tokenizer)
    config = WhatWhereLlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2 if isinstance(encoding, list) else 1,
        num_attention_heads=2,
        max_position_embeddings=32,
        position_encoding=encoding,
    )
    WhatWhereLlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stated = {"weights_sha256": weights_fingerprint(folder)}
    write_json(folder / "results.json", {**TRAINING, **results, **stated})
    write_json(folder / "lm_eval.json", {**ZERO_SHOT, **stated})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A place with two runs, measured together, and their cards."""
    place = tmp_path_factory.mktemp("place")
    runs = [run_folder(place / "runs" / "tiny"), run_folder(place / "runs" / "other", encoding="rope", seed=1)]
    one, two = map(weights_fingerprint, runs)
    entries = [
        entry("tiny", one, [cell(32, 51.25), cell(64, 1234.5)]),
        entry("tiny", one, [cell(64, 60.75), cell(128, None, reached=False)], variant="yarn"),
        entry("other", two, [cell(32, 42.5)], encoding="rope"),
    ]
    write_json(place / "length_pg19.json", {"data": DATA, "checkpoints": entries, **ORIGIN})
    command.make(runs, place / "model_cards", files=[place / "length_pg19.json"])
    return place


@pytest.fixture
def place(made, tmp_path):
    return pathlib.Path(shutil.copytree(made, tmp_path / "place"))


def card_of(place, name="tiny_small_pope"):
    return place / "model_cards" / name


def text_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def model_index(text):
    """The results in a card's metadata, after what the Hub's parser asks of them, as far as it can be checked here."""
    metadata = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    for result in metadata["model-index"][0]["results"]:
        assert result["task"] == {"type": "text-generation"}
        assert re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", result["dataset"]["type"])
        assert isinstance(result["dataset"].get("split", ""), str)
        for metric in result["metrics"]:
            assert set(metric) == {"type", "name", "value"}
            assert type(metric["value"]) in (int, float)
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert eval_results_to_model_index(name, results) == metadata["model-index"]
    assert str(ModelCard(text).data.to_yaml()) == text.split("\n---\n")[0].removeprefix("---\n")
    return {(one.dataset_type, one.metric_name): one.metric_value for one in results}


def test_what_a_card_is_made_of(place):
    folder = card_of(place)
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "card.json",
        "config.json",
        "curves.json",
        "length_pg19.json",
        "length_pg19.png",
        "lm_eval.json",
        "recipe.yaml",
        "results.json",
    ]
    assert yaml.safe_load((folder / "recipe.yaml").read_text()) == TRAINING["recipe"]
    # Own entries only, and none in two folders.
    kept = {
        name: json.loads((card_of(place, name) / "length_pg19.json").read_text())["checkpoints"]
        for name in ("tiny_small_pope", "tiny_small_rope")
    }
    assert [(one["name"], one["variant"]) for one in kept["tiny_small_pope"]] == [("tiny", None), ("tiny", "yarn")]
    assert [one["name"] for one in kept["tiny_small_rope"]] == ["other"]
    assert (folder / "length_pg19.png").read_bytes().startswith(b"\x89PNG")


def test_the_first_screen(place):
    screen = text_of(card_of(place)).split("---\n", 2)[2].partition("## Model")[0]
    for part in (
        "# tiny_small_pope",
        "54,321 parameters",
        "Held-out result: 2.346 bits per byte, perplexity 50.83 per token of a 258-entry tokenizer, `wikitext103_v1:",
        "](length_pg19.png)",
        "Perplexity per token ± standard error on PG-19 (books of Project Gutenberg from before 1919), test split: 4 ",
        "| **this model** | pope | 32 | 51.25 ± 0.51 | 1,234 ± 12 | - |",
        "| **this model**, yarn | pope | 32 | - | 60.75 ± 0.61 | not supported |",
        "| [tiny_small_rope](../tiny_small_rope/README.md) | rope | 32 | 42.50 ± 0.42 | - | - |",
        "```python",
        TRAINING["command"],
    ):
        assert part in screen
    assert screen.count("![") == 1
    assert len(re.findall(r"^\|---", screen, re.MULTILINE)) == 1
    assert len(screen.splitlines()) < 40


def test_the_rest_of_the_card(place):
    text = text_of(card_of(place))
    for part in (
        "| perplexity per token | 50.8310 |",
        "| lambada_openai | 1.0 | test | 0 | 100 | acc | 0.1234 ± 0.0321 |",
        "| piqa | 1.0 | test | 0 | first 10 | acc |",
        "7 requests",
        "[recipe.yaml](recipe.yaml)",
        "| train | `wikipedia_en:train[:9]` |",
        "| validation loss after step 40, nats per token | 4.7500 |",
        "0a1b2c3d",
        "torch 9.8.7",
        "WikiText-103 (word level, with \\<unk>): CC BY-SA 3.0, GFDL",
    ):
        assert part in text
    # Worse than guessing: more than the vocabulary.
    assert "1,123,29" not in text
    assert "112329" not in text
    for key, value in AutoConfig.from_pretrained(card_of(place)).position_encoding_parameters.items():
        # Without `frequencies`, theta gives them.
        assert (f"| `{key}` | `{value!r}` |" in text) == (value is not None)


def test_model_index_holds_whole_measurements_that_mean_something(place):
    text = text_of(card_of(place))
    assert model_index(text) == {
        ("wikitext103_v1", "bits per byte, final evaluation"): 2.34567,
        ("wikitext103_v1", "perplexity per token of a 258-entry tokenizer, final evaluation"): 50.831,
        ("pg19", "perplexity per token of a 258-entry tokenizer, at 32 tokens"): 51.25,
        ("pg19", "perplexity per token of a 258-entry tokenizer, at 64 tokens"): 1234.5,
        ("pg19", "perplexity per token of a 258-entry tokenizer, at 64 tokens, yarn"): 60.75,
        ("lambada_openai", "acc"): 0.1234,
    }
    assert ModelCard(text).data.license == "apache-2.0"
    path = card_of(place) / "length_pg19.json"
    content = json.loads(path.read_text())
    write_json(path, {**content, "data": {**content["data"], "text_tokens": 2000}})
    command.write_card(card_of(place))
    assert not any(dataset == "pg19" for dataset, _ in model_index(text_of(card_of(place))))


def test_the_card_needs_its_own_files_alone_and_gives_the_same_bytes(place):
    before = files_of(place / "model_cards")
    shutil.rmtree(place / "runs")
    command.main(["--output", str(place / "model_cards")])
    assert files_of(place / "model_cards") == before


def test_every_measured_number_comes_from_the_files(place):
    folder = card_of(place)
    for name, old, new, shown in (
        ("results.json", "50.831", "47.123", "47.1230"),
        ("results.json", "54321", "54329", "54,329"),
        ("curves.json", "4.75", "4.25", "4.2500"),
        ("lm_eval.json", "0.1234", "0.4321", "0.4321"),
        ("length_pg19.json", "60.75", "70.75", "70.75"),
    ):
        text = (folder / name).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
        assert shown not in text_of(folder)
        command.write_card(folder)
        assert shown in text_of(folder)


def text_block(folder):
    (block,) = re.findall(r"^```text\n(.*?)\n```$", text_of(folder), re.MULTILINE | re.DOTALL)
    return block


def test_a_sample_of_the_model_s_own_text(place, capsys):
    run = place / "runs" / "tiny"
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    results["data"]["prompt"] = 'A "text"'
    write_json(run / "results.json", results)
    command.main([str(run), "--name", str(run)])
    before = files_of(run)
    sample = json.loads(before["sample.json"])
    assert (sample["prompt"], sample["tokens"]) == ('A "text"', 24)
    capsys.readouterr()
    exec(snippet_of(run), {})
    assert capsys.readouterr().out == sample["text"] + "\n"
    assert "".join(one if one.isprintable() or one == "\n" else "\ufffd" for one in sample["text"]) == text_block(run)
    assert "The prompt is from the held-out text." in text_of(run)
    # It is recorded once, for these weights.
    command.main([str(run), "--name", str(run)])
    assert files_of(run) == before
    write_json(run / "sample.json", {**sample, "text": "a\r\x0b```\nb"})
    command.main([str(run)])
    assert "\n````text\na\ufffd\ufffd```\nb\n````\n" in text_of(run)
    assert read_card(run)[1] is not None
    model = WhatWhereLlamaForCausalLM.from_pretrained(run)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(run)
    command.main([str(run)])
    assert text_block(run) != sample["text"]
    # Cards without weights are of files alone.
    assert "It prints" not in text_of(card_of(place))


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("\n\nCHAPTER I.\n\n  It was a dark and stormy night; the rain fell in torrents, except", None),
        ("short text", "short text"),
        ("74 70 65 58 " * 20, "74 70 65 58 74 70 65 58 74 70 65 58 74 70 65 58 74 70 65 58"),
        ("ACGT" * 40, "ACGT" * 15),
        (" \n", ""),
    ],
)
def test_a_prompt_is_the_beginning_of_a_document(text, prompt):
    expected = "It was a dark and stormy night; the rain fell in torrents," if prompt is None else prompt
    assert prompt_of([{"text": " "}, {"text": text}], 128) == expected
    assert len(prompt_of([{"text": text}], 16)) <= 8


def test_length_results_of_several_runs_reach_the_card_beside_the_weights(place):
    runs = [str(place / "runs" / name) for name in ("tiny", "other")]
    command.main([*runs, "--results", str(place / "length_pg19.json")])
    for run, value, other in ((runs[0], "51.25", "42.50"), (runs[1], "42.50", "51.25")):
        text = text_of(pathlib.Path(run))
        assert f"| {value} ± " in text
        assert other not in text


def test_a_given_licence_is_kept(place):
    run, text = place / "runs" / "tiny", "## Licence\n\nCode, weights and this card: apache-2.0."
    command.main([str(run)])
    assert text in text_of(run)
    for options in (["--licence", "mit"], [], ["--name", "me/x"]):
        command.main([str(run), *options])
        assert ModelCard(text_of(run)).data.license == "mit"
        assert "## Licence\n\nWeights: mit.\n\nLicences of the data:" in text_of(run)
    assert 'name = "me/x"' in text_of(run)
    # One that is only derived follows the results.
    path = card_of(place) / "results.json"
    write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "licence": "cc0-1.0"})
    command.write_card(card_of(place))
    assert ModelCard(text_of(card_of(place))).data.license == "cc0-1.0"
    # A push keeps it, too.
    for licence, stated in (("bsd-3-clause", "bsd-3-clause"), (None, "bsd-3-clause")):
        shutil.rmtree(place / "staged", ignore_errors=True)
        (place / "staged").mkdir()
        staged(run, place / "staged", "me/x", licence)
        assert f"Weights: {stated}." in text_of(place / "staged")
    command.main([str(run), "--output", str(place / "model_cards"), "--licence", "mit"])
    command.main(["--output", str(place / "model_cards")])
    assert ModelCard(text_of(card_of(place))).data.license == "mit"


def test_metadata_of_a_user_stay(place):
    run = place / "runs" / "tiny"
    command.main([str(run)])
    card = ModelCard(text_of(run))
    ours = card.data.to_dict()
    mine = {"language": "en", "datasets": ["me/texts"], "license": ["mit", "apache-2.0"], "pipeline_tag": "fill-mask"}
    for key, value in mine.items():
        card.data[key] = value
    card.data["tags"] = ["first", *card.data.tags]
    card.data["metrics"] = [*card.data.metrics, "rouge"]
    card.save(run / "README.md")
    # Written twice, pushed, and saved with other weights.
    for _ in range(2):
        command.main([str(run)])
        found = ModelCard(text_of(run)).data.to_dict()
        added = {"tags": [*ours["tags"], "first"], "metrics": [*ours["metrics"], "rouge"]}
        assert found == {**ours, **mine, **added}
        assert "## Licence\n\nWeights: mit, apache-2.0.\n" in text_of(run)
    (place / "staged").mkdir()
    staged(run, place / "staged", "me/x")
    assert ModelCard(text_of(place / "staged")).data.to_dict() == found
    model = WhatWhereLlamaForCausalLM.from_pretrained(run)
    model.save_pretrained(place / "copy")
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    expected = {key: value for key, value in found.items() if key != "model-index"} | {"metrics": ["rouge"]}
    for folder in (place / "copy", run):
        model.save_pretrained(folder)
        assert ModelCard(text_of(folder)).data.to_dict() == expected


def test_text_of_a_user_is_not_replaced(place, capsys):
    run = place / "runs" / "tiny"
    command.main([str(run)])
    for text in (text_of(run).replace("54,321", "many"), "# Mine\n\nIt likes rain.\n"):
        (run / "README.md").write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"README.md' was written or edited by hand, and is kept: move it away"):
            command.main([str(run)])
        assert text_of(run) == text
    # In a folder of cards, nothing beside it changes.
    (card_of(place) / "README.md").write_text("# Mine\n", encoding="utf-8")
    before = files_of(card_of(place))
    with pytest.raises(ValueError, match="by hand"):
        command.main([str(run), "--output", str(place / "model_cards")])
    assert files_of(card_of(place)) == before
    # At the end of training.
    results = (run / "results.json").read_bytes()
    (run / "results.json").unlink()
    with card_at_end(run):
        (run / "results.json").write_bytes(results)
    assert "The run is finished, but no card is written: " in capsys.readouterr().err
    assert text_of(run) == text


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"---\nlicense: [mit\n---\n# x\n", "expected ',' or ']'"), (b"# x \xff\n", "can't decode byte 0xff")],
    ids=["yaml", "latin"],
)
def test_a_card_that_cannot_be_read(place, content, reason, caplog, monkeypatch):
    run = place / "runs" / "tiny"
    (run / "README.md").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(reason)) as error:
        command.main([str(run)])
    assert str(error.value).startswith(f"{str(run / 'README.md')!r} is not a valid model card: ")
    assert "\n" not in str(error.value)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    WhatWhereLlamaForCausalLM.from_pretrained(run).save_pretrained(run)
    (warning,) = [one.getMessage() for one in caplog.records if "model card" in one.getMessage()]
    assert warning.startswith(f"No model card is written: {str(run / 'README.md')!r} is not a valid model card: ")
    assert (run / "README.md").read_bytes() == content


def test_only_the_name_in_the_code_changes(place):
    run = place / "runs" / "tiny"
    text = 'name = "a"\nname = "b"\nopen("/etc/mine/x")\n## Model\n'
    command.main([str(run), "--name", 'it"s'])
    sample = json.loads((run / "sample.json").read_text(encoding="utf-8"))
    write_json(run / "sample.json", {**sample, "prompt": 'see /etc/mine/y\nname = "c"', "text": text})
    command.main([str(run), "--name", 'it"s'])
    before = text_of(run)
    assert text in before
    (place / "staged").mkdir()
    staged(run, place / "staged", "me/x")
    expected = before.replace('name = "it\\"s"', 'name = "me/x"', 1)
    assert expected != before
    # But for the digest of the text.
    assert text_of(place / "staged").partition("<!--")[0] == expected.partition("<!--")[0]
    assert (place / "staged" / "sample.json").read_bytes() == (run / "sample.json").read_bytes()
    WhatWhereLlamaForCausalLM.from_pretrained(run).save_pretrained(place / "copy")
    expected = before.replace('name = "it\\"s"', 'name = "copy"', 1)
    assert text_of(place / "copy").partition("<!--")[0] == expected.partition("<!--")[0]


def test_figures_of_results_beside_the_weights(place):
    run = place / "runs" / "tiny"
    command.main([str(run), "--results", str(place / "length_pg19.json")])
    assert (run / "length_pg19.png").read_bytes().startswith(b"\x89PNG")
    assert "](length_pg19.png)" in text_of(run)
    # One without a figure, first in order, does not remove the other.
    shutil.copy(run / "length_pg19.json", run / "length_a.json")
    command.main([str(run)])
    assert "](length_pg19.png)" in text_of(run)


def test_results_on_training_text_are_marked(place, capsys):
    path = card_of(place) / "length_pg19.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    sentence = "measured on text that the model was trained on."
    assert sentence not in text_of(card_of(place))
    write_json(path, {**content, "checkpoints": [{**one, "trained_on": True} for one in content["checkpoints"]]})
    command.main(["--output", str(place / "model_cards")])
    assert f" **this model**: {sentence}\n" in text_of(card_of(place))
    name = "tiny_small_pope"
    assert f" [{name}](../{name}/README.md): {sentence}\n" in text_of(card_of(place, "tiny_small_rope"))
    assert not any(dataset == "pg19" for dataset, _ in model_index(text_of(card_of(place))))
    assert any(dataset == "pg19" for dataset, _ in model_index(text_of(card_of(place, "tiny_small_rope"))))
    capsys.readouterr()
    compare.main([str(card_of(place, one)) for one in (name, "tiny_small_rope")])
    assert f"(!) length_pg19 of {name}: {sentence}\n" in capsys.readouterr().out
    # Extrapolation needs windows longer than the trained length.
    sentence = "Length extrapolation was not measured."
    assert sentence not in text_of(card_of(place))
    write_json(path, {**content, "checkpoints": [{**content["checkpoints"][0], "cells": [cell(32, 51.25)]}]})
    command.write_card(card_of(place))
    assert sentence in text_of(card_of(place))


def test_own_files_in_a_card():
    files = [f"my/{name}.txt" for name in ("a|`b`", "*c*", "d", "e")]
    data = describe_data({"source": "local", "split": "validation", "train_file": files})
    shown = "my/a\\|\\`b\\`.txt, my/\\*c\\*.txt and 2 more"
    training = {"metrics": {"bits_per_byte": {"value": 1.5}, "perplexity": {"value": 3.0}}, "data": data, **ORIGIN}
    training |= {"unit": "byte", "held_out": {"texts": [{"documents": 4}]}}
    text = card_of_run(training).text
    result = f"1.5 bits per byte, perplexity 3 per byte, a held-out part of {shown}, validation split."
    assert f"Held-out result: {result}" in text
    assert f"| train | all but the held-out part | {shown} |\n" in text
    assert f"| validation | the held-out part, of 4 documents | {shown} |\n" in text
    assert text.count(f"{shown}: not known") == 1
    assert "Perplexity is" not in text
    other = {
        **training,
        "data": describe_data(
            {"source": "local", "split": "validation", "splits": {"train": "a\nb.txt", "validation": "c.txt"}}
        ),
    }
    text = card_of_run(other).text
    assert "| train | all | a b.txt |\n| validation | all | c.txt |\n" in text
    other = {**training, "data": describe_data({"source": "stdlib", "split": "test"})}
    assert "| train | the train split | source code of " in card_of_run(other).text


def test_the_name_of_a_card_has_the_encoding_once(tmp_path):
    recipes = {"demo_rope": "demo_rope", "europe": "europe_rope", "rope": "rope"}
    for recipe, name in recipes.items():
        run = run_folder(tmp_path / recipe, encoding="rope", recipe={**TRAINING["recipe"], "name": recipe})
        assert command.card_folder(run, tmp_path / "cards").name == name


def test_the_card_beside_the_weights(place, capsys):
    run = place / "runs" / "tiny"
    command.main([str(run)])
    assert capsys.readouterr().out.strip() == str(run / "README.md")
    text = text_of(run)
    assert 'name = "tiny"' in text
    assert "| perplexity per token | 50.8310 |" in text
    assert "not published" not in text
    # Results about other weights are left out.
    write_json(run / "lm_eval.json", {**ZERO_SHOT, "weights_sha256": "0" * 64})
    assert "lambada" not in text_of(command.write_card(run).parent)


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_a_card_travels_with_its_weights_and_only_these(place, change):
    run = place / "runs" / "tiny"
    write_json(
        run / "length.json", {"data": DATA, "checkpoints": [], **ORIGIN, "weights_sha256": weights_fingerprint(run)}
    )
    (run / "README.md").write_text(text_of(command.write_card(run).parent), encoding="utf-8")
    model = WhatWhereLlamaForCausalLM.from_pretrained(run)
    with torch.no_grad():
        model.lm_head.weight.add_(change)
    model.save_pretrained(place / "copy")
    assert ("50.8310" in text_of(place / "copy")) == (change == 0)
    assert 'name = "copy"' in text_of(place / "copy")
    # In place: only a card that somebody has edited is theirs to correct.
    model.save_pretrained(run)
    assert ("50.8310" in text_of(run)) == (change == 0)


def test_the_short_card(tmp_path):
    config = WhatWhereLlamaConfig(
        **{"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
        num_attention_heads=2,
        position_encoding="cope+rope",
    )
    model = WhatWhereLlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "it's *x*")
    card = ModelCard(text_of(tmp_path / "it's *x*"))
    assert (card.data.license, card.data.library_name) == (None, "transformers")
    assert card.data.tags == ["whatwhere", "whatwhere_llama", "position-encoding", "cope", "rope"]
    assert card.data.eval_results is None
    assert "# it's \\*x\\*\n" in card.text
    for name, value in config.position_encoding_parameters["cope"].items():
        assert f"| `cope.{name}` | `{value!r}` |" in card.text
    # Tags and licence that somebody added stay; those of an old encoding go. An edited text stays whole.
    card.data["tags"] = [*card.data["tags"], "mine"]
    card.data["license"] = "mit"
    card.save(tmp_path / "it's *x*" / "README.md")
    other_config = copy.deepcopy(config)
    other_config.position_encoding, other_config.position_encoding_parameters = "pope", None
    other = WhatWhereLlamaForCausalLM(other_config)
    other.save_pretrained(tmp_path / "it's *x*")
    card = ModelCard(text_of(tmp_path / "it's *x*"))
    assert card.data.tags == ["whatwhere", "whatwhere_llama", "position-encoding", "pope", "mine"]
    assert card.data.license == "mit"
    assert "## Licence\n\nWeights: mit.\n" in card.text
    edited = text_of(tmp_path / "it's *x*").replace("made with", "written with")
    (tmp_path / "it's *x*" / "README.md").write_text(edited, encoding="utf-8")
    model.save_pretrained(tmp_path / "it's *x*")
    assert text_of(tmp_path / "it's *x*") == edited


def test_a_converted_model_is_untrained(tmp_path):
    run_folder(tmp_path / "source", encoding="rope")
    stated = "---\nlicense: mit\nbase_model: someone/model\n---\n# Source\n"
    (tmp_path / "source" / "README.md").write_text(stated, encoding="utf-8")
    folder = tmp_path / "converted"
    convert.main([str(tmp_path / "source"), "--position-encoding", "pope", "--output", str(folder)])
    for _ in range(2):
        command.main([str(folder)])
        card = ModelCard.load(folder / "README.md")
        assert "encoding `pope`, converted from `source`. It was not trained after the conversion. Its 1" in card.text
        assert "6 new parameters are untrained. An encoding that the source does not have needs fine-" in card.text
        assert re.search(r"`frequencies` \| `\[1.0, (1.0, |... \(16 in all\))", card.text)
        assert (card.data.license, card.data.base_model) == ("mit", "someone/model")
    # Trained in the same folder, it is no longer untrained.
    results = {**TRAINING, "base_folder": "source", "weights_sha256": weights_fingerprint(folder)}
    write_json(folder / "results.json", results)
    command.main([str(folder)])
    assert "fine-tuned from `source`" in text_of(folder)
    assert "untrained" not in text_of(folder)


# Of PEFT.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_is_made_from_a_model_names_it(tmp_path):
    """On every way of training and saving; it is in the configuration, so that no card needs to be there."""
    run_folder(tmp_path / "source", encoding="rope")
    stated = "---\nlicense: other\nlicense_name: own\nbase_model: someone/model\nlanguage: [en, de]\n---\n# Source\n"
    (tmp_path / "source" / "README.md").write_text(stated, encoding="utf-8")
    convert.main([str(tmp_path / "source"), "--position-encoding", "cope", "--output", str(tmp_path / "converted")])
    (tmp_path / "converted" / "README.md").unlink()

    def trained(name):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        with torch.no_grad():
            model.lm_head.weight.add_(1.0)
        return model

    trained("converted").save_pretrained(tmp_path / "tuned")
    trained("tuned").save_pretrained(tmp_path / "again")
    adapters = peft.get_peft_model(trained("again"), peft.LoraConfig(target_modules=["q_proj"]))
    adapters.merge_and_unload().save_pretrained(tmp_path / "merged")
    settings = TrainingArguments(str(tmp_path / "output"), report_to=[])
    trainer = Trainer(trained("merged"), settings)
    trainer.save_model(str(tmp_path / "saved"))
    trainer.create_model_card()
    trainer.save_model()
    build_tokenizer("bytes").save_pretrained(tmp_path / "saved")
    convert.main([str(tmp_path / "saved"), "--position-encoding", "rope", "--output", str(tmp_path / "second")])
    for name in ("converted", "tuned", "again", "merged", "saved", "output", "second"):
        for _ in range(2):
            if (tmp_path / name / "README.md").is_file():
                data = ModelCard.load(tmp_path / name / "README.md").data
                assert (data.base_model, data.license_name, data.language) == ("someone/model", "own", ["en", "de"]), (
                    name
                )
                assert data.license == "other"
            # The full card.
            command.main([str(tmp_path / name)])
    text = text_of(tmp_path / "tuned")
    assert "`cope`, made from [`someone/model`](https://huggingface.co/someone/model)." in text
    assert "Weights: other, as in the card of [`someone/model`]" in text
    # Also if only the card that is replaced states it.
    config = json.loads((tmp_path / "converted" / "config.json").read_text())
    write_json(tmp_path / "converted" / "config.json", {**config, "origin": None})
    command.main([str(tmp_path / "converted")])
    assert ModelCard.load(tmp_path / "converted" / "README.md").data.base_model == "someone/model"
    # A licence that is changed by hand is kept.
    command.main([str(tmp_path / "tuned"), "--licence", "mit"])
    trained("tuned").save_pretrained(tmp_path / "by hand")
    assert ModelCard.load(tmp_path / "by hand" / "README.md").data.license == "mit"


def test_a_new_model_names_nothing(tmp_path):
    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = WhatWhereLlamaForCausalLM(WhatWhereLlamaConfig(**sizes, num_attention_heads=2))
    for name in ("new", "loaded"):
        model.save_pretrained(tmp_path / name)
        data = ModelCard.load(tmp_path / name / "README.md").data
        assert (data.license, data.base_model) == (None, None)
        model = WhatWhereLlamaForCausalLM.from_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "loaded" / "config.json").read_text())["origin"] is None


def test_the_example_of_a_chat_model(place):
    run = place / "runs" / "tiny"
    command.main([str(run)])
    assert "apply_chat_template" not in text_of(run)
    tokenizer = build_tokenizer("bytes")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(run)
    command.main([str(run)])
    (block,) = (one for one in re.findall(r"```python\n(.*?)```", text_of(run), flags=re.DOTALL) if "messages" in one)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run), AutoTokenizer.from_pretrained(run)
    exec(block.replace("max_new_tokens=100", "max_new_tokens=2"), {"model": model, "tokenizer": tokenizer})


def test_a_generic_card_is_replaced_and_one_by_hand_is_not(place):
    run = place / "runs" / "tiny"
    config = AutoConfig.from_pretrained(run)
    generic = ModelCard.from_template(
        ModelCardData(tags=["mine"], library_name="transformers"),
        model_description="This is the model card of a 🤗 transformers model that has been pushed on the Hub.",
    )
    generic.save(run / "README.md")
    complete_card(run, config, name="me/x")
    assert {"mine", "pope"} <= set(ModelCard(text_of(run)).data.tags)
    assert 'name = "me/x"' in text_of(run)
    (run / "README.md").write_text("---\nlicense: mit\n---\nwritten by hand\n", encoding="utf-8")
    complete_card(run, config, name="me/x")
    assert text_of(run).endswith("written by hand\n")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_template_of_peft_is_no_card_of_a_user(tmp_path):
    run = run_folder(tmp_path / "run")
    model = WhatWhereLlamaForCausalLM.from_pretrained(run)
    lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path / "adapter")
    template = text_of(tmp_path / "adapter")
    for sentence, is_kept in (("", False), ("It likes rain.", True)):
        text = template.replace("## Uses\n", f"## Uses\n{sentence}\n")
        (run / "README.md").write_text(text, encoding="utf-8")
        (tmp_path / sentence).mkdir(exist_ok=True)
        staged(run, tmp_path / sentence, "me/x")
        assert (text_of(tmp_path / sentence) == text) == is_kept
        assert ("# run\n" in text_of(run)) != is_kept
        shutil.rmtree(tmp_path / sentence) if sentence else (tmp_path / "README.md").unlink()


@pytest.mark.parametrize("word", ["Trainer", "TRL"])
def test_cards_of_trainers_get_metadata(tmp_path, word):
    run = run_folder(tmp_path / "run")
    about = next(text for text in TRAINERS if word in text)
    for put in (lambda: command.main([str(run), "--licence", "mit"]), lambda: staged(run, tmp_path, "me/x", "mit")):
        (run / "README.md").write_text(f"---\ntags:\n- trl\n---\n\n# Mine\n\n{about}\n", encoding="utf-8")
        put()
        card = ModelCard(text_of(run))
        assert card.text.strip() == f"# Mine\n\n{about}"
        assert (card.data.license, card.data.pipeline_tag) == ("mit", "text-generation")
        assert card.data.tags[0] == "trl"
        with pytest.raises(ValueError, match="name='x' has no effect"):
            command.write_card(run, name="x")
        assert "pope" in card.data.tags


def test_other_heads(tmp_path):
    for head, tag in (
        ("SequenceClassification", "text-classification"),
        ("TokenClassification", "token-classification"),
    ):
        config = WhatWhereLlamaConfig(architectures=[f"WhatWhereLlamaFor{head}"])
        card = model_card(Facts(config=config, results={}), name="x", weights="0")
        assert card.data.pipeline_tag == tag
        assert f"AutoModelFor{head}.from_pretrained" in card.text
    config = WhatWhereLlamaConfig(architectures=["WhatWhereLlamaModel"])
    card = model_card(Facts(config=config, results={}), name="x", weights="0")
    assert card.data.pipeline_tag is None
    assert "AutoModel.from_pretrained" in card.text


def card_of_run(training, **facts):
    """The card of a run with these results, whose weights are beside it."""
    return model_card(
        Facts(config=WhatWhereLlamaConfig(), results={"results": training}, **facts), name="x", weights="0"
    )


def test_licence_base_model_and_data_of_a_fine_tuned_model():
    data = describe_data({"source": "hub", "dataset": "me/texts", "split": "test"})
    training = {"metrics": {"loss": {"value": 0.5}}, "data": data, "base_model": "openai-community/gpt2", **ORIGIN}
    card = card_of_run(training)
    assert card.data.datasets == ["me/texts"]
    assert card.data.base_model == "openai-community/gpt2"
    # That of the base model is not known here.
    assert card.data.license is None
    # A local folder: the licence that its card states.
    training |= {"base_model": None, "base_folder": "mine", "base_weights_sha256": "0"}
    assert card_of_run(training).data.license is None
    card = card_of_run({**training, "licence": "mit"})
    assert card.data.license == "mit"
    assert ", fine-tuned from `mine`" in card.text
    assert "Weights: mit, as in the card of `mine`." in card.text
    origin = {"source": "stock"}
    card = card_of_run({**training, "base_conversion": origin})
    assert ", fine-tuned from `mine` (converted from `stock`) on " in card.text
    card = card_of_run({**training, "base_conversion": {**origin, "gguf_file": "m.gguf"}})
    assert ", fine-tuned from `mine` (converted from `stock`, dequantised from `m.gguf`) on " in card.text
    # A base model on the Hub is the source itself.
    card = card_of_run({**training, "base_model": "me/a", "base_conversion": {**origin, "source": "me/a"}})
    assert ", fine-tuned from [`me/a`](https://huggingface.co/me/a) on " in card.text
    # The Hub takes lists. The name is escaped.
    card = card_of_run({**training, "licence": ["mit", "apache-2.0"], "base_folder": "m`[x](y)"})
    assert card.data.license == ["mit", "apache-2.0"]
    assert "Weights: mit, apache-2.0, as in the card of m\\`\\[x\\](y)." in card.text
    training |= {"base_model": ["me/a", "me/b"], "metrics_before": {"loss": {"value": 1.25}}}
    card = card_of_run(training)
    assert (
        "| metric | before fine-tuning | after |\n|---|---|---|\n| loss, nats per token | 1.2500 | 0.5000 |"
        in card.text
    )
    links = [f"[`me/{name}`](https://huggingface.co/me/{name})" for name in "ab"]
    assert f", fine-tuned from {', '.join(links)} on [me/texts](https://huggingface.co/datasets/me/texts)." in card.text


def test_the_licence_of_a_model_of_the_hub(monkeypatch):
    def load(name, **options):
        assert name == "me/source"
        return ModelCard("---\nlicense: other\nlicense_name: mine\nbase_model: you/first\n---\n")

    monkeypatch.setattr(ModelCard, "load", load)
    stated = card_metadata("me/source")
    assert stated == {"base_model": "you/first", "license": "other", "license_name": "mine"}
    config = WhatWhereLlamaConfig(origin={**stated, "base_model": "me/source"})
    conversion = {"source": "me/source", "new": 0}
    card = model_card(Facts(config=config, results={}, conversion=conversion), name="x", weights="0")
    assert (card.data.license, card.data.license_name, card.data.base_model) == ("other", "mine", "me/source")
    assert ", converted from [`me/source`](https://huggingface.co/me/source). It was not trained" in card.text


def test_the_optimisation_of_runs():
    recipe = load_recipe("demo_pope").resolved()
    training = {"metrics": {"loss": {"value": 0.5}}, "recipe": recipe, "steps": 500, "tokens_trained": 1024000}
    training |= {"data": describe_data({"source": "stdlib", "split": "test"}), **ORIGIN}
    rows = [
        "| batch size per step | 8 sequences, 2,048 tokens |",
        "| learning rate | 0.002 |",
        "| warm-up | 25 steps |",
    ]
    rows += ["| schedule | cosine, down to 0 |", "| weight decay | 0.01 |", "| precision | float32 |"]
    rows += ["| optimiser | AdamW, betas 0.9 and 0.999, epsilon 1e-08 |", "| largest gradient norm | 1 |"]
    text = card_of_run(training).text
    assert [row for row in rows if row not in text] == []
    own = {"new_learning_rate": 0.03, "lora": True, "lora_rank": 4, "lora_alpha": 8.0, "lora_dropout": 0.0}
    text = card_of_run({**training, "recipe": own, "training": recipe["training"]}).text
    rows += ["| learning rate of new parameters | 0.03 |", "| LoRA | rank 4, alpha 8 |"]
    assert [row for row in rows if row not in text] == []


def test_papers_of_all_encodings():
    stated = {one["title"]: one for one in yaml.safe_load((SHIPPED.parent / "CITATION.cff").read_text())["references"]}
    for title, authors in PAPERS.values():
        if title in stated:
            names = [f"{one['given-names']} {one['family-names']}" for one in stated.pop(title)["authors"]]
            assert authors == " and ".join(names)
    assert not stated
    used = set()
    for name in list_position_encodings():
        text = "\n".join(citation(WhatWhereGPT2Config(position_encoding=name)))
        used |= {source for source, (title, _) in PAPERS.items() if f"title = {{{title}}}" in text}
        for part in name.split("+"):
            assert f"`{part}` ([code](position_{part}.py))" in text
        assert text.count("@misc{") == len({*name.split("+")} - {"token_gated_cope"})
    assert used == set(PAPERS)


def test_weights_of_a_text_without_a_licence_have_none():
    training = {"metrics": {"loss": {"value": 0.5}}, "data": {"source": "stdlib", "split": "test"}, **ORIGIN}
    card = card_of_run(training)
    assert card.data.license == "apache-2.0"
    training["data"] = {"source": "local", "train_file": "a.txt", "split": "validation"}
    card = card_of_run(training)
    assert card.data.license is None
    assert "The licence of the weights is not stated." in card.text


def test_a_toy_task():
    example = {"prompt": "w 1", "answer": "1", "tokens": 1}
    data = describe_data({"source": "task", "task": "flip_flop", "split": "test", "example": example, "prompt": "w 1"})
    sets = {"dense": {"token_error": 0.0123, "sequence_error": 0.5, "tokens": 40, "sequences": 20}}
    recipe = {"data": {"test_sets": {"dense": {"ignore": 0.5, "test_samples": 20}}}}
    training = {"metrics": {"test_sets": sets}, "data": data, "recipe": recipe, **ORIGIN}
    card = card_of_run(training, has_tokenizer=True)
    assert "| dense | ignore 0.5 | 1.23 % | 50.00 % | 40 | 20 |" in card.text
    assert 'tokenizer("w 1", return_tensors' in card.text
    assert {one.metric_type: one.metric_value for one in card.data.eval_results} == {
        "token_error": 0.0123,
        "sequence_error": 0.5,
    }


def test_data_are_described_from_the_list_of_corpora():
    for name, corpus in corpora.CORPORA.items():
        about = describe_data({"source": "corpus", "splits": {"train": f"{name}:train"}, "split": "train"})
        train = about["described"]["train"]
        assert (train["title"], train["licence"]) == (corpus.title, corpus.licence)
        assert about["kind"] == ("symbols" if name in NO_TEXT else "text")
        assert describe_data(about) == about
    assert describe_data({"source": "stdlib", "split": "test"})["described"]["test"]["licence"] == "PSF License"
    assert is_transfer("wikipedia_en", "wikitext103_v1")
    # The training split of MAESTRO is made of the same performances, transposed.
    assert not is_transfer("maestro_transposed", "maestro")


def test_curves_are_means_of_consecutive_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("whatwhere.scripts.evaluation.curves.POINTS", 3)
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in [*METRICS, {"step": 50, "loss": 7.5}]))
    found = read_curves(file)
    assert found["training"] == [
        {"step": 20, "loss": 4.5},
        {"step": 40, "loss": 2.5},
        {"step": 50, "loss": 7.5},
    ]
    assert found["validation"][1] == {"step": 40, "loss": 4.75}
    file.write_text("")
    assert read_curves(file) == {"training": [], "validation": []}


def test_paths_of_a_machine_stay_there(place):
    run = place / "runs" / "tiny"
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    results["command"] = f"whatwhere train tiny_small --data-dir '/data/of me/x' --output {run}"
    results["recipe"]["data"]["tokenizer"] = "/somewhere/else/tokenizer"
    write_json(run / "results.json", results)
    command.make([run], place / "model_cards")
    folder = card_of(place)
    assert "tokenizer: tokenizer\n" in (folder / "recipe.yaml").read_text()
    assert 'name = "tiny"' in text_of(folder)
    assert str(place) not in text_of(folder) + (folder / "results.json").read_text(encoding="utf-8")


def test_tables_and_the_list(place):
    table = json.loads((SHIPPED / "cope_3_small" / "results.json").read_text(encoding="utf-8"))
    output = place / "model_cards"
    write_json(output / "cope_3_small" / "results.json", table)
    (output / "README.md").write_text(f"before\n{command.INDEX[0]}\nold\n{command.INDEX[1]}\nafter\n")
    assert command.make([], output)[-1] == output / "README.md"
    assert text_of(output / "cope_3_small") == report.markdown(table, card=True)
    text = text_of(output)
    assert (text.startswith("before\n"), text.endswith("\nafter\n"), "\nold\n" in text) == (True, True, False)
    assert "[`tiny_small_pope`](tiny_small_pope/README.md)" in text
    assert "[`cope_3_small`](cope_3_small/README.md)" in text


def test_a_plan_by_layer(tmp_path):
    run = run_folder(tmp_path / "run", encoding=["rope", "cope+rope"])
    assert "position encoding `rope, cope+rope`, made with" in text_of(run)
    (card, *_) = command.make([run], tmp_path / "cards")
    assert card.parent.name == "tiny_small_rope-cope_rope"
    assert "the position encoding `rope, cope+rope`" in card.read_text(encoding="utf-8")
    assert "| `rope, cope+rope` |" in command.index(tmp_path / "cards")


def test_mistakes(place, monkeypatch, refuses):
    monkeypatch.chdir(place)
    pathlib.Path("model_cards/cope").mkdir()
    pathlib.Path("model_cards/cope/notes.txt").touch()
    write_json("length_none.json", {"checkpoints": [entry("tiny", "1" * 64, [])], "data": DATA, **ORIGIN})
    write_json("stock/config.json", {"model_type": "gpt2"})
    card = ["runs/tiny", "--output", "model_cards"]
    table = (
        ("nowhere", "no config.json"),
        ("stock", "'gpt2'"),
        (*card, "--name", "cope", "name='cope'"),
        ("runs/tiny", *card, "same card folder"),
        (*card, "--results", "nothing.json", "nothing.json"),
        (*card, "--results", "length_none.json", "length_none.json"),
        ("runs/tiny", "runs/other", "--name", "x", "--name needs a single RUN"),
        (
            "runs/tiny",
            "--licence",
            "Apache 2",
            "licence='Apache 2' is not valid: it must be an identifier of the Hub. Did you mean 'apache-2.0'?",
        ),
        ("runs/tiny", "--results", "length_none.json", "length_none.json"),
        ("--output", "model_cards", "--licence", "mit", "need a RUN"),
        ("--output", "empty", "output='empty'"),
        ("--output",),
    )
    refuses("card", table)
    results = pathlib.Path("runs/tiny/results.json")
    write_json(results, {**TRAINING, "weights_sha256": "0" * 64})
    refuses("card", [(*card, "run='runs/tiny'")])
    results.write_text("{", encoding="utf-8")
    refuses("card", [("runs/tiny", "not valid JSON")])
    results.unlink()
    refuses("card", [(*card, "results.json")])


def snippet_of(folder):
    (snippet,) = re.findall(r"```python\n(.*?)```", text_of(folder), re.DOTALL)
    return snippet


@pytest.mark.slow
def test_snippets_run_without_the_package(place):
    """The full card's and the short one's, offline, in a process of their own."""
    WhatWhereLlamaForCausalLM.from_pretrained(place / "runs" / "tiny").save_pretrained(place / "short")
    hide = "import sys\nsys.modules['whatwhere'] = None\n"
    code = snippet_of(card_of(place)) + snippet_of(place / "short")
    said = python("-c", hide + code, cwd=place, env={"HF_MODULES_CACHE": str(place / "modules")})
    assert said.startswith("The history of")


def test_shipped_cards_are_what_their_files_give(tmp_path, monkeypatch):
    # Other versions of matplotlib draw other bytes.
    monkeypatch.setattr("whatwhere.scripts.cards.folder._draw", lambda *_: None)
    folder = pathlib.Path(shutil.copytree(SHIPPED, tmp_path / "model_cards"))
    written = command.make([], folder)
    assert len(written) == 1 + sum(1 for _ in SHIPPED.glob("*/results.json"))
    before, after = files_of(SHIPPED), files_of(folder)
    assert [name for name in before if before[name] != after[name]] == []
    weights = {}
    for path in sorted(SHIPPED.rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        assert command.without_folders(content) == content, path
        if path.name.startswith("length"):
            weights.setdefault(path.name, []).extend(one["weights"] for one in content["checkpoints"])
    for path in sorted(SHIPPED.glob("*/README.md")):
        assert not re.search(r"^(#+ .*\n+#|\|[ |]*\|$)", path.read_text(encoding="utf-8"), re.MULTILINE), path
    for path in sorted(SHIPPED.glob("*/card.json")):
        model_index(text_of(path.parent))
        assert len(list(path.parent.glob("*.png"))) == 1
        stated = json.loads((path.parent / "results.json").read_text(encoding="utf-8"))["weights_sha256"]
        assert set(read_results(path.parent, weights=stated)) >= {"results", "curves"}
        for file in path.parent.glob("length*.json"):
            assert set(weights[file.name]) >= {stated}
            assert {one["weights"] for one in json.loads(file.read_text())["checkpoints"]} == {stated}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SHIPPED.glob("*/card.json")))
def test_shipped_snippets_run(name, tmp_path, monkeypatch, capsys):
    """With weights as the command makes them, but random ones of a single layer, where it makes them."""
    config = AutoConfig.from_pretrained(SHIPPED / name)
    config.num_hidden_layers = 1
    run = tmp_path / json.loads((SHIPPED / name / "card.json").read_text(encoding="utf-8"))["weights"]
    AutoModelForCausalLM.from_config(config).save_pretrained(run)
    kind = yaml.safe_load((SHIPPED / name / "recipe.yaml").read_text(encoding="utf-8"))["data"]["tokenizer"]
    build_tokenizer("bytes" if kind == "bpe" else kind).save_pretrained(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    snippet = snippet_of(SHIPPED / name)
    exec(snippet, {})
    prompt = json.loads(re.search(r'tokenizer\((".*"), return', snippet)[1])
    assert capsys.readouterr().out.startswith(prompt)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("results.json", ("metrics",), "results.json: metrics is missing"),
        ("length_pg19.json", ("checkpoints", 0, "cells", 0, "length"), r"cells\[0\].length is missing"),
        ("lm_eval.json", ("tasks", "piqa", "metrics"), r"tasks.metrics is missing"),
    ],
)
def test_broken_results_are_refused_with_the_field(place, name, keys, message):
    path = card_of(place) / name
    content = part = json.loads(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    del part[keys[-1]]
    write_json(path, content)
    with pytest.raises(ValueError, match=message):
        command.write_card(card_of(place))


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not finite"):
        write_json(tmp_path / "results.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []
