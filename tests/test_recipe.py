"""Recipes: the shipped ones parse and build, and every mistake is refused with a message that helps."""

import copy
import itertools
import re
import typing
from typing import Literal

import pytest
import torch
import yaml

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

from toys import with_changes
from whatwhere.scripts.checks import differences
from whatwhere.scripts.errors import Refused
from whatwhere.scripts.training.model import build_config, build_model, build_optimizer
from whatwhere.scripts.training.recipe import (
    RECIPES,
    DataRecipe,
    EvaluationRecipe,
    TrainingRecipe,
    load_recipe,
    parse_recipe,
)

SHIPPED = sorted(file.stem for file in RECIPES.glob("*.yaml"))
VALID = {
    "name": "valid",
    "data": {"sequence_length": 16},
    "model": {"family": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1},
    "training": {"steps": 10, "batch_size": 4, "learning_rate": 1e-3},
}


def changed(**values):
    """The valid recipe with other values, as `with_changes` takes them."""
    return with_changes(copy.deepcopy(VALID), values)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_builds(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert parse_recipe(yaml.safe_load(yaml.safe_dump(recipe.resolved()))) == recipe
    config = build_config(recipe)
    assert config.max_position_embeddings == recipe.data.longest_input()
    with torch.device("meta"):
        model = build_model(config, recipe.training)
    if name == "code_cope":
        # Table 5 of the CoPE paper gives 19.8M for the model without position parameters.
        without = sum(p.numel() for key, p in model.named_parameters() if "position" not in key)
        assert round(without / 1e6, 1) == 19.8


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_explains_every_key(name):
    sections = {"data:", "model:", "training:", "evaluation:", "distributed:"}
    lines = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    for before, line in itertools.pairwise(lines):
        if line.strip() and not line.lstrip().startswith("#") and line not in sections:
            # A comment, or the first key of a group that has one.
            assert before.strip(), f"{line!r} has no comment above it"
            assert before not in sections, f"{line!r} has no comment above it"


@pytest.mark.parametrize("name", SHIPPED)
def test_comments_of_a_shipped_recipe_list_the_allowed_values(name):
    text = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    for cls in (DataRecipe, TrainingRecipe, EvaluationRecipe):
        for key, field in cls.model_fields.items():
            kinds = (field.annotation, *typing.get_args(field.annotation))
            allowed = next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal), ())
            if allowed and bool in kinds:
                allowed = ("false", "true", *allowed)
            for comment in re.findall(rf"^  # (.*)\n(?:  # .*\n)*  {key}:", text, re.MULTILINE) if allowed else ():
                assert comment.startswith(" | ".join(allowed)), f"{key}: {comment}"


def test_demo_recipes_differ_in_the_encoding_alone():
    rope, pope, cope = (load_recipe(f"demo_{name}").resolved() for name in ("rope", "pope", "cope"))
    for name, other in (("pope", pope), ("cope", cope)):
        assert differences(rope, other) == [
            f"model.position_encoding: 'rope' → '{name}'",
            f"name: 'demo_rope' → 'demo_{name}'",
        ]


def test_overrides_and_numbers(tmp_path):
    recipe = load_recipe(
        "demo_rope", ["training.learning_rate=5e-4", "seed=3", "evaluation.every=null", "model.rope_theta=500"]
    )
    assert recipe.training.learning_rate == 5e-4
    assert (recipe.seed, recipe.evaluation.every) == (3, None)
    assert build_config(recipe).rope_parameters["rope_theta"] == 500
    # PyYAML reads 1e-3 as a string; an integer where a float is meant is a float
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(VALID).replace("0.001", "1e-3"))
    assert load_recipe(file).training.learning_rate == 1e-3
    parsed = parse_recipe(changed(training__weight_decay=1))
    assert isinstance(parsed.training.weight_decay, float)
    assert parsed == parse_recipe(changed(training__weight_decay=1.0))


def toy(**values):
    """A valid recipe of a toy task with other values."""
    data = {"source": "task", "task": "flip_flop", "task_parameters": {"instructions": 8}, "sequence_length": 16}
    return changed(data=data, **values)


def mixed(*texts, **values):
    return changed(data__source="mixture", data__mixture=list(texts), **values)


