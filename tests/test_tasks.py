"""Toy tasks: every sample against an independent solver, seeds, distributions, builders, tokenizers, batches."""

import collections
import re

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

pytest.importorskip("datasets", reason='needs pip install "whatwhere[train]"')

import datasets

import solvers
from toys import toy_recipe
from whatwhere.scripts.toy_tasks import alice
from whatwhere.scripts.toy_tasks.common import SPLITS, build_dataset, build_tokenizer
from whatwhere.scripts.toy_tasks.registry import TASKS, task_config
from whatwhere.scripts.toy_tasks.samples import TaskSamples
from whatwhere.scripts.training.data import load_data

# Beside the named configurations: extreme parameters, and small ones as recipes use them.
OTHERS = {
    "flip_flop": [{"instructions": 2}, {"instructions": 9, "ignore": 0.0}, {"instructions": 9, "ignore": 1.0}],
    "selective_copy": [
        {"blanks": 0, "non_blanks": 1, "vocabulary": 2},
        {"blanks": 3, "non_blanks": 9, "vocabulary": 63},
    ],
    "counting": [
        {"min_steps": 1, "max_steps": 4, "variables": 26},
        {"max_steps": 40, "max_value": 2, "variables": 2, "pass_weight": 0},
        {"max_steps": 9, "increment_weight": 0},
    ],
    "indirect_indexing": [
        {"min_length": 1, "max_length": 1, "max_shift": 0},
        {"min_length": 52, "max_length": 52, "max_shift": 120},
        {"min_length": 5, "max_length": 8, "max_shift": 3, "letters": 8},
    ],
}
CONFIGS = {
    f"{task}-{name}": (task, task_config(task, values))
    for task in TASKS
    for name, values in [*task_config(task, {}).test_sets().items(), *((str(i), v) for i, v in enumerate(OTHERS[task]))]
}
SMALL = {
    "flip_flop": {"instructions": 8},
    "selective_copy": {"non_blanks": 6, "blanks": 4, "vocabulary": 5},
    "counting": {"max_steps": 12, "variables": 3},
    "indirect_indexing": {"min_length": 4, "max_length": 9, "max_shift": 3},
}


# --- samples


@pytest.mark.parametrize("name", CONFIGS)
def test_solver_answers_every_sample(name):
    task, config = CONFIGS[name]
    for split in SPLITS:
        for index in range(12):
            symbols, answers = config.sample(split, index)
            assert symbols.dtype == np.int64
            assert answers.dtype == bool
            assert symbols.shape == answers.shape
            assert 0 < len(symbols) <= config.longest
            assert 0 <= symbols.min() <= symbols.max() < len(config.symbols)
            for place in np.flatnonzero(answers):
                assert (
                    getattr(solvers, task)(config.text(symbols[:place]) + config.separator, config)
                    == (config.symbols[symbols[place]])
                )
            row = config.row((symbols, answers))
            assert row["answer"]
            assert row["prompt"] + config.separator + row["answer"] in row["text"]
            assert row["scored"] == answers.tolist()
            assert config.separator.join(row["tokens"]) == row["text"]


@pytest.mark.parametrize("task", SMALL)
def test_a_sample_depends_on_seed_split_and_index_alone(task):
    def sample(split="test", index=5, **changes):
        return config(**changes).sample(split, index)

    def config(**changes):
        return task_config(task, {**SMALL[task], **changes})

    once = sample()
    same = config()
    for index in (7, 0, 5):
        again = same.sample("test", index)
    assert np.array_equal(once.symbols, again.symbols)
    assert np.array_equal(once.answers, again.answers)
    # sizes of splits are no part of it
    assert np.array_equal(once.symbols, sample(test_samples=3).symbols)
    for other in (sample("train"), sample("validation"), sample(index=6), sample(seed=1)):
        assert not np.array_equal(once.symbols, other.symbols)


def test_solvers_on_the_papers_examples():
    ffl = task_config("flip_flop", {})
    assert solvers.flip_flop("w0i1r0w1i0i1r", ffl) == "1"
    assert solvers.flip_flop("w0i1r", ffl) == "0"
    # DBBCFBFBE with blanks B gives DCFFE
    config = task_config("selective_copy", {"non_blanks": 5, "blanks": 4})
    copied = ""
    for _ in range(5):
        copied += solvers.selective_copy("D__CF_F_E" + copied, config)
    assert copied == "DCFFE"
    text = "pass; pass; a = 0 ; pass; a ++; pass; pass; a ++; print a"
    assert solvers.counting(text, task_config("counting", {})) == "2"
    for text, answer in (("NZTUIGWkXFrhCJDzscat, N, +4, ", "I"), ("QEOHoUbKfeSrMVNlCzXu, z, -3, ", "N")):
        assert solvers.indirect_indexing(text, task_config("indirect_indexing", {})) == answer


