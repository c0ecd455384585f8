"""Relative positions: the shipped specification and the blockwise path against loops; parameters."""

import types

import pytest
import torch
from transformers import DynamicCache

import oracles
from bias_checks import POSITIONS, check_bias, states_of
from tiny import FAMILIES, in_steps, position_context, tiny_model, tokens
from whatwhere.position_relative import RelativeParameters, RelativePosition

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "last": {"num_positions": 8, "beyond": "last"},
    "none": {"num_positions": 8, "beyond": "none"},
}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"num_positions": 0}, r"\['num_positions'\]=0.* at least 1"),
]

CONFIG = types.SimpleNamespace(hidden_size=8, num_attention_heads=2, head_dim=4, max_position_embeddings=12)


@pytest.mark.parametrize("beyond", ["error", "none", "last"])
@pytest.mark.parametrize("num_positions", [1, 3, None])
@pytest.mark.parametrize(("segments", "key_positions"), POSITIONS.values(), ids=POSITIONS)
def test_equals_loops(beyond, num_positions, segments, key_positions):
    """Positions decide, not slots."""
    keys = torch.tensor([key_positions])
    rows = keys[:, 2:]
    parameters = RelativeParameters(num_positions=num_positions, beyond=beyond).resolve(CONFIG)
    layer, shared = RelativePosition(CONFIG, parameters, 0), RelativePosition.shared(CONFIG, parameters).double()
    context = position_context(rows, keys)
    context.shared["relative"] = shared(torch.zeros(1), context)
    states, table = states_of(2, 2, 7, 9), shared.table.weight

    def oracle(b, h, g, visible):
        return oracles.relative_oracle(*(x[b, h] for x in states), table, rows[0], keys[0], visible, 0.5, beyond)

    check_bias(layer, states, oracle, context, segments=segments, inputs=[table])


def test_table():
    """One table, in a module of its own, N(0, 1/d), as long as the configuration says."""
    config = types.SimpleNamespace(hidden_size=128, num_attention_heads=2, max_position_embeddings=500)
    shared = RelativePosition.shared(config, RelativeParameters().resolve(config))
    assert [(name, tuple(p.shape)) for name, p in shared.named_parameters()] == [("table.weight", (500, 64))]
    torch.nn.init.zeros_(shared.table.weight)
    shared.table.reset()
    assert abs(shared.table.weight.std().item() * 8 - 1) < 0.05


@pytest.mark.parametrize("implementation", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_distances_are_limited(family, implementation):
    model = tiny_model(family, "relative", implementation, position_encoding_parameters={"num_positions": 16})
    ids, first = tokens(1, 20), torch.arange(8)[None]
    packed = torch.cat((torch.arange(3), torch.arange(100, 117)))[None]
    padding = torch.tensor([[0] * 4 + [1] * 16])
    after_padding = (padding.cumsum(-1) - 1).clamp(min=0) + 100 * padding
    with torch.no_grad():
        expected = model(ids[:, :8]).logits
        torch.testing.assert_close(model(ids[:, :8], position_ids=first + 100).logits, expected)
        model(ids[:, :19], position_ids=packed[:, :19])
        model(ids, attention_mask=padding, position_ids=after_padding)
        # Without a mask, positions that skip some begin a document.
        model(ids, position_ids=torch.arange(0, 40, 2)[None])
        ones = torch.ones_like(ids)
        for positions, mask in ((packed, None), (torch.arange(100, 120)[None], None), (2 * packed, ones)):
            with pytest.raises(ValueError, match=r"A sequence of \d+ tokens is longer than .*'relative'"):
                model(ids, position_ids=positions, attention_mask=mask)
        cache, positions = DynamicCache(config=model.config), torch.arange(100, 120)[None]
        in_steps(model, ids[:, :16], (14, 1, 1), cache, positions=positions)
        with pytest.raises(ValueError, match="A sequence of 17 tokens is longer"):
            model(ids[:, 16:17], position_ids=positions[:, 16:17], cache=cache)
        # The newest tokens do not see the oldest.
        mask = torch.ones(20, 20, dtype=torch.bool).tril().triu(-15)[None, None]
        model(ids, attention_mask=mask, position_ids=positions)


def test_distances_in_a_compiled_model():
    model = tiny_model("llama", "relative", position_encoding_parameters={"num_positions": 16})
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = compiled(tokens(1, 8), position_ids=torch.arange(100, 108)[None]).logits
        torch.testing.assert_close(found, model(tokens(1, 8)).logits)
        with pytest.raises(RuntimeError, match="longer than position_encoding='relative'"):
            compiled(tokens(1, 17))


def test_max_length():
    """Longer sequences are refused by default only."""
    assert RelativeParameters().resolve(CONFIG).max_length(CONFIG) == 12
    assert RelativeParameters(num_positions=5).max_length(CONFIG) == 5
    assert RelativeParameters(num_positions=5, beyond="none").max_length(CONFIG) is None
    assert RelativeParameters(num_positions=5, beyond="last").max_length(CONFIG) is None
