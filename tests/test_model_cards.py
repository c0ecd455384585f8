"""Cards in folders of their own: made from files alone, the same bytes each time, and their snippets run."""

import json
import pathlib
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results
from transformers import AutoConfig, AutoModelForCausalLM

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.model_card import CORPORA, model_card, read_results, weights_fingerprint
from whatwhere.scripts import cards
from whatwhere.scripts.data import corpora
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.results import write_json
from whatwhere.scripts.evaluation.zero_shot import TABLE_5, TASKS
from whatwhere.scripts.reproduce.report import card_from_results

SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "model_cards"
ORIGIN = {"command": "python -m whatwhere.scripts.length x", "date": "2031-02-03T04:05:06+00:00", "versions": {}}
TRAINING = {
    "metrics": {"bits_per_byte": {"value": 2.34567}, "perplexity": {"value": 50.831}, "loss": {"value": 3.92851}},
    "data": {
        "source": "corpus",
        "dataset": None,
        "splits": {
            "train": "wikipedia_en:train[:9]",
            "validation": "wikitext103_v1:validation",
            "test": "wikitext103_v1:test",
        },
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
    "processes": 1,
    "device": "cpu",
    "commit": "0a1b2c3d",
    **ORIGIN,
    "command": "python -m whatwhere.scripts.train tiny_small --set seed=3 --output runs/tiny",
}
METRICS = [
    {"step": 10, "loss": 5.0, "gradient_norm": 1.0},
    {"step": 20, "loss": 4.0, "gradient_norm": 1.0},
    {"step": 20, "validation_loss": 4.5, "validation_perplexity": 90.0171, "validation_tokens": 9},
    {"step": 30, "loss": 3.0, "gradient_norm": 1.0},
    {"step": 40, "loss": 2.0, "gradient_norm": 1.0},
    {"step": 40, "validation_loss": 4.75, "validation_perplexity": 115.584, "validation_tokens": 9},
]
ZERO_SHOT = {
    "tasks": {
        "lambada_openai": {
            "metrics": {"acc": {"value": 0.1234, "standard_error": 0.0321, "higher_is_better": True}},
            "version": 1.0,
            "shots": 0,
            "samples": 100,
            "split": "test",
            "limit": 100,
        },
        "whatwhere_local_blimp": {
            "metrics": {"acc": {"value": 0.5678, "standard_error": 0.0121, "higher_is_better": True}},
            "version": None,
            "shots": 0,
            "samples": 67000,
            "split": None,
            "limit": None,
        },
    },
    "truncated_requests": 7,
    "max_length": 32,
    **ORIGIN,
}


def cell(length, perplexity, *, reached=True):
    """A measurement as in `length_pg19.json`."""
    found = {"length": length, "multiple": length / 32, "reached": reached, "reason": None if reached else "too long"}
    numbers = {
        "perplexity": perplexity,
        "loss": 3.0,
        "standard_error": 0.01,
        "bits_per_byte": 1.2345,
        "tokens": 960,
        "bytes": 2000,
        "windows": 30,
        "clusters": "documents",
        "documents": 4,
        "short_documents": 1,
        "dropped_tokens": 5,
    }
    return {**found, **(numbers if reached else dict.fromkeys(numbers))}


def entry(name, weights, cells, *, variant=None):
    by_position = [{"length": 64, "edges": [0, 16, 64], "loss": [4.0, 3.0], "tokens": [240, 720]}]
    about = {"name": name, "variant": variant, "weights": weights, "trained_length": 32, "position_encoding": "pope"}
    return {**about, "cells": cells, "by_position": by_position}


def run_folder(folder, *, encoding="pope", tokenizer="bytes", **results):
    """A finished run of a model with random weights."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(tokenizer)
    config = WhatWhereLlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
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
    """A place with a run, `runs/tiny`, and its card."""
    place = tmp_path_factory.mktemp("place")
    run = run_folder(place / "runs" / "tiny")
    cards.make([run], place / "model_cards")
    return place


@pytest.fixture
def place(made, tmp_path):
    return pathlib.Path(shutil.copytree(made, tmp_path / "place"))


def card_of(place):
    return place / "model_cards" / "tiny_small_pope"


def files_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_card_is_made_of(place):
    card = card_of(place)
    assert sorted(path.name for path in card.iterdir()) == [
        "README.md",
        "card.json",
        "config.json",
        "curves.json",
        "curves.png",
        "lm_eval.json",
        "results.json",
    ]
    for name in ("config.json", "lm_eval.json", "results.json"):
        assert json.loads((card / name).read_text()) == json.loads((place / "runs" / "tiny" / name).read_text())
    figure = (card / "curves.png").read_bytes()
    assert figure.startswith(b"\x89PNG")
    assert 5_000 < len(figure) < 150_000
    text = (card / "README.md").read_text(encoding="utf-8")
    for expected in (
        TRAINING["command"],
        "![loss against optimiser steps](curves.png)",
        "| train | `wikipedia_en:train[:9]` | English Wikipedia",
        "The data, from local files",
        "| perplexity | 50.8310 |",
        "| loss, nats per token | 3.9285 |",
        "Validation loss after step 40: 4.7500, perplexity 115.5840; lowest after step 20: 4.5000.",
        "Training loss (nats per predicted token), the last recorded: 2.0000.",
        "54,321 parameters and saw 108,642 tokens, 2.00 for each parameter",
        "with seed 3",
        "trained on `wikipedia_en` and is measured on `wikitext103_v1`",
        "Not measured: length extrapolation.",
        "can repeat what its training text holds",
        "- WikiText-103 (word level, with \\<unk>): CC BY-SA 3.0, GFDL",
        "compare with nothing but the same ones: lambada_openai.",
        "7 requests were longer than 32 tokens",
        "| **this model** | **12.34** | **56.78** |",
        "| paper: PoPE, 774M | 36.89 | 82.03 |",
    ):
        assert expected in text


def test_the_card_needs_its_own_files_alone_and_gives_the_same_bytes(place):
    before = files_of(place / "model_cards")
    shutil.rmtree(place / "runs")
    assert cards.make([], place / "model_cards") == [card_of(place) / "README.md"]
    assert files_of(place / "model_cards") == before


def test_every_measured_number_comes_from_the_files(place):
    card = card_of(place)
    for name, old, new, shown in (
        ("results.json", "50.831", "47.123", "47.1230"),
        ("results.json", "54321", "54329", "54,329"),
        ("curves.json", "4.75", "4.25", "4.2500"),
        ("lm_eval.json", "0.5678", "0.8765", "**87.65**"),
    ):
        text = (card / name).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (card / name).write_text(text.replace(old, new), encoding="utf-8")
        assert shown not in (card / "README.md").read_text(encoding="utf-8")
        cards.write(card)
        assert shown in (card / "README.md").read_text(encoding="utf-8")


def test_a_new_card_of_a_run_replaces_the_old_one(place):
    run = place / "runs" / "tiny"
    (run / "lm_eval.json").unlink()
    cells = [cell(32, 51.25), cell(64, None, reached=False)]
    checkpoint = {"name": "tiny", "position_encoding": "pope", "trained_length": 32, "cells": cells}
    stated = {"weights_sha256": weights_fingerprint(run)}
    data = {"source": "stdlib", "dataset": None, "files": None, "split": "test"}
    write_json(run / "length.json", {"data": data, "checkpoints": [checkpoint], **stated, **ORIGIN})
    cards.make([run], place / "model_cards")
    assert not (card_of(place) / "lm_eval.json").exists()
    assert (card_of(place) / "length.png").read_bytes().startswith(b"\x89PNG")
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    assert "lm-eval:" not in text
    assert "Not measured: zero-shot tasks." in text
    assert "| 32 | 1 | 1.2345 | 0.0100 | 960 |\n| 64 | 2 | cannot reach |  |  |" in text
    assert "![bits per byte against length](length.png)" in text


def test_a_fine_tuned_model(tmp_path):
    """Its results say less: no parameters, seconds, tokens or name of a recipe."""
    keep = ("metrics", "length", "tokens", "seed", "steps", "date", "versions")
    results = {
        **{key: TRAINING[key] for key in keep},
        "data": {"source": "pg19", "dataset": None, "splits": None, "split": "test"},
        "base_model": "openai-community/gpt2",
        "recipe": {"checkpoint": "openai-community/gpt2", "steps": 77},
        "command": "python -m whatwhere.scripts.finetune openai-community/gpt2 --output runs/tuned",
    }
    run = run_folder(tmp_path / "runs" / "tuned")
    stated = json.loads((run / "results.json").read_text(encoding="utf-8"))["weights_sha256"]
    write_json(run / "results.json", {**results, "weights_sha256": stated})
    (run / "metrics.jsonl").unlink()
    cards.make([run], tmp_path / "model_cards")
    text = (tmp_path / "model_cards" / "tuned_pope" / "README.md").read_text(encoding="utf-8")
    assert ModelCard(text).data.base_model == "openai-community/gpt2"
    assert 'name = "runs/tuned"' in text
    assert 'tokenizer("It was a dark and"' in text
    assert "The licence of `openai-community/gpt2` applies to the weights, too." in text
    assert "The data have licences of their own:\n\n- PG-19" in text
    assert "minutes" not in text
    assert "curves.png" not in text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{recipe}_{encoding}", "tiny_small_cope_rope"),
        ("{data}-{encoding}.{seed}", "wikipedia_en-cope_rope.3"),
        ("{folder}", "tiny"),
        ("mine", "mine"),
    ],
)
def test_names(template, expected):
    assert cards.card_name(pathlib.Path("runs/tiny"), template, TRAINING, "cope+rope") == expected


def snippet_of(card):
    (snippet,) = re.findall(r"```python\n(.*?)```", (card / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return snippet


def test_the_snippet_runs_where_the_command_was_run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_MODULES_CACHE", str(place / "modules"))
    namespace = {}
    exec(snippet_of(card_of(place)), namespace)
    assert namespace["name"] == "runs/tiny"
    assert namespace["model"].config.position_encoding == "pope"
    assert capsys.readouterr().out.startswith("The history of")


def test_a_model_of_music(tmp_path, monkeypatch, capsys):
    data = {
        "source": "corpus",
        "splits": {split: f"jsb_chorales:{split}" for split in ("train", "validation", "test")},
        "split": "test",
        "place": "the Hub",
    }
    metrics = {"perplexity": {"value": 1.5913}, "loss": {"value": 0.46454}}
    kept = {"step": 20, "validation_loss": 4.5}
    run = run_folder(tmp_path / "runs" / "tiny", tokenizer="jsb", data=data, metrics=metrics, kept=kept)
    cards.make([run], tmp_path / "model_cards", template="{data}_{encoding}")
    card = tmp_path / "model_cards" / "jsb_chorales_pope"
    text = (card / "README.md").read_text(encoding="utf-8")
    assert "| weights kept from step, of the lowest validation loss | 20 |" in text
    assert "| loss, nats per token | 0.4645 |" in text
    assert "bits per byte" not in text
    assert "datasets:" not in text
    check_model_index(text)
    assert "loss 0.4645, `jsb_chorales:test`" in cards.index(tmp_path / "model_cards")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    exec(snippet_of(card), {})
    words = capsys.readouterr().out.split()
    assert words[:4] == ["74", "70", "65", "58"]
    assert len(words) == 44


def test_published_weights(place):
    cards.make([place / "runs" / "tiny"], place / "model_cards", published="me/tiny-pope")
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    assert 'name = "me/tiny-pope"' in text
    assert "not published" not in text
    assert cards.make([], place / "model_cards")
    assert (card_of(place) / "README.md").read_text(encoding="utf-8") == text


def check_model_index(text):
    """What the Hub's parser asks of a card's metadata, as far as it can be checked without the Hub."""
    metadata = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    assert metadata["license"] == "apache-2.0"
    assert all(isinstance(tag, str) and tag for tag in metadata["tags"])
    (model,) = metadata["model-index"]
    assert re.fullmatch(r"[\w./-]+", model["name"])
    assert model["results"]
    for result in model["results"]:
        assert set(result) == {"task", "dataset", "metrics"}
        assert result["task"] == {"type": "text-generation"}
        assert re.fullmatch(r"(?:[\w-]+/)?[\w.-]+", result["dataset"]["type"])
        assert isinstance(result["dataset"]["name"], str)
        assert set(result["dataset"]) <= {"type", "name", "split", "args"}
        assert isinstance(result["dataset"].get("split", ""), str)
        assert result["metrics"]
        for metric in result["metrics"]:
            # Nothing here was verified by the Hub.
            assert set(metric) == {"type", "name", "value"}
            assert type(metric["value"]) in (int, float)
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert eval_results_to_model_index(name, results) == metadata["model-index"]
    assert str(ModelCard(text).data.to_yaml()) == text.split("\n---\n")[0].removeprefix("---\n")
    return results


def test_model_index(place):
    results = check_model_index((card_of(place) / "README.md").read_text(encoding="utf-8"))
    assert {
        (result.dataset_type, result.dataset_split, result.metric_name): result.metric_value for result in results
    } == {
        ("wikitext103_v1", "test", "bits per byte, final evaluation"): 2.34567,
        ("wikitext103_v1", "test", "perplexity, final evaluation"): 50.831,
        ("wikitext103_v1", "test", "loss, final evaluation"): 3.92851,
        ("lambada_openai", "test", "acc"): 0.1234,
        ("whatwhere_local_blimp", None, "acc"): 0.5678,
    }


def test_corpora_of_the_hub_are_metadata_and_local_ones_are_not():
    config = WhatWhereLlamaConfig(position_encoding="pope")
    for found, expected in (("the Hub", ["wikimedia/wikipedia"]), ("local files", None)):
        training = {**TRAINING, "data": {**TRAINING["data"], "place": found}}
        assert model_card(config, results={"results": training}).data.datasets == expected


def test_corpora_are_those_that_the_scripts_know():
    assert set(CORPORA) == set(corpora.CORPORA), "whatwhere.model_card.CORPORA must have every corpus"
    for name, corpus in corpora.CORPORA.items():
        stated = CORPORA[name]
        assert (stated.title, stated.licence) == (corpus.title, corpus.licence)
        # Addresses of files elsewhere are no data sets of the Hub.
        hub = corpus.hub.get("train", ("",))[0].removeprefix("hf://datasets/").partition("@")[0]
        assert stated.dataset == (hub if hub and "://" not in hub else None)


@pytest.mark.parametrize(
    ("corpus", "kind"),
    [
        ("jsb_chorales", "jsb"),
        ("maestro", "remi"),
        ("maestro_transposed", "remi"),
        ("genome", "6mer"),
        ("genome_chr2", "6mer"),
    ],
)
def test_prompts_are_words_of_their_tokenizers(corpus, kind):
    if kind == "remi":
        pytest.importorskip("miditok")
    tokenizer = build_tokenizer(kind)
    ids = tokenizer(CORPORA[corpus].prompt)["input_ids"]
    assert ids
    assert not {*ids} & {*tokenizer.all_special_ids}
    assert None not in ids
    assert not CORPORA[corpus].is_text


@pytest.mark.parametrize(
    ("data", "has", "lacks"),
    [
        ({"source": "task", "task": "counting", "split": "test"}, "no language model", "can repeat"),
        (
            {
                "source": "corpus",
                "splits": {"train": "jsb_chorales:train", "test": "jsb_chorales:test"},
                "split": "test",
                "place": "local files",
            },
            "can repeat its training data",
            "zero-shot",
        ),
        ({"source": "stdlib", "split": "test"}, "can repeat what its training text holds", "another source"),
        (
            {
                "source": "corpus",
                "splits": {"train": "maestro_transposed:train", "test": "maestro:test"},
                "split": "test",
                "place": "the Hub",
            },
            "words of its own tokenizer",
            "another source",
        ),
    ],
    ids=["toy", "music", "code", "one corpus"],
)
def test_limits_fit_the_data(data, has, lacks):
    training = {**TRAINING, "data": data, "metrics": {"loss": {"value": 0.5}}}
    text = model_card(WhatWhereLlamaConfig(position_encoding="absolute"), results={"results": training}).text
    limits = text[text.index("## Limits") : text.index("## Licence")]
    assert has in limits
    assert lacks not in limits
    assert "can serve no more than 2,048" in limits


def test_curves_are_means_of_consecutive_lines():
    lines = [*METRICS, {"step": 50, "loss": 7.5}]
    found = cards.thin_curves(lines, points=3)
    assert found["training"] == [
        {"step": 20, "loss": 4.5, "lines": 2},
        {"step": 40, "loss": 2.5, "lines": 2},
        {"step": 50, "loss": 7.5, "lines": 1},
    ]
    assert found["validation"] == [
        {"step": 20, "loss": 4.5, "perplexity": 90.0171},
        {"step": 40, "loss": 4.75, "perplexity": 115.584},
    ]
    assert [row["loss"] for row in cards.thin_curves(lines)["training"]] == [5.0, 4.0, 3.0, 2.0, 7.5]
    assert cards.thin_curves([]) == {"training": [], "validation": []}


def test_results_that_are_about_other_weights_are_left_out_and_said(place, capsys):
    run = place / "runs" / "tiny"
    write_json(run / "lm_eval.json", {**ZERO_SHOT, "weights_sha256": "0" * 64})
    cards.make([run], place / "model_cards")
    assert "lm_eval.json is left out" in capsys.readouterr().out
    assert not (card_of(place) / "lm_eval.json").exists()


def test_paths_of_a_machine_stay_there(place):
    run = place / "runs" / "tiny"
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    results["command"] = f"python -m whatwhere.scripts.train tiny_small --data-dir '/data/of me/x' --output {run}"
    results["recipe"]["data"]["tokenizer"] = "/somewhere/else/tokenizer"
    write_json(run / "results.json", results)
    cards.make([run], place / "model_cards")
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    assert '"tokenizer": "tokenizer"' in text
    assert "--output tiny\n" in text
    assert 'name = "tiny"' in text
    assert str(place) not in text + (card_of(place) / "results.json").read_text(encoding="utf-8")


def test_rows_of_the_papers_tables(place):
    table = json.loads((SHIPPED / "cope_3_small" / "results.json").read_text(encoding="utf-8"))
    seed = next(cell for cell in table["cells"] if (cell["row"], cell["column"]) == ("cope", "3_var"))["ours"]["seeds"][
        0
    ]
    # A run of that cell: its seconds are the run's own.
    seed.update(seed=3, steps=77, parameters=54321, seconds=89.625)
    write_json(place / "model_cards" / "cope_3_small" / "results.json", table)
    cards.make([], place / "model_cards")
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    assert "](../cope_3_small/README.md)" in text
    rows = [line for line in text.splitlines() if "| 3 var |" in line or "| **3 var** |" in line]
    assert len(rows) == 3
    assert sum(row.startswith("| **CoPE** | **3 var** |") for row in rows) == 1
    assert "1 var" not in text
    # The table's card is written anew, too.
    card = place / "model_cards" / "cope_3_small"
    assert (card / "README.md").read_text(encoding="utf-8") == card_from_results(card / "results.json")


def test_table_5_has_the_papers_figures():
    found = {"tasks": {task.scored: {"metrics": {task.metric: {"value": 0.5}}} for task in TASKS.values()}}
    text = cards.beside_table_5(found)
    # Head, rule, ours, guessing.
    assert sum(line.startswith("|") for line in text.splitlines()) == 4 + len(TABLE_5)
    for name, (figures, _) in TABLE_5.items():
        assert f"| paper: {name} | {' | '.join(f'{figure:.2f}' for figure in figures)} |" in text
    assert cards.beside_table_5({}) == cards.beside_table_5({"tasks": {"other": {}}}) == ""


def test_results_of_several_checkpoints_measured_together(place):
    weights = weights_fingerprint(place / "runs" / "tiny")
    data = {"protocol": "windows", "corpus": "pg19", "split": "test", "place": "local", "joined": False}
    data |= {"document_limit": 5, "document_tokens": 2000, "documents": 5}
    entries = [
        entry("tiny", weights, [cell(32, 51.25), cell(64, 1234.5)]),
        entry("tiny", weights, [cell(64, 60.75), cell(128, None, reached=False)], variant="yarn"),
        # Other weights of the same name, as fine-tuning makes them.
        entry("tiny", "0" * 64, [cell(64, 41.5)], variant="fine-tuned"),
        entry("other", "1" * 64, [cell(64, 42.5)]),
    ]
    write_json(place / "length_pg19.json", {"data": data, "checkpoints": entries, **ORIGIN})
    arguments = [str(place / "runs" / "tiny"), "--output", str(place / "model_cards")]
    cards.main([*arguments, "--results", str(place / "length_pg19.json")])
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    for row in (
        "| as trained | 32 | 1 | 51.25 ± 0.51 | 1.2345 | 960 | 4 |",
        "| as trained | 64 | 2 | 1,234.50 ± 12.35 | 1.2345 | 960 | 4 |",
        "| yarn | 64 | 2 | 60.75 ± 0.61 | 1.2345 | 960 | 4 |",
        "| yarn | 128 | 4 | cannot reach |  |  |  |",
        "Perplexity on PG-19 (books of Project Gutenberg from before 1919), test split: 5 documents, the first 2,000 "
        "tokens of each, each by itself, cut into disjoint windows of each length",
        "one standard error over documents",
        "](length_pg19.png)",
    ):
        assert row in text
    assert "41.50" not in text
    assert "42.50" not in text
    found = {one.metric_name: one.metric_value for one in check_model_index(text) if one.dataset_type == "pg19"}
    assert found == {
        "perplexity, at 32 tokens (5 documents, the first 2,000 tokens of each)": 51.25,
        "perplexity, at 64 tokens (5 documents, the first 2,000 tokens of each)": 1234.5,
        "perplexity, at 64 tokens, yarn (5 documents, the first 2,000 tokens of each)": 60.75,
    }
    # The figure shows all that was measured together, so that the file keeps it.
    kept = json.loads((card_of(place) / "length_pg19.json").read_text(encoding="utf-8"))
    assert kept == {"data": data, "checkpoints": entries, **ORIGIN, "weights_sha256": weights}
    assert (card_of(place) / "length_pg19.png").read_bytes().startswith(b"\x89PNG")
    before = files_of(card_of(place))
    cards.make([], place / "model_cards")
    assert files_of(card_of(place)) == before
    # Another file of the same name, about less text, stands beside it.
    less = {"data": {**data, "documents": 1}, "checkpoints": [entry("tiny", weights, [cell(64, 77.25)])], **ORIGIN}
    less["earlier"] = [{**ORIGIN, "command": "the one before"}]
    write_json(place / "one_book" / "length_pg19.json", less)
    files = [place / "length_pg19.json", place / "one_book" / "length_pg19.json"]
    cards.make([place / "runs" / "tiny"], place / "model_cards", files=files)
    text = (card_of(place) / "README.md").read_text(encoding="utf-8")
    assert "| as trained | 32 | 1 | 51.25 ± 0.51 |" in text
    assert "test split: 1 document, the first 2,000 tokens of it, cut into" in text
    assert "| 64 | 2 | 77.25 ± 0.77 | 1.2345 | 960 | 4 |" in text
    assert "](length_one_book.png)" in text
    assert f"\nthe one before\n{ORIGIN['command']}\n```" in text
    names = [one.metric_name for one in check_model_index(text) if one.dataset_type == "pg19"]
    assert "perplexity, at 64 tokens (1 document, the first 2,000 tokens of it)" in names
    assert len(names) == len(set(names)) == 4
    # Joined, documents are one text.
    write_json(place / "one_book" / "length_pg19.json", {**less, "data": {**data, "joined": True}})
    cards.make([place / "runs" / "tiny"], place / "model_cards", files=files[1:])
    assert "| 64 | 2 | 77.25 ± 0.77 | 1.2345 | 960 |\n" in (card_of(place) / "README.md").read_text(encoding="utf-8")
    with pytest.raises(cards.CardError, match="another file would have the name 'length_one_book', too"):
        cards.make([place / "runs" / "tiny"], place / "model_cards", files=[*files, files[1]])


def test_the_list_of_cards(place):
    folder = place / "model_cards"
    shutil.copytree(SHIPPED / "cope_2_small", folder / "cope_2_small")
    (folder / "README.md").write_text(f"before\n{cards.INDEX[0]}\nold\n{cards.INDEX[1]}\nafter\n", encoding="utf-8")
    assert cards.make([], folder)[-1] == folder / "README.md"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"before\n{cards.INDEX[0]}\n")
    assert text.endswith(f"\n{cards.INDEX[1]}\nafter\n")
    assert "old" not in text.split("\n")
    row = "| [`tiny_small_pope`](tiny_small_pope/README.md) | `pope` | 54,321 "
    assert row + "| perplexity 50.83, `wikitext103_v1:test` | `lm_eval.json` |" in text
    assert "[`cope_2_small`](cope_2_small/README.md)" in text


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        ("unfinished", [], "it has no results.json"),
        ("trained further", [], "other weights than its results.json is about"),
        ("no fingerprint", [], "state no weights_sha256"),
        ("broken", [], "is not valid JSON"),
        (None, ["--name", "{family}"], "It can have in it: {recipe}, {data}, {encoding}, {seed}, {folder}"),
        (None, ["--name", "a/b"], "must be letters, digits"),
        (None, ["--name", "cope_2_small"], "holds something else than a model's card"),
        (None, ["--published", "me/x"], "is of one RUN, and there are 2"),
        (None, [], "would both be 'tiny_small_pope'. Give --name, with {seed} or {folder}"),
        (None, ["--name", "{folder}", "--results", "length_other.json"], "none of its checkpoints has the weights"),
        (None, ["--name", "{folder}", "--results", "lm_eval.json"], "must be a length*.json with `checkpoints`"),
        (None, ["--name", "{folder}", "--results", "nothing.json"], "results='nothing.json' is not a file"),
    ],
)
def test_errors_of_the_command_line(place, monkeypatch, capsys, change, arguments, message):
    monkeypatch.chdir(place)
    run = pathlib.Path("runs/tiny")
    shutil.copytree(run, "runs/again")
    shutil.copytree(SHIPPED / "cope_2_small", "model_cards/cope_2_small")
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    if change == "unfinished":
        (run / "results.json").unlink()
    elif change == "trained further":
        write_json(run / "results.json", {**results, "weights_sha256": "0" * 64})
    elif change == "no fingerprint":
        del results["weights_sha256"]
        write_json(run / "results.json", results)
    elif change == "broken":
        (run / "results.json").write_text("{", encoding="utf-8")
    write_json("length_other.json", {"checkpoints": [{"name": "tiny", "weights": "0" * 64, "cells": []}]})
    write_json("lm_eval.json", {"tasks": {}})
    runs = ["runs/tiny"] if "cope_2_small" in arguments else ["runs/tiny", "runs/again"]
    with pytest.raises(SystemExit) as stop:
        cards.main([*runs, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_errors_without_a_run(tmp_path, capsys):
    for arguments, message in (
        (["--output", str(tmp_path / "cards")], "holds no cards to write anew: give a RUN"),
        (["--published", "me/x"], "are about a RUN: give it"),
    ):
        with pytest.raises(SystemExit):
            cards.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("drawn", [{"jsb_chorales_pope_small"}, pytest.param(None, marks=pytest.mark.slow)])
def test_shipped_cards_are_what_their_files_give(tmp_path, monkeypatch, drawn):
    """With the figures of one card, which take the time, or of all."""
    draw = cards.draw
    if drawn:
        monkeypatch.setattr(cards, "draw", lambda folder, given: draw(folder, given) if folder.name in drawn else None)
    folder = pathlib.Path(shutil.copytree(SHIPPED, tmp_path / "model_cards"))
    written = cards.make([], folder)
    assert len(written) == 1 + sum(1 for _ in SHIPPED.glob("*/results.json"))
    before, after = files_of(SHIPPED), files_of(folder)
    assert before.keys() == after.keys()
    # Another version of matplotlib may draw other pixels.
    texts = [name for name in before if not name.endswith(".png")]
    assert [name for name in texts if before[name] != after[name]] == []
    for name in before:
        if name.endswith(".png"):
            assert len(before[name]) < 150_000


def test_shipped_cards_say_nothing_of_the_machine_and_are_valid():
    for path in sorted(SHIPPED.rglob("*.json")):
        assert cards.without_folders(json.loads(path.read_text(encoding="utf-8"))) == json.loads(
            path.read_text(encoding="utf-8")
        ), path
    for path in sorted(SHIPPED.glob("*/card.json")):
        check_model_index((path.parent / "README.md").read_text(encoding="utf-8"))
        weights = json.loads((path.parent / "results.json").read_text(encoding="utf-8"))["weights_sha256"]
        assert set(read_results(path.parent, weights=weights)) >= {"results", "curves"}


@pytest.mark.parametrize("name", sorted(path.parent.name for path in SHIPPED.glob("*/card.json")))
def test_shipped_snippets_run(name, tmp_path, monkeypatch, capsys):
    """With weights as the command makes them, but random ones of a single layer, where it makes them."""
    config = AutoConfig.from_pretrained(SHIPPED / name)
    config.num_hidden_layers = 1
    run = tmp_path / json.loads((SHIPPED / name / "card.json").read_text(encoding="utf-8"))["weights"]
    AutoModelForCausalLM.from_config(config).save_pretrained(run)
    training = json.loads((SHIPPED / name / "results.json").read_text(encoding="utf-8"))
    kind = training["recipe"]["data"]["tokenizer"]
    build_tokenizer("bytes" if kind == "bpe" else kind).save_pretrained(run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    snippet = snippet_of(SHIPPED / name)
    exec(snippet, {})
    prompt = json.loads(re.search(r'tokenizer\((".*"), return', snippet)[1])
    assert capsys.readouterr().out.startswith(prompt)