# --- distributions


def test_flip_flop_distribution():
    config = task_config("flip_flop", {"ignore": 0.6})
    kinds = collections.Counter()
    for index in range(40):
        text = config.row(config.sample("train", index))["text"]
        assert re.fullmatch("w[01]([wri][01])*r[01]", text)
        assert len(text) == 512
        kinds.update(text[2:-2:2])
    for kind, share in (("i", 0.6), ("w", 0.2), ("r", 0.2)):
        assert kinds[kind] / kinds.total() == pytest.approx(share, abs=0.02)


def test_selective_copy_distribution():
    config = task_config("selective_copy", {"vocabulary": 4, "non_blanks": 3, "blanks": 2})
    places, contents = collections.Counter(), collections.Counter()
    for index in range(2000):
        text = config.row(config.sample("train", index))["text"]
        assert text[:5].count("_") == 2
        assert text[5:] == text[:5].replace("_", "")
        places[tuple(place for place in range(5) if text[place] == "_")] += 1
        contents.update(text[5:])
    # all 10 choices of places, all 3 symbols
    assert len(places) == 10
    assert max(places.values()) < 1.35 * min(places.values())
    assert set(contents) == {"a", "b", "c"}
    assert max(contents.values()) < 1.1 * min(contents.values())


def test_counting_distribution():
    paper = task_config("counting", {})
    assert (paper.set_weight, paper.pass_weight, paper.increment_weight) == (1, 50, 7)
    assert (paper.min_steps, paper.max_steps, paper.max_value) == (3, 512, 10)
    config = task_config("counting", {"variables": 3, "min_steps": 100, "max_steps": 130, "set_weight": 5})
    steps, operations, variables, asked = (collections.Counter() for _ in range(4))
    for index in range(150):
        text = config.row(config.sample("train", index))["text"]
        program, question = text.rsplit("print ", 1)
        found = re.findall(r"(pass;)|(\w) (= 0 ;|\+\+;)", program)
        assert " ".join(nothing or f"{variable} {rest}" for nothing, variable, rest in found) + " " == program
        steps[len(found)] += 1
        operations.update(nothing or rest for nothing, _, rest in found)
        variables.update(variable for _, variable, rest in found if rest == "= 0 ;")
        asked[question[0]] += 1
        assert question[0] in {variable for _, variable, rest in found if rest == "= 0 ;"}
        assert 0 <= int(question.split()[1]) <= 10
    assert 100 <= min(steps) <= max(steps) <= 130
    assert len(steps) == 31
    # An increment before the first assignment is drawn again, so that the others are slightly more.
    shares = {kind: count / operations.total() for kind, count in operations.items()}
    assert shares["= 0 ;"] == pytest.approx(5 / 62, rel=0.1)
    assert shares["pass;"] == pytest.approx(50 / 62, rel=0.02)
    assert 0.9 * 7 / 62 < shares["++;"] < 7 / 62
    for counter in (variables, asked):
        assert set(counter) == {"a", "b", "c"}
        assert max(counter.values()) < 1.6 * min(counter.values())


def test_counting_respects_the_largest_value():
    config = task_config("counting", {"max_value": 2, "increment_weight": 50, "max_steps": 60})
    for index in range(50):
        values = {}
        words = config.row(config.sample("train", index))["text"].split()
        for word, following in zip(words, words[1:]):  # noqa: RUF007
            if following in ("=", "++;"):
                values[word] = 0 if following == "=" else values[word] + 1
                assert values[word] <= 2
    # none of it could happen otherwise
    assert "3" not in config.symbols


def test_indirect_indexing_distribution():
    config = task_config("indirect_indexing", {})
    lengths, shifts = collections.Counter(), collections.Counter()
    for index in range(1500):
        text, letter, shift, target = config.row(config.sample("train", index))["text"].split(", ")
        assert len(set(text)) == len(text)
        assert re.fullmatch(r"[+-]\d+", shift)
        assert 0 <= text.index(letter) + int(shift) < len(text)
        assert text[text.index(letter) + int(shift)] == target
        lengths[len(text)] += 1
        shifts[int(shift)] += 1
    assert sorted(lengths) == list(range(20, 41))
    assert sorted(shifts) == list(range(-15, 16))
    # A long shift leaves the string more often: 15 of 30 letters cannot be shifted by it.
    assert 1.2 < (shifts[0] + shifts[1] + shifts[-1]) / (shifts[15] + shifts[-15] + shifts[14]) < 3


