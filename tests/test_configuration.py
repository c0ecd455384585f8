"""Bad configurations stop early, with a message that names the field, the value and what is allowed."""

import copy
import dataclasses
import inspect
import itertools
import json
import random
import re
import typing

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.testing_utils import CaptureLogger
from transformers.utils import TransformersKwargs, logging

import whatwhere
from tiny import FAMILIES, causal_lm_class, declared, tiny_config, tiny_model, tokens
from whatwhere import WhatWhereGPT2Config, WhatWhereLlamaConfig
from whatwhere.attention_choice import flash_names, supported_implementations
from whatwhere.forward_arguments import CACHE
from whatwhere.position_plan import COMBINATIONS
from whatwhere.position_registry import POSITION_ENCODINGS

SINUSOIDAL = {"position_encoding": "sinusoidal"}
BLOCK_OPTIONS = ("output_gate", "output_norm", "qk_norm", "key_value_shift")
# Fields, and what the message says of them.
FIELDS = [
    ({"positon_encoding": "cope"}, "no field 'positon_encoding'.*Did you mean 'position_encoding'"),
    ({"colour": "red"}, "no field 'colour' .given: 'red'."),
    ({"position_encoding": "pop"}, "position_encoding='pop'.*Did you mean 'pope'.*'cope[+]rope'"),
    ({"position_encoding": 3}, "position_encoding.*expected str, got int .value: 3"),
    ({"position_encoding": "CoPE"}, "position_encoding='CoPE' is not valid. Did you mean 'cope'"),
    ({"Position_Encoding": "cope"}, "Did you mean 'position_encoding'"),
    ({"position_encoding": "cope+pope"}, "position_encoding='cope[+]pope' is not valid"),
    ({"position_encoding": "rope+cope"}, "Did you mean 'cope[+]rope'"),
    ({"position_encoding": []}, r"position_encoding=\[\] is not valid"),
    (
        {"position_encoding": ["rope", "none", "none"]},
        r"position_encoding=\['rope', 'none', 'none'\] is not valid: .*(num_hidden_layers|n_layer)=2",
    ),
    ({"position_encoding": ["rope", "pop"]}, "position_encoding='pop'.*Did you mean 'pope'"),
    ({"position_encoding": ["rope", 3]}, "position_encoding.*3"),
    ({"position_encoding": ["rope", ["none"]]}, r"position_encoding.*\['none'\]"),
    ({"position_encoding": ["absolute", "rope"]}, r"\['absolute', 'rope'\].*'absolute'"),
    ({"position_encoding": ["rope", "sinusoidal"]}, r"\['rope', 'sinusoidal'\].*'sinusoidal'"),
    (
        {"position_encoding": ["fox", "rope"], "key_value_shift": True},
        r"key_value_shift=True is not valid for position_encoding=\['fox', 'rope'\]: 'rope'",
    ),
    *(({name: "yes"}, f"{name}.*expected bool, got str") for name in BLOCK_OPTIONS),
    ({"qk_norm": 1}, "qk_norm.*expected bool, got int"),
    *(
        ({"position_encoding": name, "key_value_shift": True}, f"key_value_shift=True.*'{part}'.*False")
        for name, part in (("fox+rope", "rope"), ("rope", "rope"), ("pope", "pope"))
    ),
    (
        {"position_encoding": "stick_breaking", "attention_weights": "hard"},
        "attention_weights='hard'.*'softmax'",
    ),
    ({"qk_norm_eps": 1e-5}, "qk_norm_eps=1e-05 has no effect with qk_norm=False"),
    ({"qk_norm_eps": -1.0}, "qk_norm_eps=-1.0 is not valid: it must be greater than 0"),
    ({"hidden_size": 30}, "(num_attention_heads|n_head)=4 is not valid: it must divide (hidden_size|n_embd)=30"),
    (
        {"position_encoding": ["cope", "none"], "rope_parameters": {"rope_theta": 100.0}},
        r"rope_parameters=.*has no effect with position_encoding=\['cope', 'none'\]",
    ),
    (
        {"position_encoding": "pope", "rope_parameters": {"rope_theta": 100.0}},
        "rope_parameters=.*has no effect with position_encoding='pope'",
    ),
    (
        {"position_encoding": "cope", "rope_theta": 100.0},
        "rope_theta=100.0 has no effect with .*'cope'",
    ),
    ({"position_encoding": "rope", "rope_theta": -1.0}, "rope_theta=-1.0 is not valid"),
    ({"position_encoding": "rope", "rope_theta": float("inf")}, "rope_theta=inf is not valid"),
    ({"position_encoding": "rope", "rope_theta": 1e300}, "rope_theta=1e[+]300 is not"),
    ({"position_encoding": "rope", "rope_scaling": [8]}, "rope_scaling=.8. is not"),
    (
        {"position_encoding": "rope", "rope_parameters": {"rope_theta": 9.0}, "rope_scaling": {"rope_theta": 8.0}},
        "rope_parameters=.*and rope_scaling=.*differ",
    ),
    (
        {"position_encoding": "rope", "rope_parameters": {"rope_theta": 9.0}, "rope_theta": 8.0},
        "rope_theta=8.0 and rope_parameters.'rope_theta'.=9.0 differ",
    ),
    (
        {"position_encoding": "rope", "hidden_size": 12, "num_attention_heads": 4},
        "head_dim=3 is not valid: of 3 channels of a head it rotates 3",
    ),
    (
        {"position_encoding": "rope", "hidden_size": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type'.='dynamic' is not valid.*at least 4",
    ),
    ({"initializer_range": float("inf")}, "initializer_range=inf is not valid"),
    ({"initializer_range": float("nan")}, "initializer_range=nan is not valid"),
    ({"initializer_range": -1.0}, "initializer_range=-1.0 is not valid: it must be at least 0"),
    ({"pad_token_id": -1}, "pad_token_id=-1 is not valid: it must be at least 0"),
    ({"eos_token_id": [2, -2]}, "eos_token_id=.2, -2. is not valid"),
    ({"bos_token_id": -7}, "bos_token_id=-7 is not valid"),
    ({"dtype": "float33"}, "dtype='float33' is not valid: it must be a type of torch"),
    ({"num_labels": 0}, "num_labels=0 is not valid"),
    ({"id2label": {"a": "b"}}, "id2label=.* is not valid: .*keys that are integers"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not valid"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 is not valid"),
    ({"num_hidden_layers": 0}, "(num_hidden_layers|n_layer)=0 is not valid: it must be greater than 0"),
    ({"max_position_embeddings": 0}, "(max_position_embeddings|n_positions)=0 is not valid: it must be greater than 0"),
    ({"vocab_size": 0}, "vocab_size=0 is not valid: it must be greater than 0"),
    ({"vocab_size": "many"}, "vocab_size.*expected int, got str"),
]
# Encodings, their parameters, and what the message says of them; those of one encoding are in its own test file.
PARAMETERS = [
    *((name, *row) for name, rows in declared("REFUSED").items() for row in rows),
    ("cope", {"num_position": 8}, "has the unknown key 'num_position'. Did you mean 'num_positions'"),
    ("rope", {"theta": 10.0}, "unknown key 'theta'. Allowed: nothing.*set by the field rope_parameters"),
    ("cope+rope", {"cope": {"gates": "value"}}, r"\['cope'\]\['gates'\]='value'.*'value' excludes it"),
    ("cope", [64], "position_encoding_parameters.*expected|position_encoding_parameters=.*dictionary"),
    ("cope+rope", {"num_positions": 8}, "unknown key 'num_positions'; for .*'cope[+]rope' it is nested by name"),
    ("cope+rope", {"cope": 8}, r"position_encoding_parameters\['cope'\]=8 is not valid: it must be a dictionary"),
    ("cope+rope", {"cope": {"num_positions": 1}}, r"\['cope'\]\['num_positions'\]=1 is not valid"),
    (
        ["rope", "cope"],
        {"cope": {"every_n_layers": 2}},
        r"\['cope'\]=.*'every_n_layers': 2.*is not valid: it excludes all layers",
    ),
    (["cope", "cope"], {"num_positions": 8}, r"unknown key 'num_positions'; for .*\['cope', 'cope'\] it is nested"),
    (["cope", "rope"], {"pope": {}}, r"unknown key 'pope'.*\['cope', 'rope'\]"),
    (["cope", "rope"], {"cope": {"num_positions": 1}}, r"\['cope'\]\['num_positions'\]=1 is not valid"),
]
# Parameters of RoPE, and what the message says of them.
ROPE = [
    ({"rope_theta": 1e4, "partial_rotary_factor": 0.4}, "=0.4 is not valid: of 8 channels of a head it rotates 3"),
    *(
        ({"partial_rotary_factor": factor}, f"'partial_rotary_factor'.={factor!r} is not valid.*must be")
        for factor in (0.0, 1.5, "half", None, 0.13)
    ),
    ({"rope_typ": "yarn", "factor": 4.0}, "has the unknown key 'rope_typ'. Did you mean 'rope_type'"),
    ({"rope_type": "foo"}, "rope_parameters.'rope_type'.='foo' is not valid. Allowed: 'default'"),
    ({"rope_theta": None}, "rope_theta'.=None is not valid"),
    (8, "rope_parameters=8 is not"),
    (0, "rope_parameters=0 is not"),
    *(
        ({"rope_type": kind}, f"rope_parameters.'factor'. is missing: rope_type='{kind}' needs")
        for kind in ("linear", "dynamic", "yarn", "llama3")
    ),
    ({"rope_type": "longrope"}, "rope_parameters.'short_factor'. is missing: rope_type='longrope' needs"),
    *(
        (
            {"rope_type": "linear", "factor": factor},
            f"'factor'.={factor!r} is not valid: it must be a number greater than 0",
        )
        for factor in (float("nan"), float("inf"), 0, -2.0, True, "2")
    ),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "'beta_fast'.=32 has no effect with rope_type='linear'"),
    ({"factor": 2.0}, "rope_parameters.'factor'.=2.0 has no effect with rope_type='default'"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "'truncate'.=1 is not valid: it must be True or False"),
    (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0},
        "original_max_position_embeddings'.=0 is not valid: it must be an integer, at least 2",
    ),
    (
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        "high_freq_factor'.=4.0 is not valid: it must be greater than low_freq_factor=4.0",
    ),
    (
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
        "rope_parameters.'short_factor'. has 1 numbers; allowed: 4",
    ),
]


