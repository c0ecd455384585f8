"""The offline lm-eval task: its questions, and lm-eval's own command line on a saved checkpoint."""

import json
import os
import subprocess
import sys

import pytest
import torch

from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM
from whatwhere.scripts.data.corpus import load_text
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import code_completion
from whatwhere.scripts.evaluation.results import collect_lm_eval

# lm-eval's command line, in a process that fails if anything but the checkpoint's own code defines the model.
COMMAND = """
import sys
from lm_eval.__main__ import cli_evaluate

sys.argv[0] = "lm_eval"
cli_evaluate()
assert not any(name.partition(".")[0] == "whatwhere" for name in sys.modules), "the package was imported"
assert any(name.endswith("modeling_whatwhere_llama") for name in sys.modules), "the checkpoint's code was not"
"""


@pytest.fixture(scope="module")
def corpus():
    return load_text()


def test_questions_are_well_formed_and_held_out(corpus):
    texts = list(corpus["test"]["text"])
    questions = code_completion.questions(texts, 50)
    train = set(corpus["train"]["text"])
    assert not train & set(texts)
    for question in questions:
        context, choices = question["context"], question["choices"]
        right = choices[question["answer"]]
        assert len(context.split("\n")) == 12
        assert len(set(choices)) == 4
        # An independent check: the right line follows the context in a held-out file; no wrong one ever does.
        sources = [text for text in texts if f"{context}\n{right}\n" in f"{text}\n"]
        assert sources
        for wrong in choices:
            if wrong != right:
                assert not any(f"{context}\n{wrong}\n" in f"{text}\n" for text in texts)
                assert wrong in sources[0].splitlines()
                assert len(wrong) - len(wrong.lstrip()) == len(right) - len(right.lstrip())


def test_questions_depend_on_the_seed_only(corpus):
    texts = list(corpus["test"]["text"])
    assert code_completion.questions(texts, 20, seed=1) == code_completion.questions(texts, 20, seed=1)
    assert code_completion.questions(texts, 20, seed=1) != code_completion.questions(texts, 20, seed=2)
    answers = [question["answer"] for question in code_completion.questions(texts, 200)]
    assert all(30 <= answers.count(answer) <= 70 for answer in range(4)), "the right choice has no favourite place"


def test_too_few_questions():
    with pytest.raises(ValueError, match="questions=3: the held-out documents hold only 0"):
        code_completion.questions(["x = 1\n"], 3)


def test_lm_eval_command_line_on_a_saved_checkpoint(tmp_path, capsys):
    torch.manual_seed(0)
    config = WhatWhereLlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
        position_encoding="pope",
    )
    WhatWhereLlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    build_tokenizer("bytes").save_pretrained(tmp_path / "model")
    code_completion.main(["--output", str(tmp_path / "tasks"), "--questions", "8"])
    assert "8 questions" in capsys.readouterr().out
    options = ["--model", "hf", "--model_args", f"pretrained={tmp_path / 'model'},trust_remote_code=True"]
    options += ["--tasks", "whatwhere_code_completion", "--include_path", str(tmp_path / "tasks"), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", *options, "--output_path", str(tmp_path / "scores")],
        cwd=tmp_path,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "|whatwhere_code_completion|" in done.stdout
    content = collect_lm_eval(tmp_path / "scores", command="lm_eval")
    task = content["tasks"]["whatwhere_code_completion"]
    assert task["samples"] == 8
    assert task["shots"] == 0
    assert task["split"] == "test"
    assert set(task["metrics"]) == {"acc", "acc_norm"}
    for score in task["metrics"].values():
        assert score["value"] in [right / 8 for right in range(9)]
        assert score["standard_error"] >= 0
        assert score["higher_is_better"] is True
    assert json.loads(json.dumps(content)) == content


def test_no_question_is_refused(tmp_path):
    with pytest.raises(ValueError, match="questions=0 is not valid: it must be at least 1"):
        code_completion.write_task(tmp_path, ["x = 1\n"], 0)
