"""CoPE: the shipped specification and the blockwise path against the paper's equations; parameters."""

import math
import types

import pytest
import torch

import oracles
from whatwhere.attention_blockwise import MASKED, blockwise_attention
from whatwhere.position_cope import CoPE, CoPEParameters, SharedCoPE

CONFIG = types.SimpleNamespace(hidden_size=8, num_attention_heads=2, head_dim=4)


def encoding(**parameters):
    """CoPE in double precision with a random table, and its context."""
    parameters = CoPEParameters(**parameters)
    shared, layer = SharedCoPE(CONFIG, parameters).double(), CoPE(CONFIG, parameters, 0).double()
    table = (shared if parameters.share_across_layers else layer).table
    torch.nn.init.normal_(table.weight)
    return layer, table.weight, {"cope": shared(torch.zeros(1), {})}


def inputs(Q, K, spread=1.0):
    shapes = [(2, 2, Q, 4), (2, 2, K, 4), (2, 2, K, 3)]
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [(query * spread).requires_grad_(), key.requires_grad_(), value.requires_grad_()]


def eager(layer, query, key, value, visible, context, scaling):
    logits = (query @ key.transpose(2, 3) * scaling).masked_fill(~visible, MASKED)
    weights = torch.softmax(logits + layer.bias(logits, query, context, scaling), -1)
    return weights * visible.any(-1, keepdim=True) @ value


def blockwise(layer, query, key, value, mask, context, scaling):
    terms = [layer.block_term(context, scaling)]
    return blockwise_attention(query, key, value, mask=mask, scaling=scaling, terms=terms, block_size=4, direct=False)


@pytest.mark.parametrize("scale_positions", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0], ids=["half-open", "mixed", "open-or-closed"])
@pytest.mark.parametrize("num_positions", [2, 3, 9])
@pytest.mark.parametrize("segments", [None, [-1, -1, 0, 0, 0, 1, 1, 1, -1]], ids=["causal", "packed-padded"])
def test_equals_the_paper(scale_positions, spread, num_positions, segments):
    """Outputs and every gradient of the eager and of the blockwise path equal Eq. 3 to 9 written as loops."""
    Q, K, scaling = 7, 9, 0.5
    layer, table, context = encoding(num_positions=num_positions, scale_positions=scale_positions)
    states = inputs(Q, K, spread)
    visible = oracles.visible_oracle(Q, K, segments)
    mask = None if segments is None else torch.tensor([segments, segments], dtype=torch.int32)
    expected = torch.stack(
        [
            torch.stack(
                [
                    oracles.cope_oracle(*(x[b, h] for x in states), table, visible, scaling, scale_positions)
                    for h in range(2)
                ]
            )
            for b in range(2)
        ]
    )
    grad = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, [*states, table], grad)
    for out in (
        eager(layer, *states, visible, context, scaling),
        blockwise(layer, *states, mask, context, scaling),
    ):
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
        for one, other in zip(torch.autograd.grad(out, [*states, table], grad), truth):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_open_gates_are_relative_positions():
    """If all gates are 1, p_ij = i - j + 1 (below Eq. 4), whatever the content."""
    layer, table, context = encoding(num_positions=4)
    query, _, _ = inputs(6, 6)
    logits = torch.full((2, 2, 6, 6), 1e4, dtype=torch.float64)
    logits = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e4)
    bias = layer.bias(logits, query, context, 0.5)
    for i in range(6):
        for j in range(i + 1):
            expected = query[:, :, i] @ table[:, min(i - j + 1, 3)] * 0.5
            torch.testing.assert_close(bias[:, :, i, j], expected)


def test_closed_gates_use_position_zero():
    layer, table, context = encoding(num_positions=4)
    query, _, _ = inputs(6, 6)
    bias = layer.bias(torch.full((2, 2, 6, 6), -1e4, dtype=torch.float64), query, context, 1.0)
    torch.testing.assert_close(bias, (query @ table[:, :1]).expand(2, 2, 6, 6))


def test_no_gradient_reaches_clamped_positions():
    layer, _, context = encoding(num_positions=3)
    query, _, _ = inputs(8, 8)
    logits = torch.full((2, 2, 8, 8), 1.0, dtype=torch.float64, requires_grad=True)
    # Gates of 0.73: p is 2 or more from the third key on, counted from the right.
    layer.bias(logits, query, context, 1.0)[..., :5].sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_equals_the_paper_listing():
    """Listing 1 (unscaled, one long sequence, float32), at gates near 0.5, in the blockwise path."""
    T, D, P = 300, 16, 20
    query, key, value = (torch.randn(1, 1, T, D) for _ in range(3))
    parameters = CoPEParameters(num_positions=P, scale_positions=False)
    config = types.SimpleNamespace(head_dim=D, hidden_size=D, num_attention_heads=1)
    layer = CoPE(config, parameters, 0)
    torch.nn.init.normal_(layer.table.weight)
    logits = query @ key.transpose(2, 3) / math.sqrt(D)
    logits = logits + torch.ones(T, T).tril().log()
    gates = torch.sigmoid(logits)
    positions = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=P - 1)
    ceil, floor = positions.ceil().long(), positions.floor().long()
    table = query @ layer.table.weight
    fraction = positions - floor
    logits = logits + table.gather(-1, ceil) * fraction + table.gather(-1, floor) * (1 - fraction)
    expected = torch.softmax(logits, -1) @ value
    out = blockwise(layer, query, key, value, None, {}, D**-0.5)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_tables():
    """Zero at the start; in the layer, or shared; a parameter of a module of its own."""
    layer, shared = CoPE(CONFIG, CoPEParameters(), 0), SharedCoPE(CONFIG, CoPEParameters())
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [("table.weight", (4, 64))]
    assert not list(shared.parameters())
    assert not layer.table.weight.any()
    parameters = CoPEParameters(num_positions=5, share_across_layers=True)
    layer, shared = CoPE(CONFIG, parameters, 0), SharedCoPE(CONFIG, parameters)
    assert [(name, tuple(p.shape)) for name, p in shared.named_parameters()] == [("table.weight", (4, 5))]
    assert not list(layer.parameters())
    context = {"cope": shared(torch.zeros(1), {})}
    assert layer.block_term(context, 1.0).tensors[0] is shared.table.weight
    torch.nn.init.ones_(shared.table.weight)
    shared.reset()
    assert not shared.table.weight.any()


@pytest.mark.parametrize("num_positions", [-1, 0, 1])
def test_refuses_short_tables(num_positions):
    with pytest.raises(ValueError, match=rf"num_positions'\]={num_positions}.* at least 2"):
        CoPEParameters(num_positions=num_positions).validate(CONFIG)
    CoPEParameters(num_positions=2).validate(CONFIG)


def test_claims():
    assert CoPE.default_implementation == "blockwise"
    assert CoPE.stock_implementations == ()
    assert CoPE.biases_from_content
    assert not CoPE.needs_key_positions