# The same for fields of one family.
OF_ONE_FAMILY = [
    *(
        (family, {field: value}, f"{field}={value} is not valid: it must be greater than 0, finite")
        for family, field in (("llama", "rms_norm_eps"), ("gpt2", "layer_norm_eps"))
        for value in (float("inf"), float("nan"), 0.0, 1e-300)
    ),
    # It is the embedding's padding_idx.
    ("llama", {"pad_token_id": 61}, "pad_token_id=61 is not valid.*vocab_size=61"),
    ("llama", {"hidden_size": 9, "num_attention_heads": 3, "num_key_value_heads": 3, **SINUSOIDAL}, "=9 must be even"),
    ("gpt2", {"norm_type": "batchnorm"}, "norm_type.*'layernorm', 'rmsnorm'"),
    ("gpt2", {**SINUSOIDAL, "position_encoding_parameters": {"scale": 0.0}}, "scale'.=0.0 is not valid"),
    ("gpt2", {"attn_pdrop": 2.0}, "attn_pdrop=2.0 is not valid: it must be in .0, 1"),
    (
        "gpt2",
        {"activation_function": "nope"},
        "activation_function='nope' is not valid.*one of .*'gelu_new'",
    ),
    ("gpt2", {"hidden_size": 33}, "n_head=4 is not valid.*n_embd=33"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention.*False"),
]


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        *OF_ONE_FAMILY,
        *((family, *row) for family in FAMILIES for row in FIELDS),
        *(
            (family, {"position_encoding": name, "position_encoding_parameters": own}, text)
            for family, (name, own, text) in zip(itertools.cycle(FAMILIES), PARAMETERS)
        ),
        *(
            (family, {"position_encoding": "rope", "rope_parameters": rope}, text)
            for family, (rope, text) in zip(itertools.cycle(FAMILIES), ROPE)
        ),
    ],
)
def test_bad_fields(family, fields, message):
    others = dict(fields)
    encoding = others.pop("position_encoding", "none")
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        tiny_config(family, encoding, **others)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_assignment_of_the_wrong_type_is_a_value_error(family):
    config = tiny_config(family, "rope")
    # On the GPT-2 family hidden_size is an alias.
    for field, value in (("vocab_size", "many"), ("attention_weights", "soft"), ("hidden_size", 3.5)):
        with pytest.raises(ValueError, match=r"expected|not one of|must be one of") as caught:
            setattr(config, field, value)
        # What Transformers' own configurations raise, too.
        assert isinstance(caught.value, StrictDataclassFieldValidationError)
        assert str(value) in str(caught.value)
    # Transformers assigns what `dtype` was asked for.
    config.dtype = "auto"
    config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="num_key_value_heads=3 is not valid") as caught:
        config.validate()
    assert isinstance(caught.value, StrictDataclassClassValidationError)
    with pytest.raises(ValueError, match="num_key_value_heads=3 is not valid"):
        causal_lm_class(family)(config)
    config = tiny_config(family, "rope")
    config.rope_parameters = {"rope_type": "yarn"}
    with pytest.raises(ValueError, match=r"rope_parameters.'factor'. is missing"):
        causal_lm_class(family)(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_stock_file_may_hold_is_dropped_with_a_warning(family, tmp_path):
    config_class = type(tiny_config(family, "none"))
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "beta_fast": 32, "colour": "red"}
    rope["type"] = "mrope"
    stock = {
        "model_type": config_class.stock_model_type,
        "hidden_size" if family == "llama" else "n_embd": 32,
        "num_attention_heads" if family == "llama" else "n_head": 4,
        "pad_token_id": -1,
        "eos_token_id": [2, -1],
        "position_encoding": "rope",
        "rope_scaling": rope,
    }
    (tmp_path / "config.json").write_text(json.dumps(stock))
    with CaptureLogger(logging.get_logger("whatwhere.checkpoint_conversion")) as log:
        config = config_class.from_pretrained(tmp_path)
    assert config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert config.pad_token_id is None
    assert config.eos_token_id == [2]
    for words in ("rope_scaling['beta_fast']", "rope_scaling['colour']", "pad_token_id=-1"):
        assert log.out.count(words) == 1
    # A file of ours from before these checks loads too; a key that nothing uses is a mistake in it.
    del rope["colour"]
    ours = {**tiny_config(family, "rope").to_dict(), "rope_parameters": rope}
    (tmp_path / "config.json").write_text(json.dumps(ours))
    assert config_class.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    (tmp_path / "config.json").write_text(json.dumps({**ours, "rope_parameters": {"rope_typ": "yarn"}}))
    with pytest.raises(ValueError, match="unknown key 'rope_typ'"):
        config_class.from_pretrained(tmp_path)
    # A keyword is new.
    with pytest.raises(ValueError, match=r"'beta_fast'.=32 has no effect"):
        config_class.from_pretrained(tmp_path, rope_parameters={"beta_fast": 32})