# --- data sets


def test_test_sets_are_the_papers():
    assert task_config("flip_flop", {}).test_sets() == {
        "in_distribution": {},
        "sparse": {"ignore": 0.98, "test_samples": 160_000},
        "dense": {"ignore": 0.1, "test_samples": 4_000},
    }
    assert task_config("selective_copy", {}).test_sets() == {
        "in_distribution": {},
        "dense": {"blanks": 128},
        "sparse": {"blanks": 512},
    }
    sets = task_config("counting", {}).test_sets()
    assert sets == {"in_distribution": {}, "longer": {"pass_weight": 100}, "shorter": {"pass_weight": 10}}


@pytest.mark.parametrize("task", [*SMALL, "alice"])
def test_data_sets(task, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    values = {**SMALL.get(task, {}), "seed": 3, "train_samples": 4, "validation_samples": 2, "test_samples": 3}
    config = task_config(task, values)
    streamed = list(build_dataset(config, "test", streaming=True))
    assert streamed == [config.row(config.sample("test", index)) for index in range(3)]
    assert list(build_dataset(config, "test")) == streamed
    # Another seed is not read from the cache.
    assert list(build_dataset(task_config(task, {**values, "seed": 4}), "test")) != streamed


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("flipflop", {}, "task='flipflop' is not valid. Did you mean 'flip_flop'"),
        ("flip_flop", {"ignor": 0.5}, "unknown key 'ignor' .*Did you mean 'ignore'"),
        ("flip_flop", {"ignore": 1.5}, "ignore=1.5 is not valid"),
        ("flip_flop", {"ignore": float("nan")}, "ignore=nan is not valid"),
        ("flip_flop", {"instructions": 2.0}, "instructions=2.0 is not valid"),
        ("flip_flop", {"seed": -1}, "seed=-1 is not valid"),
        ("flip_flop", {"test_samples": 0}, "test_samples=0 is not valid"),
        ("selective_copy", {"vocabulary": 1}, "vocabulary=1 is not valid"),
        ("selective_copy", {"vocabulary": 64}, "vocabulary=64 is not valid"),
        ("selective_copy", {"non_blanks": 0}, "non_blanks=0 is not valid"),
        ("selective_copy", {"blanks": -1}, "blanks=-1 is not valid"),
        ("counting", {"variables": 27}, "variables=27 is not valid"),
        ("counting", {"set_weight": 0}, "set_weight=0 is not valid"),
        ("counting", {"increment_weight": float("inf")}, "increment_weight=inf is not valid"),
        ("counting", {"pass_weight": -1}, "pass_weight=-1 is not valid"),
        ("counting", {"max_value": 0}, "max_value=0 is not valid"),
        ("counting", {"max_steps": 2}, "min_steps=3 is not valid.*max_steps=2"),
        ("indirect_indexing", {"max_length": 19}, "min_length=20 is not valid.*max_length=19"),
        ("indirect_indexing", {"letters": 30}, "max_length=40 is not valid.*letters=30"),
        ("indirect_indexing", {"max_shift": True}, "max_shift=True is not valid"),
        ("alice", {"sentences": 1}, "sentences=1 is not valid"),
        ("alice", {"sentences": 3, "as_in_paper": True}, "sentences=3 is not valid: with as_in_paper"),
    ],
)
def test_bad_parameters(task, values, message):
    with pytest.raises(ValueError, match=message):
        task_config(task, values)


# --- tokenizers


@pytest.mark.parametrize("task", SMALL)
def test_tokenizer(task, tmp_path):
    config = task_config(task, SMALL[task])
    tokenizer = build_tokenizer(config)
    tokenizer.save_pretrained(tmp_path)
    for kind in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert len(kind) == len(config.symbols) + 3
        for index in range(5):
            row = config.row(config.sample("test", index))
            ids = kind(row["text"])["input_ids"]
            assert ids == config.sample("test", index).symbols.tolist()
            assert kind.decode(ids) == row["text"]
        specials = {kind.bos_token_id, kind.eos_token_id, kind.pad_token_id, kind.unk_token_id}
        assert specials == set(range(len(config.symbols), len(kind)))
        assert kind.unk_token_id in kind("?")["input_ids"]
        padded = kind([row["prompt"], config.symbols[0]], padding=True)
        assert padded["input_ids"][1][0] == kind.pad_token_id


# --- batches