BAD = {
    "misspelt section": (changed(trainig={}), "unknown key 'trainig'.*Did you mean 'training'"),
    "misspelt key": (changed(training__learning_rat=1.0), "unknown key 'training.learning_rat'.*'learning_rate'"),
    "missing section": (changed(data=...), "data is missing"),
    "missing key": (changed(training__steps=...), "training.steps is missing"),
    "section is no mapping": (changed(training=[1]), "training=\\[1\\]"),
    "parent as name": (changed(name=".."), r"name='\.\.'"),
    "no steps": (changed(training__steps=0), "training.steps=0"),
    "learning rate nan": (changed(training__learning_rate=float("nan")), "training.learning_rate=nan"),
    "long warm-up": (changed(training__warmup_steps=10), "training.warmup_steps=10"),
    "minimum above": (changed(training__minimum_learning_rate=1.0), "minimum_learning_rate=1.0"),
    "minimum unused": (
        changed(training__minimum_learning_rate=1e-4, training__schedule="constant"),
        "training.minimum_learning_rate=0.0001",
    ),
    "micro batch": (changed(training__micro_batch_size=3), "micro_batch_size=3"),
    "trackers": (changed(training__trackers=[1]), r"training.trackers\[0\]=1"),
    "source": (changed(data__source="web"), "data.source='web'"),
    "words without an end, joined": (
        changed(data__tokenizer="6mer"), "data.pack='concat'"
    ),
    "best of none": (
        changed(evaluation__keep="best"), "evaluation.keep='best'"
    ),
    "hub without dataset": (changed(data__source="hub"), "data.dataset=None"),
    "own text of a wrong type": (changed(data__train_file=3), "data.train_file=3"),
    "bpe without size": (changed(data__tokenizer="bpe"), "data.vocab_size=None"),
    "size without bpe": (changed(data__vocab_size=300), "data.vocab_size=300"),
    "endless evaluation": (
        changed(data__source="hub", data__dataset="me/x", data__streaming=True),
        "evaluation.final_blocks=None",
    ),
    "mixture of nothing": (changed(data__source="mixture"), "data.mixture=None .*list of texts"),
    "mixture of another source": (
        changed(data__mixture=[{"source": "stdlib", "weight": 1}]), "data.source='stdlib' .*must be 'mixture'"
    ),
    "mixture without a weight": (mixed({"source": "stdlib"}), r"data.mixture\[0\].weight is missing"),
    "mixture with a weight of 0": (mixed({"weight": 1}, {"weight": 0.0}), r"data.mixture\[1\].weight=0.0"),
    "text of a mixture": (mixed({"source": "hub", "weight": 1}), r"data.mixture\[0\].dataset=None"),
    "misspelt key of a mixture": (mixed({"weigth": 1}), r"'data.mixture\[0\].weigth'.*'weight'"),
    "splits of a mixture": (mixed({"weight": 1}, data__splits={"train": "a"}), "data.splits=.*source='mixture'"),
    "mixture with one stream": (
        mixed({"train_file": "a", "weight": 1, "streaming": True}), r"data.mixture\[0\].streaming=True"
    ),
    "mixture of streams": (
        mixed({"weight": 1}, data__streaming=True, evaluation__blocks=1, evaluation__final_blocks=1),
        r"data.streaming=True .*data.mixture\[0\].streaming: it has no effect with source='stdlib'",
    ),
    "bpe of a stream": (
        changed(
            data__source="hub", data__dataset="me/x", data__streaming=True, data__tokenizer="bpe", data__vocab_size=300
        ),
        "data.streaming=True",
    ),
    "no family": (changed(model__family=...), "model.family=None"),
    "misspelt model key": (changed(model__hiden_size=8), "hiden_size.*hidden_size"),
    "key of the other family": (changed(model__n_embd=8), "n_embd"),
    "encoding": (changed(model__position_encoding="pop"), "position_encoding='pop'"),
    "small vocabulary": (changed(model__vocab_size=100), "model.vocab_size=100"),
    "beyond absolute": (
        changed(model__position_encoding="absolute", model__max_position_embeddings=15),
        "data.sequence_length=16",
    ),
    "beyond relative": (
        changed(model__position_encoding="relative", model__max_position_embeddings=8),
        "data.sequence_length=16",
    ),
    "task of text": (changed(data__task="counting"), "data.task='counting'"),
    "loss of text": (changed(data__loss="all"), "data.loss='all'"),
    "text of a task": (toy(data__text_field="x"), "data.text_field='x'"),
    "tokenizer of a task": (toy(data__tokenizer="gpt2"), "data.tokenizer='gpt2'"),
    "no task": (toy(data__task=...), "data.task=None"),
    "misspelt task": (toy(data__task="flip_flp"), "data.task='flip_flp'"),
    "probe as a task": (toy(data__task="alice"), "data.task='alice'"),
    "task parameter": (
        toy(data__task_parameters={"ignored": 1}), "data.task_parameters is not valid: .*'ignored'.*'ignore'"
    ),
    "task parameter's range": (
        toy(data__task_parameters={"ignore": 2.0}), "data.task_parameters is not valid: ignore=2.0"
    ),
    "task parameter that the recipe decides": (
        toy(data__task_parameters={"seed": 1}), "data.task_parameters={'seed': 1}"
    ),
    "task parameters": (toy(data__task_parameters=[1]), "data.task_parameters=\\[1\\]"),
    "short block": (toy(data__sequence_length=15), "data.sequence_length=15"),
    "test set": (toy(data__test_sets={"a": 3}), "data.test_sets\\['a'\\]=3"),
    "test set's seed": (toy(data__test_sets={"a": {"seed": 3}}), "data.test_sets\\['a'\\]={'seed': 3}"),
    "test set's parameter": (
        toy(data__test_sets={"a": {"ignor": 3}}), "data.test_sets\\['a'\\] is not valid: .*Did you mean 'ignore'"
    ),
    "test set's symbols": (
        toy(data__task="counting", data__task_parameters={}, data__test_sets={"a": {"variables": 2}}),
        "data.test_sets\\['a'\\]={'variables': 2}",
    ),
    "final blocks of a task": (toy(evaluation__final_blocks=3), "evaluation.final_blocks=3"),
    "test set beyond absolute": (
        toy(
            data__test_sets={"long": {"instructions": 20}},
            model__position_encoding="absolute",
            model__max_position_embeddings=16,
        ),
        "the longest sample of data.test_sets=40 is not valid: .*'absolute' supports at most 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_recipe(case):
    from whatwhere.scripts.data.tokenize import build_tokenizer

    values, message = BAD[case]
    with pytest.raises(Refused, match=f"(?s){message}"):
        build_config(parse_recipe(values), build_tokenizer("bytes"))


def test_valid_recipe_is_valid():
    """The table above changes one thing each: unchanged, nothing is refused."""
    build_config(parse_recipe(VALID))
    reaching = changed(model__position_encoding="alibi", model__max_position_embeddings=8)
    assert build_config(parse_recipe(reaching)).max_position_embeddings == 8


def test_all_errors_are_reported_together():
    values = changed(
        seed=-1,
        data__source="web",
        data__sequence_lenth=3,
        training__steps=0,
        training__learning_rate="fast",
        model__hiden_size=8,
        evaluation__keep="best",
        nmae="x",
    )
    with pytest.raises(Refused) as caught:
        parse_recipe(values)
    fragments = ("seed=-1", "'web'", "'data.sequence_lenth'", "training.steps=0", "learning_rate='fast'", "hiden_size")
    for fragment in (*fragments, "evaluation.keep='best'", "unknown key 'nmae'"):
        assert sum(fragment in problem for problem in caught.value.problems) == 1, fragment
    assert len(caught.value.problems) == 8
    assert str(caught.value) == "\n- ".join(["8 errors:", *caught.value.problems])
    # of fields together, too
    with pytest.raises(Refused, match=r"(?s)2 errors.*warmup_steps=10.*micro_batch_size=3"):
        parse_recipe(changed(training__warmup_steps=10, training__micro_batch_size=3))


def test_own_text_replaces_that_of_a_recipe(tmp_path):
    own = load_recipe("wikitext103_small", ["seed=2"], train_file=["a.txt", "b/*"], validation_file=["c.txt"])
    data = own.resolved()["data"]
    assert (data["source"], data["train_file"], data["validation_file"]) == ("local", ["a.txt", "b/*"], ["c.txt"])
    assert data["splits"] is None
    assert (own.data.vocab_size, own.data.sequence_length, own.seed) == (4096, 512, 2)
    assert parse_recipe(own.resolved()) == own
    assert load_recipe("text_hub", train_file=["a.jsonl"]).data.streaming is False
    # in a recipe the source follows from the files
    assert parse_recipe(changed(data__train_file="a.txt")).data.source == "local"
    with pytest.raises(Refused, match=r"data.validation_file=\['c'\]"):
        load_recipe("demo_rope", validation_file=["c"])


def test_resolved_recipe_says_which_model_is_kept_unless_it_is_the_last():
    """Recipes that are older than the key stay equal to what they were resolved to."""
    assert set(parse_recipe(VALID).resolved()["evaluation"]) == {"every", "blocks", "final_blocks"}
    best = parse_recipe(changed(evaluation__keep="best", evaluation__every=2))
    assert best.resolved()["evaluation"]["keep"] == "best"
    assert parse_recipe(best.resolved()) == best


def test_recipes_of_the_pope_paper():
    """Tables 6 and 7 of its Appendix B."""
    table = {
        "openwebtext": (768, 12, 12, 0.0, 64, 1024, 6e-4, 6e-5, 0.95, 100_000, 1000, "zeros"),
        "jsb": (256, 8, 6, 0.2, 4, 2048, 6e-4, 6e-5, 0.99, 3000, 10, "uniform"),
        "maestro": (384, 8, 6, 0.1, 16, 2048, 6e-4, 6e-5, 0.99, 60_000, 500, "uniform"),
        "genome": (1024, 16, 16, 0.1, 64, 1000, 2.5e-4, 2.5e-5, 0.999, 100_000, 4000, "uniform"),
    }
    for name, values in table.items():
        recipe = load_recipe(name)
        model, training = recipe.model, recipe.training
        assert {model[f"{part}_pdrop"] for part in ("embd", "attn", "resid")} == {values[3]}
        assert (model["norm_type"], model["position_encoding_parameters"]["theta"]) == ("rmsnorm", 10_000)
        assert (training.weight_decay, training.clip_norm, training.schedule) == (0.01, 1.0, "cosine")
        assert values == (
            *(model["n_embd"], model["n_head"], model["n_layer"], model["resid_pdrop"], training.batch_size),
            *(recipe.data.sequence_length, training.learning_rate, training.minimum_learning_rate, training.beta2),
            *(training.steps, training.warmup_steps, model["position_encoding_parameters"]["delta_init"]),
        )


def test_task_recipe_is_filled_in():
    recipe = parse_recipe(toy())
    assert recipe.data.task_parameters == {"instructions": 8, "ignore": 0.8}
    assert recipe.data.test_sets == {
        "in_distribution": {"test_samples": 16_000},
        "sparse": {"ignore": 0.98, "test_samples": 160_000},
        "dense": {"ignore": 0.1, "test_samples": 4_000},
    }
    assert recipe.data.loss == "answer"
    assert parse_recipe(recipe.resolved()) == recipe
    text = parse_recipe(VALID).resolved()["data"]
    assert set(recipe.resolved()["data"]) - set(text) == {
        *("task", "task_parameters", "test_sets", "test_samples", "train_samples", "loss")
    }
    # One number for every test set; the seed of training is the recipe's, that of tests is not.
    fewer = parse_recipe(toy(data__test_samples=5, seed=4))
    assert [values["test_samples"] for values in fewer.data.test_sets.values()] == [5, 5, 5]
    assert fewer.data.task_config(test_set="sparse").test_samples == 5
    assert fewer.data.task_config(test_set="sparse").seed == 0
    # A resolved recipe follows a change of that number.
    again = parse_recipe({**fewer.resolved(), "data": {**fewer.resolved()["data"], "test_samples": 6}})
    assert again.data.task_config(test_set="dense").test_samples == 6


def test_task_recipe_reaches_its_test_sets():
    """By default the model is built for the longest test set; counting is cut to the block instead."""
    values = {"task": "selective_copy", "task_parameters": {"blanks": 6, "non_blanks": 5}}
    values = changed(data={"source": "task", "sequence_length": 16, **values}, model__position_encoding="absolute")
    assert build_config(parse_recipe(values)).max_position_embeddings == 5 + 12 + 5
    counting = changed(data={"source": "task", "task": "counting", "sequence_length": 16})
    assert build_config(parse_recipe(counting)).max_position_embeddings == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "must be a mapping"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("training: {steps: 1, steps: 2}", "'steps' is given twice"),
        ("training: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_bad_file(tmp_path, text, message):
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(Refused, match=message):
        load_recipe(file)


def test_bad_names_and_overrides(tmp_path):
    with pytest.raises(Refused, match="Did you mean 'demo_rope'"):
        load_recipe("demo_rop")
    with pytest.raises(Refused, match="cannot be read"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(Refused, match=r"must be key\.sub=value"):
        load_recipe("demo_rope", ["seed"])
    with pytest.raises(Refused, match="'seed' is not a section"):
        load_recipe("demo_rope", ["seed.x=1"])
    with pytest.raises(Refused, match=r"unknown key 'training\.step'"):
        load_recipe("demo_rope", ["training.step=1"])


def test_decay_and_schedule():
    recipe = parse_recipe(
        changed(training__weight_decay=0.1, training__warmup_steps=2, training__minimum_learning_rate=1e-4)
    )
    model = build_model(build_config(recipe), recipe.training)
    optimizer, scheduler = build_optimizer(model, recipe.training)
    decayed, free = optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(p) for p in model.parameters() if p.ndim >= 2}
    assert {id(p) for p in free["params"]} == {id(p) for key, p in model.named_parameters() if "norm" in key}
    rates = []
    for _ in range(10):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[:3] == [0.0, 5e-4, 1e-3]
    assert rates == [*rates[:3], *sorted(rates[3:], reverse=True)]
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-4)


def test_a_validation_file_alone_keeps_the_text_of_the_recipe(tmp_path):
    """`--validation-file` replaces only that part of a recipe with files of its own."""
    file = tmp_path / "mine.yaml"
    values = yaml.safe_load((RECIPES / "demo_rope.yaml").read_text())
    values["data"] = {"source": "local", "train_file": "a.txt", "sequence_length": 256}
    file.write_text(yaml.safe_dump(values))
    recipe = load_recipe(file, validation_file=["b.txt"])
    assert (recipe.data.train_file, recipe.data.validation_file) == ("a.txt", ["b.txt"])