def test_a_keyword_rope_theta_replaces_that_of_the_file(tmp_path):
    tiny_config("llama", "rope", rope_theta=100.0).save_pretrained(tmp_path)
    config = WhatWhereLlamaConfig.from_pretrained(tmp_path, rope_theta=777.0)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 777.0}


ODD_VALUES = (
    *(None, True, False, 0, 1, 2, 3, 4, 7, 8, -1, -5, 10**30, 0.5, 1.0, 0.0, -0.1, 1e308, 1e-320, 10000.0),
    *(float("inf"), float("-inf"), float("nan"), "", "yarn", "linear", "rope", "cope", "hard", "gelu", "float16", "é"),
    *([], [1], [-1.0], {}, {"a": 1}, {0: "x"}, {"factor": 2.0}, (1, 2), b"x"),
)
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "truncate", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "nonsense"),
)


PLANS = (["rope", "none"], ["cope", "rope"], ["pope", "alibi"], ["cope+rope", "fox"], ["cope"])


def random_fields(family, generator):
    """Fields for `tiny_config`: a random encoding, and up to three random fields with odd values."""

    def value():
        return generator.choice(ODD_VALUES)

    encoding = generator.choice([*whatwhere.list_position_encodings(), *PLANS])
    parts = [part for name in ([encoding] if isinstance(encoding, str) else encoding) for part in name.split("+")]
    names = {field.name for field in dataclasses.fields(type(tiny_config(family, "none")))} | {
        *("num_labels", "rope_theta", "rope_scaling", "torch_dtype", "attn_implementation", "output_attentions")
    }
    names = sorted(names - {"position_encoding", "architectures", "transformers_version"})
    fields = {name: value() for name in generator.sample(names, generator.randint(0, 3))}
    if generator.random() < 0.5:
        parameters = {}
        for part in dict.fromkeys(parts):
            known = [field.name for field in dataclasses.fields(POSITION_ENCODINGS[part].parameters_class)]
            chosen = generator.sample(known, generator.randint(0, min(2, len(known))))
            parameters[part] = {name: value() for name in chosen}
        fields["position_encoding_parameters"] = parameters if encoding != parts[0] else parameters[encoding]
    if "rope" in parts and generator.random() < 0.8:
        rope = {key: value() for key in generator.sample(ROPE_KEYS, generator.randint(0, 3))}
        if generator.random() < 0.7:
            rope["rope_type"] = generator.choice(("default", "linear", "dynamic", "yarn", "llama3", "longrope"))
        fields["rope_parameters"] = rope
    return encoding, fields


