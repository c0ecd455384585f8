"""Model cards: every number comes from a file, the Hub's parser reads them, and the snippet runs."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData

from whatwhere import (
    WhatWhereGPT2Config,
    WhatWhereLlamaConfig,
    WhatWhereLlamaForCausalLM,
    WhatWhereLlamaForSequenceClassification,
    list_position_encodings,
)
from whatwhere.model_card import complete_card, model_card, read_results, weights_fingerprint
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import card as script
from whatwhere.scripts.evaluation.results import collect_lm_eval, write_json

TRAINING = {
    "data": {"source": "stdlib", "dataset": None, "split": "test"},
    "metrics": {
        "bits_per_byte": {"value": 2.34567, "standard_error": 0.0123},
        "perplexity": {"value": 5.0831, "standard_error": None},
    },
    "length": 32,
    "tokens": 12345,
    "recipe": {"name": "tiny", "training": {"steps": 77, "learning_rate": 0.0031}},
    "parameters": 54321,
    "steps": 77,
    "tokens_trained": 1234567,
    "seconds": 89.6,
    "commit": "0a1b2c3d",
    "base_model": None,
    "command": "python -m whatwhere.scripts.train tiny --output tiny",
    "date": "2031-02-03T04:05:06+00:00",
    "versions": {"torch": "9.8.7"},
}
LENGTH = {
    "data": {"source": "stdlib", "split": "test"},
    "checkpoints": [
        {
            "name": "tiny",
            "cells": [
                {
                    "length": 32,
                    "multiple": 1.0,
                    "reached": True,
                    "bits_per_byte": 2.41,
                    "standard_error": 0.02,
                    "tokens": 960,
                },
                {
                    "length": 64,
                    "multiple": 2.0,
                    "reached": True,
                    "bits_per_byte": 3.62,
                    "standard_error": None,
                    "tokens": 960,
                },
                {
                    "length": 96,
                    "multiple": 3.0,
                    "reached": False,
                    "bits_per_byte": None,
                    "standard_error": None,
                    "tokens": None,
                },
            ],
        }
    ],
    "command": "python -m whatwhere.scripts.length tiny",
    "date": "2031-02-04T04:05:06+00:00",
    "versions": {"torch": "9.8.7"},
}
LM_EVAL = {
    "tasks": {
        "some_task": {
            "metrics": {"acc": {"value": 0.271828, "standard_error": 0.0314, "higher_is_better": True}},
            "version": 1.0,
            "shots": 0,
            "samples": 100,
            "split": "test",
        }
    },
    "command": "lm_eval --model hf --tasks some_task",
    "date": "2031-02-05T04:05:06+00:00",
    "versions": {"lm_eval": "6.5.4"},
}


def config(**kwargs):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return WhatWhereLlamaConfig(vocab_size=258, max_position_embeddings=32, **{**sizes, **kwargs})


def save(folder, **kwargs):
    torch.manual_seed(0)
    WhatWhereLlamaForCausalLM(config(**kwargs)).save_pretrained(folder)
    build_tokenizer("bytes").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "tiny", position_encoding="pope")


@pytest.fixture
def measured(folder):
    stated = {"weights_sha256": weights_fingerprint(folder)}
    write_json(folder / "results.json", {**TRAINING, **stated})
    write_json(folder / "length.json", {**LENGTH, **stated})
    write_json(folder / "lm_eval.json", {**LM_EVAL, **stated})
    (folder / "length.png").write_bytes(b"figure")
    return folder


def test_measured_card(measured):
    card = ModelCard.load(script.write_card(measured))
    data = card.data
    assert data.license == "apache-2.0"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "text-generation"
    assert {"whatwhere", "pope", "whatwhere_llama"} <= set(data.tags)
    # The embedded corpus and the parent folder have no Hub id: nothing is claimed.
    assert data.datasets is None
    assert data.base_model is None
    assert data.metrics == ["accuracy", "bits_per_byte", "perplexity"]
    assert data.model_name == "tiny"
    scores = {(result.dataset_type, result.metric_name): result.metric_value for result in data.eval_results}
    assert scores == {
        ("stdlib", "bits per byte, at 32 tokens"): 2.41,
        ("stdlib", "bits per byte, at 64 tokens"): 3.62,
        ("stdlib", "bits per byte, final evaluation"): 2.34567,
        ("stdlib", "perplexity, final evaluation"): 5.0831,
        ("some_task", "acc"): 0.271828,
    }
    for origin in (TRAINING, LENGTH, LM_EVAL):
        assert origin["command"] in card.text
        assert origin["date"] in card.text
    for text in (
        "cannot reach",
        "54,321",
        "12,345",
        "9.8.7",
        '"learning_rate": 0.0031',
        "0.2718 | 0.0314",
        "2.3457 ± 0.0123",
        "1,234,567",
        "| 90 |",
        "0a1b2c3d",
    ):
        assert text in card.text
    assert "](length.png)" in card.text
    for name, value in config(position_encoding="pope").position_encoding_parameters.items():
        assert f"| `{name}` | `{value!r}` |" in card.text


def test_windows_of_a_corpus(measured):
    cell = {
        **{"length": 64, "multiple": 2.0, "reached": True, "perplexity": 123.456, "standard_error": 0.5},
        **{"bits_per_byte": None, "tokens": 640, "documents": 3, "clusters": "windows"},
    }
    content = {
        "data": {"corpus": "pg19", "split": "test", "documents": 3, "document_tokens": None, "joined": True},
        "checkpoints": [{"name": "tiny", "variant": None, "weights": weights_fingerprint(measured), "cells": [cell]}],
        **{key: LENGTH[key] for key in ("command", "date", "versions")},
    }
    # What says that it is about other weights is not used.
    other = {**content["checkpoints"][0], "weights": "0" * 64}
    write_json(measured / "length_pg19.json", {**content, "checkpoints": [other]})
    assert "PG-19" not in script.write_card(measured).read_text(encoding="utf-8")
    write_json(measured / "length_pg19.json", content)
    (measured / "length_pg19.png").write_bytes(b"figure")
    card = ModelCard.load(script.write_card(measured))
    assert "| 64 | 2 | 123.46 ± 61.73 |  | 640 |" in card.text
    assert "![perplexity against length](length_pg19.png)" in card.text
    assert "Not measured" not in card.text
    (found,) = (result for result in card.data.eval_results if result.dataset_type == "pg19")
    assert (found.metric_name, found.metric_value) == ("perplexity, at 64 tokens", 123.456)


def test_every_measured_number_comes_from_the_files(measured):
    path = script.write_card(measured)
    before = path.read_text(encoding="utf-8")
    for file, old, new in (
        ("results.json", "2.34567", "9.87654"),
        ("length.json", "3.62", "8.53"),
        ("lm_eval.json", "0.271828", "0.929292"),
    ):
        text = (measured / file).read_text(encoding="utf-8")
        assert text.count(old) == 1
        (measured / file).write_text(text.replace(old, new), encoding="utf-8")
    after = script.write_card(measured).read_text(encoding="utf-8")
    assert before != after
    for old in ("2.34567", "2.3457", "3.62", "0.2718"):
        assert old in before
        assert old not in after


def test_regenerating_gives_the_same_bytes(measured):
    first = script.write_card(measured).read_bytes()
    assert script.write_card(measured).read_bytes() == first
    # Through the Hub's parser and back as well.
    ModelCard.load(measured / "README.md").save(measured / "README.md")
    assert (measured / "README.md").read_bytes() == first


@pytest.mark.parametrize("edited", [False, True])
def test_other_weights_in_the_same_folder(measured, edited):
    readme = script.write_card(measured)
    if edited:
        readme.write_text(readme.read_text(encoding="utf-8").replace("## Limits", "## My limits"), encoding="utf-8")
    before = readme.read_text(encoding="utf-8")
    model = WhatWhereLlamaForCausalLM.from_pretrained(measured)
    model.save_pretrained(measured)
    assert readme.read_text(encoding="utf-8") == before
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.save_pretrained(measured)
    # The results are about weights that are gone. Only a card that somebody has edited is theirs to correct.
    assert read_results(measured) is None
    assert ("2.3457" in readme.read_text(encoding="utf-8")) == edited
    assert "2.3457" not in script.write_card(measured).read_text(encoding="utf-8")


def test_added_tags_stay_and_those_of_an_old_encoding_go(folder):
    card = ModelCard.load(folder / "README.md")
    card.data["tags"] = [*card.data["tags"], "mine"]
    card.save(folder / "README.md")
    WhatWhereLlamaForCausalLM(config(position_encoding="cope+rope")).save_pretrained(folder)
    tags = ModelCard.load(folder / "README.md").data.tags
    assert tags == ["whatwhere", "whatwhere_llama", "position-encoding", "cope", "rope", "mine"]


def test_a_card_about_these_weights_is_kept_without_its_results_files(measured):
    before = script.write_card(measured).read_bytes()
    for name in ("results.json", "length.json", "lm_eval.json"):
        (measured / name).unlink()
    complete_card(measured, config(position_encoding="pope"))
    assert (measured / "README.md").read_bytes() == before


def test_a_card_without_results_says_so(folder):
    card = ModelCard.load(script.write_card(folder))
    assert "There are no measured results" in card.text
    assert "No training run is recorded" in card.text
    assert card.data.eval_results is None
    assert card.data.metrics is None
    assert "model-index" not in str(card)


def test_hub_data_and_base_model_are_metadata():
    data = {"source": "hub", "dataset": "me/texts", "split": "test"}
    training = {**TRAINING, "data": data, "base_model": "openai-community/gpt2"}
    card = model_card(config(), results={"results": training}, name="me/x")
    assert card.data.datasets == ["me/texts"]
    assert card.data.base_model == "openai-community/gpt2"
    assert "Fine-tuned from `openai-community/gpt2`" in card.text


def snippet_of(card):
    (snippet,) = re.findall(r"```python\n(.*?)```", card.read_text(encoding="utf-8"), re.DOTALL)
    return snippet


# The snippets of shipped cards run in this process.
@pytest.mark.slow
def test_the_snippet_runs_without_the_package(folder):
    hide = "import sys\nsys.modules['whatwhere'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", hide + snippet_of(script.write_card(folder))],
        cwd=folder.parent,
        env={**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules"), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("def main(")


def test_the_snippet_without_a_tokenizer_runs(folder, monkeypatch):
    (folder / "tokenizer_config.json").unlink()
    monkeypatch.chdir(folder.parent)
    namespace = {}
    exec(snippet_of(script.write_card(folder)), namespace)
    assert type(namespace["model"]).__name__ == "WhatWhereLlamaForCausalLM"


@pytest.mark.parametrize(
    "name", ['it"s', "a`b`c", "<script>alert(1)</script>", "back\\slash", "*x* [y](z) |", "two\nlines"]
)
def test_the_name_of_a_folder_is_escaped(name):
    card = model_card(config(), name=name, has_tokenizer=True).text
    (snippet,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    values = [node.value for node in ast.parse(snippet).body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(values[0]) == name
    title = next(line for line in card.splitlines() if line.startswith("# "))
    assert not re.search(r"(?<!\\)[`<*\[|]", title)
    assert re.sub(r"\\(.)", r"\1", title) == f"# {' '.join(name.split())}"


def test_other_heads():
    torch.manual_seed(0)
    card = model_card(WhatWhereLlamaForSequenceClassification(config()).config)
    assert card.data.pipeline_tag == "text-generation"
    classifier = config(architectures=["WhatWhereLlamaForSequenceClassification"])
    card = model_card(classifier)
    assert card.data.pipeline_tag == "text-classification"
    assert "AutoModelForSequenceClassification.from_pretrained" in card.text
    for head, tag in (("TokenClassification", "token-classification"), ("QuestionAnswering", "question-answering")):
        card = model_card(config(architectures=[f"WhatWhereLlamaFor{head}"]))
        assert card.data.pipeline_tag == tag
        assert f"AutoModelFor{head}.from_pretrained" in card.text
    card = model_card(config(architectures=["WhatWhereLlamaModel"]))
    assert card.data.pipeline_tag is None
    assert "AutoModel.from_pretrained" in card.text


@pytest.mark.parametrize("config_class", [WhatWhereGPT2Config, WhatWhereLlamaConfig])
@pytest.mark.parametrize("encoding", list_position_encodings())
def test_every_encoding_states_its_parameters(config_class, encoding):
    described = config_class(position_encoding=encoding)
    card = ModelCard(str(model_card(described)))
    assert set(encoding.split("+")) < set(card.data.tags)
    stated = re.findall(r"^\| `([\w.]+)` \| `(.*)` \|$", card.text, re.MULTILINE)
    expected = {}
    for name, value in described.position_encoding_parameters.items():
        nested = {f"{name}.{key}": inner for key, inner in value.items()} if "+" in encoding else {name: value}
        expected.update(nested)
    rope = described.rope_parameters if "rope" in encoding.split("+") else {}
    expected.update({f"rope_parameters.{name}": value for name, value in rope.items()})
    assert dict(stated) == {name: repr(value) for name, value in expected.items()}


def test_complete_card_replaces_a_generic_card_only(measured):
    readme = measured / "README.md"
    generic = ModelCard.from_template(
        ModelCardData(tags=["mine"], library_name="transformers"),
        model_description="This is the model card of a 🤗 transformers model that has been pushed on the Hub.",
    )
    generic.save(readme)
    complete_card(measured, config(position_encoding="pope"), name="me/x")
    card = ModelCard.load(readme)
    assert card.data.model_name == "me/x"
    assert {"mine", "pope"} <= set(card.data.tags)
    assert "2.3457" in card.text
    readme.write_text("---\nlicense: mit\n---\nwritten by hand\n", encoding="utf-8")
    complete_card(measured, config(), name="me/x")
    assert readme.read_text(encoding="utf-8").endswith("written by hand\n")


def test_results_follow_the_weights_and_only_these(measured, tmp_path):
    model = WhatWhereLlamaForCausalLM.from_pretrained(measured)
    for name, change, expected in (("same", 0.0, True), ("other", 1.0, False)):
        with torch.no_grad():
            model.lm_head.weight.add_(change)
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").unlink(missing_ok=True)
        complete_card(tmp_path / name, model.config, source=measured)
        assert ("2.3457" in (tmp_path / name / "README.md").read_text(encoding="utf-8")) == expected


def test_command_line(measured, capsys):
    script.main([str(measured)])
    assert capsys.readouterr().out.strip() == str(measured / "README.md")


def test_bad_folders(measured, tmp_path, capsys):
    stock = tmp_path / "stock"
    stock.mkdir()
    (stock / "config.json").write_text(json.dumps({"model_type": "gpt2"}), encoding="utf-8")
    (measured / "length.json").write_text("{", encoding="utf-8")
    for folder, message in (
        (tmp_path / "nowhere", "no config.json"),
        (stock, "not one of ours"),
        (measured, "not valid JSON"),
    ):
        with pytest.raises(SystemExit) as stop:
            script.main([str(folder)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_numbers_that_are_not_finite_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not finite"):
        write_json(tmp_path / "results.json", {"value": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_no_lm_eval_results(tmp_path):
    with pytest.raises(FileNotFoundError, match="no results"):
        collect_lm_eval(tmp_path, command="lm_eval")
