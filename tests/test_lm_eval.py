"""The offline lm-eval task: its questions and its files. (lm-eval itself runs it in test_demo.py.)"""

import json

import pytest

from whatwhere.scripts.data.corpus import load_text
from whatwhere.scripts.evaluation.lm_eval import code_completion


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
    with pytest.raises(ValueError, match="questions=3 is not valid"):
        code_completion.questions(["x = 1\n"], 3)


def test_the_task_is_written(corpus, tmp_path):
    """lm-eval runs it in test_demo.py."""
    texts = list(corpus["test"]["text"])
    task = code_completion.write_task(tmp_path, texts, 8, seed=3)
    assert "dataset_kwargs" in task.read_text()
    written = [json.loads(line) for line in (tmp_path / f"{code_completion.TASK}.jsonl").read_text().splitlines()]
    assert written == code_completion.questions(texts, 8, seed=3)