@pytest.mark.parametrize("family", FAMILIES)
def test_random_configurations_are_valid_or_refused_by_name(family):
    generator = random.Random(20)
    valid = 0
    for _ in range(250):
        encoding, fields = random_fields(family, generator)
        config, refusal = None, None
        try:
            config = tiny_config(family, encoding, **copy.deepcopy(fields))
        except ValueError as error:
            refusal = str(error)
        except Exception as error:
            raise AssertionError(f"{encoding}, {fields}: {type(error).__name__}: {error}") from error
        if config is not None:
            valid += 1
            again = type(config).from_dict(config.to_dict())
            assert again.to_dict() == config.to_dict(), fields
        else:
            assert any(name in refusal for name in fields), f"{encoding}, {fields}: {refusal}"
    assert 25 < valid < 225


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_assigned_later_is_checked_by_the_model(family):
    config = tiny_config(family, "cope")
    config.position_encoding = "pope"
    with pytest.raises(ValueError, match="unknown key 'num_positions'"):
        causal_lm_class(family)(config)
    config.position_encoding_parameters = None
    assert causal_lm_class(family)(config).config.position_encoding_parameters["delta_init"] == "zeros"
    config = tiny_config(family, "rope")
    config.position_encoding = "alibi"
    assert not hasattr(causal_lm_class(family)(config).config, "rope_parameters")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", [*whatwhere.list_position_encodings(), *PLANS], ids=str)