@pytest.mark.parametrize("task", SMALL)
def test_labels_and_padding(task):
    config = task_config(task, SMALL[task])
    tokenizer = build_tokenizer(config)
    batch = TaskSamples(config, tokenizer, "train")[range(6)]
    everything = TaskSamples(config, tokenizer, "train", loss="all")[range(6)]
    rows = [config.sample("train", index) for index in range(6)]
    width = max(len(row.symbols) for row in rows)
    assert batch["input_ids"].shape == batch["labels"].shape == (6, -(-width // 8) * 8)
    assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], everything["input_ids"])
    for place, (symbols, answers) in enumerate(rows):
        ids = torch.from_numpy(symbols)
        assert torch.equal(batch["input_ids"][place, : len(ids)], ids)
        assert (batch["input_ids"][place, len(ids) :] == tokenizer.pad_token_id).all()
        expected = torch.full_like(batch["labels"][place], -100)
        expected[: len(ids)] = ids
        assert torch.equal(everything["labels"][place], expected)
        expected[: len(ids)][~torch.from_numpy(answers)] = -100
        assert torch.equal(batch["labels"][place], expected)


def test_long_samples_keep_their_right_end():
    config = task_config("counting", {"min_steps": 30, "max_steps": 30})
    samples = TaskSamples(config, build_tokenizer(config), "test", block=12)
    batch = samples[[0, 1]]
    for place in range(2):
        symbols, _ = config.sample("test", place)
        assert batch["input_ids"][place].tolist() == symbols[-12:].tolist()
        assert (batch["labels"][place] != -100).nonzero().tolist() == [[10]]


def test_another_sets_samples_in_the_models_tokens():
    model, tested = (task_config("counting", {"variables": count, "max_steps": 6}) for count in (3, 1))
    tokenizer = build_tokenizer(model)
    ids, _ = TaskSamples(tested, tokenizer, "test").row(0)
    assert tokenizer.decode(ids) == tested.row(tested.sample("test", 0))["text"]
    with pytest.raises(ValueError, match=r"does not know these symbols of the task: 'b', 'c'"):
        TaskSamples(model, build_tokenizer(tested), "test")


def test_batches_are_a_function_of_the_step():
    """From a stream, each step takes the samples that follow those of the step before."""
    recipe = toy_recipe("flip_flop", training__batch_size=4)
    loaded = load_data(recipe)
    samples = TaskSamples(recipe.data.task_config(), loaded.tokenizer, "train")
    for step in (3, 0, 3):
        expected = samples[range(4 * step, 4 * step + 4)]
        assert torch.equal(loaded.batches(step)["input_ids"], expected["input_ids"])


def test_kept_samples_are_the_same():
    config = task_config("counting", SMALL["counting"])
    tokenizer = build_tokenizer(config)
    kept = TaskSamples(config, tokenizer, "train", count=4, keep=True)
    first, again = kept[[1, 2]], kept[[1, 2]]
    other = TaskSamples(config, tokenizer, "train", count=4)[[1, 2]]
    for name in ("input_ids", "labels"):
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], other[name])


# --- Alice


@pytest.mark.parametrize("sentences", [2, 3, 8])
def test_alice_questions(sentences):
    config = task_config("alice", {"sentences": sentences})
    places, answers = collections.Counter(), collections.Counter()
    for index in range(60):
        row = config.row(config.sample("test", index))
        assert solvers.alice(row["prompt"], config) == row["answer"]
        *earlier, last, _ = row["prompt"].split("\n\n")
        assert len(earlier) == sentences - 1
        found = [bool(re.search(rf"\b{row['word']}\b", text)) for text in (last, " ".join(earlier))]
        assert found == [row["place"] in ("last", "both"), row["place"] in ("earlier", "both")]
        assert (row["answer"] == "0") == (not found[0])
        places[row["place"]] += 1
        answers[row["answer"]] += 1
    assert set(places) == set(alice.PLACES)
    assert {"0", "1", "2"} <= set(answers) <= set("012345")


def test_alice_as_in_the_paper():
    config = task_config("alice", {"as_in_paper": True})
    rows = [config.row(config.sample("test", index)) for index in range(2)]
    assert [(row["word"], row["answer"], row["place"]) for row in rows] == [
        ("Alice", "0", "earlier"),
        ("book", "0", "earlier"),
    ]
    for row in rows:
        assert solvers.alice(row["prompt"], config) == "0"
        assert row["prompt"].startswith("Alice was beginning to get very tired of sitting by her sister on the bank")
        assert row["prompt"].endswith(
            f'ran close by her.\n\nNow, tell me how many times word "{row["word"]}" is mentioned in the last sentence.'
        )
