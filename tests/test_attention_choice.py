"""The attention function of a layer follows the implementation, whenever and however that is changed."""

import copy
import io
import pickle
import threading

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tiny import tiny_config, tiny_model, tokens
from whatwhere import WhatWhereLlamaForCausalLM
from whatwhere.attention_choice import supported_implementations
from whatwhere.modeling_whatwhere_llama import WhatWhereLlamaAttention
from whatwhere.position_registry import ATTENTION_FUNCTIONS, PARTS, POSITION_ENCODINGS

IDS = tokens(1, 6)


class Engine:
    """A function that cannot be copied."""

    def __init__(self):
        self.lock, self.calls = threading.Lock(), 0

    def __call__(self, *arguments, **options):
        self.calls += 1
        return sdpa_attention_forward(*arguments, **options)


def test_a_name_that_is_assigned_to_the_configuration():
    model = tiny_model("llama", "rope", "sdpa")
    expected = model(IDS).logits
    for name in ("eager", None, "sdpa", "auto"):
        model.config._attn_implementation_internal = name
        torch.testing.assert_close(model(IDS).logits, expected)
    with pytest.raises(ValueError, match="no attention weights"):
        model(IDS, output_attentions=True)
    model.config._attn_implementation_internal = "eager"
    assert model(IDS, output_attentions=True).attentions[0].shape[-1] == 6


@pytest.mark.parametrize("name", [*PARTS, "unknown"])
def test_a_name_that_is_no_implementation(name):
    model = tiny_model("llama", "stick_breaking", "blockwise")
    model.config._attn_implementation_internal = {"triton": "no triton"}.get(name, name)
    with pytest.raises(KeyError, match="not a valid attention implementation"):
        model(IDS)


def test_a_layer_without_an_implementation():
    config = tiny_config("llama", "none")
    assert config._attn_implementation is None
    assert WhatWhereLlamaAttention(config, 0).attention is not None


def test_an_engine_that_comes_and_goes(monkeypatch):
    model, engine = tiny_model("llama", "rope", "sdpa"), Engine()
    expected = model(IDS).logits
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", engine)
        torch.testing.assert_close(model(IDS).logits, expected)
        assert engine.calls == 2
        # Copies choose their own functions.
        copied = copy.deepcopy(model)
        torch.testing.assert_close(copied(IDS).logits, expected)
        assert engine.calls == 4
        pickled = io.BytesIO()
        torch.save(model, pickled)
    for one in (model, copied, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(one(IDS).logits, expected)
    assert engine.calls == 4


def test_auto_is_the_default():
    for encoding in POSITION_ENCODINGS:
        model = WhatWhereLlamaForCausalLM._from_config(tiny_config("llama", encoding), attn_implementation="auto")
        assert model.config._attn_implementation == supported_implementations(model.config)[0]
    assert {"sdpa", "blockwise"} <= {*ATTENTION_FUNCTIONS}
