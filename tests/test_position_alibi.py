"""ALiBi: slopes, the shipped specification and the blockwise path against loops, tensor parallelism."""

import types

import pytest
import torch

import oracles
from bias_checks import POSITIONS, check_bias, states_of
from tiny import bias_of, position_context
from whatwhere.attention_blockwise import blockwise_attention
from whatwhere.position_alibi import ALiBi, ALiBiParameters, alibi_slopes

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "half": {"head_fraction": 0.5},
}


def config(num_heads):
    return types.SimpleNamespace(hidden_size=4 * num_heads, num_attention_heads=num_heads, head_dim=4)


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        # The paper's example for 8 heads; for other numbers, what its code gives.
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (3, [2**-4, 2**-8, 2**-2]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (12, [2**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
)
def test_slopes(num_heads, slopes):
    assert alibi_slopes(num_heads).tolist() == pytest.approx(slopes)


@pytest.mark.parametrize(("num_heads", "fraction", "expected"), [(44, 15 / 44, 15), (49, 1 / 49, 1), (4, 0.6, 2)])
def test_share_of_heads(num_heads, fraction, expected):
    """Whole heads, also where the product of the two numbers is rounded below one."""
    parameters = ALiBiParameters(fraction)
    assert not list(parameters.invalid(config(num_heads)))
    assert parameters.heads(config(num_heads)) == expected


@pytest.mark.parametrize("num_heads", [2, 3])
@pytest.mark.parametrize(("segments", "key_positions"), POSITIONS.values(), ids=POSITIONS)
def test_equals_loops(num_heads, segments, key_positions):
    """Positions decide, not slots."""
    keys = torch.tensor([key_positions])
    rows = keys[:, 2:]
    states, slopes = states_of(num_heads, num_heads, 7, 9), alibi_slopes(num_heads).tolist()

    def oracle(b, h, g, visible):
        return oracles.alibi_oracle(*(x[b, h] for x in states), slopes[h], rows[0], keys[0], visible, 0.5)

    layer = ALiBi(config(num_heads), ALiBiParameters(), 0)
    # Slopes are float32 numbers.
    check_bias(layer, states, oracle, position_context(rows, keys), segments=segments, tolerance=1e-6)


@pytest.mark.parametrize("Q", [1, 6])
def test_tensor_parallel_ranks_get_their_heads(Q):
    """A rank with heads 2 and 3 of 6 computes what the whole model computes for them."""
    K = 8
    layer = ALiBi(config(6), ALiBiParameters(), 0)
    positions = torch.arange(K)[None]
    whole = position_context(positions[:, K - Q :], positions)
    rank = position_context(positions[:, K - Q :], positions, head_offset=2)
    query, key, value = torch.randn(1, 6, Q, 4), torch.randn(1, 6, K, 4), torch.randn(1, 6, K, 4)
    logits = query @ key.transpose(2, 3)
    part = slice(2, 4)
    torch.testing.assert_close(
        layer.bias(logits[:, part], query[:, part], rank, 0.5), layer.bias(logits, query, whole, 0.5)[:, part]
    )
    torch.testing.assert_close(
        blockwise_attention(
            query[:, part], key[:, part], value[:, part], scaling=0.5, biases=[bias_of(layer, rank, 0.5)]
        ),
        blockwise_attention(query, key, value, scaling=0.5, biases=[bias_of(layer, whole, 0.5)])[:, part],
    )


def test_has_no_state():
    """Slopes are computed: non-persistent buffers would be garbage after from_pretrained."""
    layer = ALiBi(config(4), ALiBiParameters(), 0)
    assert not list(layer.parameters())
    assert not list(layer.buffers())
    assert ALiBi.shared(config(4), ALiBiParameters()) is None
