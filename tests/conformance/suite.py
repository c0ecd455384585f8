"""Transformers' common model tests, one class for each subject; run by `run.py`, not by pytest on its own.

A subject is a family and an encoding (`llama:cope`, `gpt2:absolute`), or the stock model of a family (`llama:stock`).
`run.py` names them in CONFORMANCE_SUBJECTS and puts the fetched tests, a package called `transformers_tests`, on
the path.
"""

import os
import unittest
import unittest.mock
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedConfig,
)
from transformers_tests import test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin, test_training_mixin

import whatwhere
from whatwhere.attention_choice import supported_implementations

# Tests that start several processes run for a few of the library's model types only. Here: for all (None) or none.
_types: set | None = None if os.environ.get("CONFORMANCE_DISTRIBUTED") else set()
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = _types
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = _types

STOCK = {
    "llama": (LlamaConfig, LlamaModel, LlamaForCausalLM, LlamaForSequenceClassification),
    "gpt2": (GPT2Config, GPT2Model, GPT2LMHeadModel, GPT2ForSequenceClassification),
}
OURS = {
    "llama": (
        whatwhere.WhatWhereLlamaConfig,
        whatwhere.WhatWhereLlamaModel,
        whatwhere.WhatWhereLlamaForCausalLM,
        whatwhere.WhatWhereLlamaForSequenceClassification,
    ),
    "gpt2": (
        whatwhere.WhatWhereGPT2Config,
        whatwhere.WhatWhereGPT2Model,
        whatwhere.WhatWhereGPT2ForCausalLM,
        whatwhere.WhatWhereGPT2ForSequenceClassification,
    ),
}
FIELDS = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "gpt2": {"n_embd": 32, "n_inner": 37, "n_head": 4, "n_layer": 2, "n_positions": 512},
}
TOKENS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_labels": 3}


class ModelTester:
    """The tiny model that the tests ask for; its attributes are those that they read."""

    is_training = True
    batch_size = 13
    seq_length = 7
    vocab_size = TOKENS["vocab_size"]
    pad_token_id = TOKENS["pad_token_id"]
    num_hidden_layers = 2
    num_attention_heads = 4
    hidden_size = 32

    def __init__(self, family: str, encoding: str) -> None:
        self.fields = {**TOKENS, **FIELDS[family]}
        if encoding == "stock":
            classes = STOCK[family]
        else:
            classes = OURS[family]
            self.fields["position_encoding"] = encoding
        self.config_class, self.base_model_class, self.causal_lm_class, self.sequence_classification_class = classes
        self.all_model_classes = classes[1:]

    def get_config(self) -> PreTrainedConfig:
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        shape = (self.batch_size, self.seq_length)
        # Padding is left out: a padding token in the middle means nothing to a decoder.
        input_ids = test_modeling_common.ids_tensor(shape, self.vocab_size - 3) + 3
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones(shape, dtype=torch.long)}


# Ours answer output_attentions=True by an error where an implementation has no weights, instead of returning none.
WITH_WEIGHTS = ("test_capture_outputs_decorator", "test_model_outputs_equivalence")


def with_eager(name: str) -> Any:
    """Returns a common test that asks for attention weights, run with the implementation that has them."""

    def test(self: Any) -> None:
        with unittest.mock.patch.dict(self.model_tester.fields, attn_implementation="eager"):
            getattr(test_modeling_common.ModelTesterMixin, name)(self)

    return test


def conformance_case(family: str, encoding: str) -> type[unittest.TestCase]:
    """Returns the test class of one subject."""

    tester = ModelTester(family, encoding)

    def set_up(self: Any) -> None:
        self.model_tester = tester
        self.all_model_classes = tester.all_model_classes

    members = {"setUp": set_up, "__module__": __name__}
    if encoding != "stock":
        members |= {name: with_eager(name) for name in WITH_WEIGHTS}
        name = "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions"
        members[name] = unittest.skip("by design: 'sdpa' has no attention weights")(lambda self: None)
    if encoding != "stock" and (default := supported_implementations(tester.get_config())[0]) != "sdpa":
        skip = unittest.skip(f"by design: the default of this encoding is {default!r}, the test asks for 'sdpa'")
        members["test_sdpa_can_dispatch_non_composite_models"] = skip(lambda self: None)
    bases = (
        test_modeling_common.ModelTesterMixin,
        test_modeling_common.GenerationTesterMixin,
        test_training_mixin.TrainingTesterMixin,
        test_tensor_parallel_mixin.TensorParallelTesterMixin,
        test_fsdp_mixin.FSDPTesterMixin,
        unittest.TestCase,
    )
    return type(f"{family}:{encoding}", bases, members)


for _subject in os.environ["CONFORMANCE_SUBJECTS"].split():
    # pytest collects module attributes that are test cases, by any name.
    globals()[_subject] = conformance_case(*_subject.split(":"))