def test_resolved_defaults_are_written_back_and_saved(family, encoding, tmp_path):
    config = tiny_config(family, encoding)
    resolved = config.position_encoding_parameters
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["position_encoding_parameters"] == resolved
    assert saved["position_encoding"] == encoding
    parts = [part for name in ([encoding] if isinstance(encoding, str) else encoding) for part in name.split("+")]
    assert ("rope_parameters" in saved) == ("rope" in parts)
    again = type(config).from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    nested = {encoding: resolved} if encoding == parts[0] else resolved
    assert set(nested) == set(parts)
    for part in parts:
        fields = {field.name for field in dataclasses.fields(POSITION_ENCODINGS[part].parameters_class)}
        assert set(nested[part]) == fields
        # Without `frequencies`, theta gives them.
        assert {key for key, value in nested[part].items() if value is None} <= {"frequencies"}


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_names_its_keywords(family):
    head = causal_lm_class(family)(tiny_config(family, "rope"))
    base = head.get_decoder()
    layer = next(module for module in base.modules() if isinstance(module, GradientCheckpointingLayer))
    attention = next(module for module in base.modules() if type(module).__name__.endswith("Attention"))
    for module in (head, base, layer, attention):
        keywords = inspect.signature(module.forward).parameters["kwargs"].annotation
        assert typing.get_args(keywords) == (TransformersKwargs,), type(module)


