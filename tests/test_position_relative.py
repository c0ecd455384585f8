"""Relative positions: the shipped specification and the blockwise path against loops; parameters."""

import types

import pytest
import torch

import oracles
from tiny import bias_of, position_context, ranges_of, tiny_config
from whatwhere.attention_blockwise import MASKED, blockwise_attention
from whatwhere.position_registry import supported_implementations
from whatwhere.position_relative import RelativeParameters, RelativePosition

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "last": {"num_positions": 8, "beyond": "last"},
    "none": {"num_positions": 8, "beyond": "none"},
}

CONFIG = types.SimpleNamespace(hidden_size=8, num_attention_heads=2, head_dim=4, max_position_embeddings=12)


@pytest.mark.parametrize("beyond", ["error", "none", "last"])
@pytest.mark.parametrize("num_positions", [1, 3, None])
@pytest.mark.parametrize(
    ("segments", "key_positions"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (None, [0, 1, 2, 4, 5, 6, 9, 10, 11]),
        ([-1, -1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 2, 3, 4, 5, 6]),
        ([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3, 4]),
    ],
    ids=["plain", "gaps", "left-padded", "packed"],
)
def test_equals_loops(beyond, num_positions, segments, key_positions):
    """Outputs and every gradient, of the eager and of the blockwise path; positions decide, not slots."""
    Q, K, scaling = 7, 9, 0.5
    parameters = RelativeParameters(num_positions=num_positions, beyond=beyond).resolve(CONFIG)
    layer, shared = RelativePosition(CONFIG, parameters, 0), RelativePosition.shared(CONFIG, parameters).double()
    key_positions = torch.tensor([key_positions])
    context = position_context(key_positions[:, K - Q :], key_positions)
    context.shared["relative"] = shared(torch.zeros(1), context)
    table = shared.table.weight
    shapes = [(2, 2, Q, 4), (2, 2, K, 4), (2, 2, K, 3)]
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    visible = oracles.visible_oracle(Q, K, segments)
    expected = torch.stack(
        [
            torch.stack(
                [
                    oracles.relative_oracle(
                        *(x[b, h] for x in states),
                        table,
                        context.query_positions[0],
                        key_positions[0],
                        visible,
                        scaling,
                        beyond,
                    )
                    for h in range(2)
                ]
            )
            for b in range(2)
        ]
    )
    grad = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, [*states, table], grad)
    query, key, value = states
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, MASKED)
    weights = torch.softmax(logits + layer.bias(logits, query, context, scaling), -1)
    mask = ranges_of(segments and [segments, segments], Q)
    biases = [bias_of(layer, context, scaling)]
    outs = (
        weights * visible.any(-1, keepdim=True) @ value,
        blockwise_attention(*states, mask=mask, scaling=scaling, biases=biases, block_size=4, direct=False),
    )
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        for one, other in zip(torch.autograd.grad(out, [*states, table], grad), truth):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_table():
    """One table, in a module of its own, N(0, 1/d), as long as the configuration says."""
    config = types.SimpleNamespace(hidden_size=128, num_attention_heads=2, max_position_embeddings=500)
    shared = RelativePosition.shared(config, RelativeParameters().resolve(config))
    assert [(name, tuple(p.shape)) for name, p in shared.named_parameters()] == [("table.weight", (500, 64))]
    torch.nn.init.zeros_(shared.table.weight)
    shared.table.reset()
    assert abs(shared.table.weight.std().item() * 8 - 1) < 0.05


def test_max_length():
    """Longer sequences are refused by default only."""
    assert RelativeParameters().resolve(CONFIG).max_length(CONFIG) == 12
    assert RelativeParameters(num_positions=5).max_length(CONFIG) == 5
    assert RelativeParameters(num_positions=5, beyond="none").max_length(CONFIG) is None
    assert RelativeParameters(num_positions=5, beyond="last").max_length(CONFIG) is None


def test_refuses_empty_tables():
    with pytest.raises(ValueError, match=r"num_positions'\]=0.* at least 1"):
        tiny_config("llama", "relative", position_encoding_parameters={"num_positions": 0})


def test_claims():
    assert supported_implementations(tiny_config("llama", "relative")) == [
        *("auto", "triton", "sdpa", "flex_attention", "blockwise", "eager")
    ]
