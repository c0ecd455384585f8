"""Tiny models of both families, for every encoding."""

import importlib
import importlib.util

import pytest
import torch
import transformers
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import whatwhere
from whatwhere.attention_blockwise import BiasInputs
from whatwhere.kernel_operator import Operator
from whatwhere.position_base import PositionContext
from whatwhere.position_registry import POSITION_ENCODINGS

FAMILIES = ("llama", "gpt2")
VOCABULARY = 61
# Parts of the names of parameters that a stock model does not have.
OURS = ("encodings.", "attn.options.")

# Before, the paged cache of continuous batching has other methods, and only Transformers' own attention works with it.
OLDER = Version(transformers.__version__) < Version("5.23.0")
only_newer = pytest.mark.skipif(OLDER, reason="this Transformers is older than 5.23")


def tiny_config(family, encoding, **fields):
    """A two-layer configuration with grouped heads; `fields` use the names that both families share."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 48,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "position_encoding": encoding,
    }
    if family == "llama":
        config_class, extra = whatwhere.WhatWhereLlamaConfig, {"intermediate_size": 48}
    else:
        config_class = whatwhere.WhatWhereGPT2Config
        extra = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return config_class(**{**values, **extra, **fields})


def causal_lm_class(family):
    return whatwhere.WhatWhereLlamaForCausalLM if family == "llama" else whatwhere.WhatWhereGPT2ForCausalLM


def tiny_model(family, encoding, implementation=None, **fields):
    """A model in eval mode with random position parameters, because the initial tables of zeros would hide errors."""
    config = tiny_config(family, encoding, **fields)
    model = causal_lm_class(family)._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in OURS):
                shift = -1.5 if "delta" in name else 0.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7 + shift)
    return model.eval()


def tokens(batch, length, seed=0):
    """Random token ids (B, T) without the special ones."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_steps(model, ids, steps, cache, mask=None, positions=None):
    """The logits of tokens that are given in steps of these lengths, with a cache."""
    pieces, start = [], 0
    for step in steps:
        end = start + step
        own = {
            "attention_mask": None if mask is None else mask[:, :end],
            "position_ids": None if positions is None else positions[:, start:end],
        }
        pieces.append(model(ids[:, start:end], cache=cache, **own).logits)
        start = end
    return torch.cat(pieces, dim=1)


def log_likelihood(model, tokenizer, context, choice):
    """The log-likelihood of the tokens of `choice` after `context`, by one forward pass without padding."""
    ids = tokenizer(context + choice, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        logs = model(ids).logits[0].double().log_softmax(-1)
    return logs[start - 1 : -1].gather(1, ids[0, start:, None]).sum().item()


def key_ranges_of(segments, query_length):
    """The mask `key_ranges`, int32 (B, 1, Q + K, 2), of documents in one piece, (B, K) or one list of K; -1 is padding.

    Row i has slot K - Q + i; it sees older slots and its own, of its own document. None for no mask.
    """
    if segments is None:
        return None
    segments = torch.as_tensor(segments)
    segments = segments[None] if segments.ndim == 1 else segments
    B, K = segments.shape
    key_ranges = torch.zeros(B, 1, query_length + K, 2, dtype=torch.int32)
    for b, documents in enumerate(segments.tolist()):
        shown = [document for document in documents if document >= 0]
        assert sorted(shown, key=shown.index) == shown, "a document is in several pieces"
        for row, slot in enumerate(range(K - query_length, K)):
            if documents[slot] >= 0:
                key_ranges[b, 0, row] = torch.tensor([documents.index(documents[slot]), slot + 1])
        key_ranges[b, 0, query_length:, 0] = segments[b] >= 0
    return key_ranges


def mask_of(kind, B, Q, K):
    """The mask `key_ranges` of a kind: None if it is "causal"."""
    slots = torch.arange(K)
    if kind == "causal":
        return None
    if kind == "any":
        key_ranges = torch.randint(0, K + 1, (B, 1, Q + K, 2), dtype=torch.int32)
        key_ranges[:, :, Q:, 0] %= 5
        return key_ranges
    # Padding is left in even entries, and right in odd ones, where the last rows see nothing.
    documents = {
        "padding": [torch.where(slots < K - K // 4 if b % 2 else slots >= K // 3, 0, -1) for b in range(B)],
        "packed": [slots * (4 + b) // K for b in range(B)],
        "holes": [torch.where(torch.rand(K) > 0.3, 0, -1) for b in range(B)],
    }
    return key_ranges_of(torch.stack(documents[kind]), Q)


def position_context(query_positions, key_positions=None, **fields):
    """A context of positions, int64 (1 or B, Q) and (1 or B, K); without key positions, of as many keys as queries."""
    key_positions = query_positions if key_positions is None else key_positions
    context = PositionContext(query_positions, key_length=key_positions.shape[1], **fields)
    context._computed["key_positions"] = key_positions
    return context


def bias_of(encoding, context, scaling):
    """The bias of a layer's encoding, as blockwise attention takes it."""
    return BiasInputs(encoding.block_bias, *encoding.bias_inputs(context, scaling))


def check_operator(operator, differentiable, others, *settings):
    """PyTorch's checks of an operator, given the tensors that get gradients, and the others; some may be None."""
    arguments = (*Operator.arguments(differentiable, others), *settings)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(operator, arguments, test_utils=tests)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                # A view takes the room of what it is made of.
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def declared(attribute):
    """What the test files of the encodings declare under a name, by the encoding."""
    modules = {name: f"test_position_{name}" for name in POSITION_ENCODINGS}
    return {
        name: getattr(importlib.import_module(module), attribute, {})
        for name, module in modules.items()
        if importlib.util.find_spec(module)
    }


def slow_but(quick, cases):
    """Cases for `pytest.mark.parametrize`: all but the quick ones are marked slow."""
    quick, cases = list(quick), list(cases)
    assert all(case in cases for case in quick), "a quick case is none of the cases"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if case in quick else [pytest.mark.slow])
        for case in cases
    ]