@pytest.mark.filterwarnings("ignore")  # peft's own
@pytest.mark.parametrize("family", FAMILIES)
def test_lora_finds_its_targets(family):
    constants = pytest.importorskip("peft.utils.constants")
    peft = pytest.importorskip("peft")
    model = causal_lm_class(family)(tiny_config(family, "cope"))
    mapping = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    mapping.pop(model.config.model_type, None)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM"))
    expected = mapping[model.config.stock_model_type]
    assert adapted.peft_config["default"].target_modules == set(expected)
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2 * len(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_loading_overrides(family, tmp_path):
    tiny_config(family, "cope", position_encoding_parameters={"num_positions": 9}).save_pretrained(tmp_path)
    config_class = type(tiny_config(family, "none"))
    same = config_class.from_pretrained(tmp_path, max_position_embeddings=99)
    assert (same.position_encoding_parameters["num_positions"], same.max_position_embeddings) == (9, 99)
    changed = config_class.from_pretrained(tmp_path, position_encoding="rope", rope_parameters={"rope_theta": 77.0})
    assert changed.rope_parameters["rope_theta"] == 77.0
    assert changed.position_encoding_parameters == {}
    given = config_class.from_pretrained(tmp_path, position_encoding_parameters={"num_positions": 5})
    assert given.position_encoding_parameters["num_positions"] == 5
    with pytest.raises(ValueError, match="Did you mean 'position_encoding'"):
        config_class.from_pretrained(tmp_path, positon_encoding="rope")
    _, unused = config_class.from_pretrained(tmp_path, return_unused_kwargs=True, a_model_argument=3)
    assert unused == {"a_model_argument": 3}


def test_aliases_decide_what_depends_on_them():
    config = WhatWhereGPT2Config(hidden_size=96, num_attention_heads=24, num_hidden_layers=1)
    assert (config.n_embd, config.n_head, config.n_layer, config.num_key_value_heads) == (96, 24, 1, 24)
    assert WhatWhereGPT2Config(layer_norm_eps=0.25).layer_norm_epsilon == 0.25


@pytest.mark.parametrize("family", FAMILIES)
def test_settings_of_an_encoding_that_stays_are_kept(family, tmp_path):
    parameters = {"num_positions": 9, "scale_positions": True}
    tiny_config(family, "cope", position_encoding_parameters=parameters).save_pretrained(tmp_path)
    config_class = type(tiny_config(family, "none"))
    summed = config_class.from_pretrained(tmp_path, position_encoding="cope+rope")
    assert summed.position_encoding_parameters["cope"].items() >= parameters.items()
    summed.save_pretrained(tmp_path)
    alone = config_class.from_pretrained(tmp_path, position_encoding="cope")
    assert alone.position_encoding_parameters.items() >= parameters.items()
    plan = config_class.from_pretrained(tmp_path, position_encoding=["cope", "rope"])
    assert plan.position_encoding_parameters["cope"].items() >= parameters.items()
    plan.save_pretrained(tmp_path)
    again = config_class.from_pretrained(tmp_path, position_encoding="cope")
    assert again.position_encoding_parameters.items() >= parameters.items()
    assert config_class.from_pretrained(tmp_path, position_encoding="none").position_encoding_parameters == {}


def test_rope_parameters_of_the_caller_are_left_alone():
    given = {"rope_type": "linear", "factor": 2.0}
    tiny_config("llama", "rope", rope_scaling=given)
    assert given == {"rope_type": "linear", "factor": 2.0}


def test_default_constructors():
    assert tiny_config("llama", "none", attention_dropout=None).attention_dropout == 0.0
    assert WhatWhereLlamaConfig().position_encoding == "rope"
    assert WhatWhereGPT2Config().position_encoding == "absolute"
    assert WhatWhereGPT2Config().hidden_size == 768


def test_the_list_names_every_encoding_once():
    names = whatwhere.list_position_encodings()
    assert len(names) == len(set(names))
    assert set(names) == {*POSITION_ENCODINGS, *COMBINATIONS}
    for name, cls in POSITION_ENCODINGS.items():
        assert cls.name == name
        assert cls.paper
        assert cls.summary
        assert cls.__doc__


@pytest.mark.parametrize("encoding", whatwhere.list_position_encodings())
def test_unsupported_attention_is_refused_by_name(encoding):
    config = tiny_config("llama", encoding)
    supported = supported_implementations(config)
    assert "eager" in supported
    # What PyTorch's own attention does alone needs no blocks.
    assert ("blockwise" in supported) == (encoding not in ("none", "absolute", "sinusoidal", "rope", "pope"))
    named = re.escape(repr(encoding))
    flash = {"flash_attention_2", "kernels-community/flash-attn2"}
    for name in {"sdpa", "flex_attention", "blockwise", *flash} - set(supported):
        if name in flash and "flash_attention_2" in supported:
            continue
        with pytest.raises(ValueError, match=f'attn_implementation="{name}".* position_encoding={named}'):
            causal_lm_class("llama")._from_config(tiny_config("llama", encoding), attn_implementation=name)
    with pytest.raises(ValueError, match=r'attn_implementation="fast".*Allowed: .*eager'):
        causal_lm_class("llama")._from_config(tiny_config("llama", encoding), attn_implementation="fast")
    # Not a name of Transformers: the error lists names that it takes.
    with pytest.raises(ValueError, match=r'attn_implementation="flash_attention".*Allowed: ') as error:
        causal_lm_class("llama")._from_config(tiny_config("llama", encoding), attn_implementation="flash_attention")
    for name in re.findall(r"'(\w+)'", str(error.value).partition("Allowed: ")[2]):
        assert name in ("auto", "triton", "blockwise", "eager") or name in ALL_ATTENTION_FUNCTIONS
    model = causal_lm_class("llama")(config)
    assert model.config._attn_implementation == supported[0]
    if "sdpa" not in supported:
        with pytest.raises(ValueError, match='attn_implementation="sdpa"'):
            model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ["cope", "rope", "alibi"])
def test_attention_weights_are_given_or_refused(family, encoding):
    ids = tokens(1, 5)
    for implementation in supported_implementations(tiny_config(family, encoding)):
        if implementation in ("triton", *flash_names(), "flex_attention", "eager"):
            continue
        model = tiny_model(family, encoding, implementation)
        for options in ({"output_attentions": True}, {"output_attentions": True, "use_cache": False}):
            with pytest.raises(ValueError, match=f"output_attentions=True: attn_implementation='{implementation}' has"):
                model(ids, **options)
        assert model(ids).attentions is None
    model.set_attn_implementation("eager")
    assert [weights.shape for weights in model(ids, output_attentions=True).attentions] == [(1, 4, 5, 5)] * 2
    # As with Transformers' own models: the field chooses eager where nothing else is asked for.
    model = causal_lm_class(family)(tiny_config(family, encoding, output_attentions=True))
    assert model.config._attn_implementation == "eager"
    assert len(model(ids).attentions) == 2


def test_masks_of_the_wrong_shape():
    model = tiny_model("llama", "cope")
    ids = tokens(2, 9)
    for shape in ((2, 8), (2, 10), (1, 9), (2, 9, 9), (2, 1, 8, 9), (2, 1, 9, 8), (2, 3, 9, 9), (2, 1, 9, 9)):
        with pytest.raises(ValueError, match=re.escape(f"attention_mask has the shape {shape}")):
            model(ids, attention_mask=torch.ones(shape, dtype=torch.long))
    cache = model(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"\(2, 10\)"):
        model(ids[:, :1], attention_mask=torch.ones(2, 1, dtype=torch.long), cache=cache)


def test_positions_of_the_wrong_shape():
    for encoding in ("cope", "rope", "relative"):
        model = tiny_model("llama", encoding)
        ids = tokens(2, 9)
        for positions in (torch.arange(9), torch.arange(8)[None], torch.arange(9.0)[None]):
            with pytest.raises(ValueError, match="position_ids has the shape"):
                model(ids, position_ids=positions)
        with pytest.raises(ValueError, match="The input has no tokens"):
            model(ids[:, :0])


def test_inputs_given_twice_or_not_at_all():
    for family in FAMILIES:
        model = tiny_model(family, "rope")
        ids = tokens(1, 4)
        for inputs in ({}, {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}):
            with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
                model(**inputs)
