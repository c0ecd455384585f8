"""CoPE: the shipped specification and the blockwise path against the paper's equations; parameters."""

import dataclasses
import math
import types

import pytest
import torch

import oracles
from bias_checks import SEGMENTS, check_bias, states_of
from tiny import bias_of, position_context, tiny_config, tiny_model, tokens
from whatwhere.attention_blockwise import blockwise_attention
from whatwhere.forward_arguments import CACHE
from whatwhere.learned_table import SharedTable
from whatwhere.position_alibi import ALiBi, ALiBiParameters, alibi_slopes
from whatwhere.position_cope import CoPE, CoPEParameters
from whatwhere.position_modules import PositionEncodings

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "shared": {"num_positions": 6, "share_across_layers": True},
    "separate": {"num_positions": 6, "gates": "separate_key"},
    "value": {"num_positions": 6, "gates": "value"},
    "every2": {"num_positions": 6, "every_n_layers": 2, "share_across_layers": True},
}
# What the contract tests take for the defaults: positions end within their short sequences.
SMALL = {"num_positions": 6}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"num_positions": "64"}, r"\['num_positions'\]='64' is not valid: it must be of type int"),
    ({"num_positions": True}, r"\['num_positions'\]=True is not valid"),
    ({"num_positions": 1}, r"\['num_positions'\]=1.* at least 2"),
    ({"every_n_layers": 0}, r"\['every_n_layers'\]=0.* at least 1"),
    ({"gates": "query"}, r"\['gates'\]='query'.*'key', 'separate_key', 'value'"),
]

CONFIG = types.SimpleNamespace(
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    layer_pattern=["cope"],
    layer_encodings=lambda layer: ["cope"],
)


def encoding(**parameters):
    """CoPE in double precision with a random table, and its context."""
    parameters = CoPEParameters(**parameters)
    layer = CoPE(CONFIG, parameters, 0).double()
    torch.nn.init.normal_(layer.table.weight)
    return layer, layer.table.weight, context_of()


def context_of(**fields):
    """A context; CoPE does not read positions."""
    return position_context(torch.zeros(1, 1, dtype=torch.long), **fields)


@pytest.mark.parametrize("scale_positions", [True, False], ids=["scaled", "unscaled"])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0], ids=["half-open", "mixed", "open-or-closed"])
@pytest.mark.parametrize("num_positions", [2, 3, 9])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "packed-padded"])
def test_equals_the_paper(scale_positions, spread, num_positions, segments):
    """Eq. 3 to 9 written as loops."""
    layer, table, context = encoding(num_positions=num_positions, scale_positions=scale_positions)
    states = states_of(2, 2, 7, 9, spread)

    def oracle(b, h, g, visible):
        return oracles.cope_oracle(*(x[b, h] for x in states), table, visible, 0.5, scale_positions)

    check_bias(layer, states, oracle, context, segments=segments, inputs=[table])


@pytest.mark.parametrize("gates", ["separate_key", "value"])
@pytest.mark.parametrize("spread", [0.3, 6.0], ids=["half-open", "open-or-closed"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "packed-padded"])
def test_other_gates_equal_the_paper(gates, spread, segments):
    """Gates from keys of their own and from values (end of Section 4), two query heads to a key head."""
    layer, table, _ = encoding(num_positions=3, gates=gates)
    query, key, value = states = states_of(2, 1, 7, 9, spread, V=4)
    own = torch.randn_like(key).requires_grad_()
    context = context_of(states={"cope": own}, value=value)
    gate_key, inputs = (own, [table, own]) if gates == "separate_key" else (value, [table])

    def oracle(b, h, g, visible):
        return oracles.cope_oracle(query[b, h], key[b, g], value[b, g], table, visible, 0.5, gate_key=gate_key[b, g])

    check_bias(layer, states, oracle, context, segments=segments, inputs=inputs)


def test_masked_keys_do_not_open_other_gates():
    """Also where half precision's smallest number masks, and where a user's mask has -10000."""
    layer, _, context = encoding(num_positions=9, gates="value")
    query, _, _ = states_of(2, 2, 6, 6)
    value = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    content = torch.zeros(2, 2, 6, 6, dtype=torch.float64)
    content[..., 2:4] = -1e4
    found = layer.bias(content, query, dataclasses.replace(context, value=value), 0.5)
    kept = [0, 1, 4, 5]
    seen = layer.bias(content[..., kept], query, dataclasses.replace(context, value=value[:, :, kept]), 0.5)
    torch.testing.assert_close(found[..., kept], seen)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_separate_gate_keys(family):
    """One projection without bias in each layer, cached beside the keys; as the other matrices at the start."""
    config = tiny_config(family, "cope", position_encoding_parameters={"gates": "separate_key"})
    layer = CoPE(config, CoPEParameters(gates="separate_key"), 1)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [
        ("table.weight", (8, 64)),
        ("gate_key.weight", (16, 32)),
    ]
    hidden, key = torch.randn(2, 5, 32), torch.randn(2, 2, 5, 8)
    state = layer.cached_state(hidden, key, context_of())
    for group in range(2):
        torch.testing.assert_close(state[:, group], hidden @ layer.gate_key.weight[group * 8 : group * 8 + 8].T)
    assert layer.cached_state(hidden, key.bfloat16(), context_of()).dtype == torch.bfloat16
    model = tiny_model(family, "cope", position_encoding_parameters={"gates": "separate_key"})
    fresh = type(model)._from_config(model.config)
    weights = [p for name, p in fresh.named_parameters() if "gate_key" in name]
    assert len(weights) == 2
    assert all(weight.std().isclose(torch.tensor(0.2), rtol=0.2) for weight in weights)
    cache = model(tokens(1, 7), use_cache=True)[CACHE]
    assert [layer.keys.shape[-1] for layer in cache.layers] == [16, 16]


def test_separate_gate_keys_are_rotated_as_the_keys():
    """With RoPE and the keys' own projection they are the keys."""
    parameters = {"cope": {"gates": "separate_key", "num_positions": 6}}
    model = tiny_model("llama", "cope+rope", position_encoding_parameters=parameters)
    ids = tokens(1, 14)
    with torch.no_grad():
        logits = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.encodings["cope"].gate_key.weight.copy_(layer.self_attn.k_proj.weight)
        other = tiny_model("llama", "cope+rope", position_encoding_parameters={"cope": {"num_positions": 6}})
        other.load_state_dict(model.state_dict(), strict=False)
        torch.testing.assert_close(model(ids).logits, other(ids).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(other(ids).logits, logits, atol=1e-3)


@pytest.mark.parametrize("gates", ["key", "separate_key", "unrotated_key"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "packed-padded"])
def test_sum_with_rope(gates, segments):
    """ "cope+rope": content and most gates see rotated queries and keys, the table the query before rotation."""
    Q, K = 7, 9
    config = types.SimpleNamespace(**{**vars(CONFIG), "layer_encodings": lambda layer: ["cope", "rope"]})
    layer = CoPE(config, CoPEParameters(num_positions=3, gates=gates), 0).double()
    torch.nn.init.normal_(layer.table.weight)
    table = layer.table.weight
    query, key, value = states_of(2, 1, Q, K, V=4)
    own = torch.randn_like(key).requires_grad_()

    def turned(states, first):
        rows = [oracles.rope_rotation(row.movedim(-1, 0), first + t, 10.0, 4) for t, row in enumerate(states.unbind(2))]
        return torch.stack(rows, 1).movedim(0, -1).movedim(0, 2)

    turned_query, turned_key, turned_own = turned(query, K - Q), turned(key, 0), turned(own, 0)
    gate_key = {"key": turned_key, "separate_key": turned_own, "unrotated_key": key}[gates]

    def oracle(b, h, g, visible):
        return oracles.cope_oracle(
            *(turned_query[b, h], turned_key[b, g], value[b, g], table, visible, 0.5),
            gate_key=gate_key[b, g],
            position_query=query[b, h],
            gate_query=query[b, h] if gates == "unrotated_key" else None,
        )

    states = {"key": {}, "separate_key": {"cope": turned_own}, "unrotated_key": {"cope": key}}[gates]
    inputs = [query, key, table, *([own] if gates == "separate_key" else [])]
    context = context_of(states=states, query=query)
    check_bias(layer, [turned_query, turned_key, value], oracle, context, segments=segments, inputs=inputs)


def test_only_rope_needs_a_second_query():
    context = context_of(query=torch.zeros(1, 4, 5, 8))
    for encoding in ("cope", "cope+relative", "cope+alibi", "cope+rope", ["cope", "rope"], ["cope+rope", "cope"]):
        for layer in range(2):
            parts = PositionEncodings(tiny_config("llama", encoding), layer)
            if "cope" in parts:
                tensors, _ = parts["cope"].bias_inputs(context, 0.5)
                assert (tensors[-1] is context.query) == ("rope" in parts)
                assert len(tensors) == 1 + ("rope" in parts)


@pytest.mark.parametrize("share", [False, True], ids=["own", "shared"])
def test_every_n_layers(share):
    """Layers 0, 3, ... have CoPE; the others are as without any positions."""
    parameters = {"every_n_layers": 3, "num_positions": 5, "share_across_layers": share, "gates": "separate_key"}
    model = tiny_model("llama", "cope", num_hidden_layers=5, position_encoding_parameters=parameters)
    parts = [layer.self_attn.encodings for layer in model.model.layers]
    assert [list(part) for part in parts] == [["cope"], [], [], ["cope"], []]
    names = [name for name, _ in model.named_parameters() if "encodings" in name]
    assert len(names) == (3 if share else 4)
    hidden = torch.randn(1, 6, 32)
    positions = torch.arange(6)[None]
    model.model.layers = model.model.layers[1:2]
    none = tiny_model("llama", "none")
    none.model.layers = none.model.layers[1:2]
    none.load_state_dict({name: p for name, p in model.state_dict().items() if "encoding" not in name})
    with torch.no_grad():
        found = model(inputs_embeds=hidden, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(found, none(inputs_embeds=hidden, use_cache=False).logits, rtol=1e-5, atol=1e-5)


def test_sum_with_alibi():
    """ "cope+alibi": the gates see the content only, ALiBi's penalty is added after them."""
    layer, table, _ = encoding(num_positions=4)
    states, slopes = states_of(2, 2, 7, 7, 3.0), alibi_slopes(2).tolist()

    def oracle(b, h, g, visible):
        def penalty(i, j):
            return -slopes[h] * (i - j)

        return oracles.cope_oracle(*(x[b, h] for x in states), table, visible, 0.5, plus=penalty)

    both = PositionEncodings(tiny_config("llama", "cope+alibi"), 0)
    assert [part.name for part in both.hooks["bias"]] == ["cope", "alibi"]
    parts = both.hooks["bias"] = [layer, ALiBi(CONFIG, ALiBiParameters(), 0)]
    context = position_context(torch.arange(7)[None])
    # Slopes are float32 numbers.
    check_bias(both, states, oracle, context, inputs=[table], parts=parts, tolerance=1e-6)


def test_open_gates_are_relative_positions():
    """If all gates are 1, p_ij = i - j + 1 (below Eq. 4), whatever the content."""
    layer, table, context = encoding(num_positions=4)
    query, _, _ = states_of(2, 2, 6, 6)
    logits = torch.full((2, 2, 6, 6), 1e4, dtype=torch.float64)
    logits = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e4)
    bias = layer.bias(logits, query, context, 0.5)
    for i in range(6):
        for j in range(i + 1):
            expected = query[:, :, i] @ table[:, min(i - j + 1, 3)]
            torch.testing.assert_close(bias[:, :, i, j], expected)


def test_closed_gates_use_position_zero():
    layer, table, context = encoding(num_positions=4)
    query, _, _ = states_of(2, 2, 6, 6)
    bias = layer.bias(torch.full((2, 2, 6, 6), -1e4, dtype=torch.float64), query, context, 1.0)
    torch.testing.assert_close(bias, (query @ table[:, :1]).expand(2, 2, 6, 6))


def test_no_gradient_reaches_clamped_positions():
    layer, _, context = encoding(num_positions=3)
    query, _, _ = states_of(2, 2, 8, 8)
    logits = torch.full((2, 2, 8, 8), 1.0, dtype=torch.float64, requires_grad=True)
    # Gates of 0.73: p is 2 or more from the third key on, counted from the right.
    layer.bias(logits, query, context, 1.0)[..., :5].sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_equals_the_paper_listing():
    """Listing 1 (unscaled, one long sequence, float32), at gates near 0.5, in the blockwise path."""
    T, D, P = 300, 16, 20
    query, key, value = (torch.randn(1, 1, T, D) for _ in range(3))
    parameters = CoPEParameters(num_positions=P, scale_positions=False)
    layer = CoPE(types.SimpleNamespace(**{**vars(CONFIG), "head_dim": D}), parameters, 0)
    torch.nn.init.normal_(layer.table.weight)
    logits = query @ key.transpose(2, 3) / math.sqrt(D)
    logits = logits + torch.ones(T, T).tril().log()
    positions = oracles.contextual_positions_of_all(torch.sigmoid(logits), P - 1)
    ceil, floor = positions.ceil().long(), positions.floor().long()
    table = query @ layer.table.weight
    fraction = positions - floor
    logits = logits + table.gather(-1, ceil) * fraction + table.gather(-1, floor) * (1 - fraction)
    expected = torch.softmax(logits, -1) @ value
    biases = [bias_of(layer, context_of(), D**-0.5)]
    out = blockwise_attention(query, key, value, scaling=D**-0.5, biases=biases, block_size=4, direct=False)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)


def test_tables():
    """Zero at the start; in the layer, or shared; a parameter of a module of its own."""
    layer = CoPE(CONFIG, CoPEParameters(), 0)
    assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [("table.weight", (4, 64))]
    assert CoPE.shared(CONFIG, CoPEParameters()) is None
    assert not layer.table.weight.any()
    parameters = CoPEParameters(num_positions=5, share_across_layers=True)
    layer, shared = CoPE(CONFIG, parameters, 0), CoPE.shared(CONFIG, parameters)
    assert isinstance(shared, SharedTable)
    assert [(name, tuple(p.shape)) for name, p in shared.named_parameters()] == [("table.weight", (4, 5))]
    assert not list(layer.parameters())
    context = context_of(shared={"cope": shared(torch.zeros(1), context_of())})
    assert bias_of(layer, context, 1.0).tensors[0] is shared.table.weight
    torch.nn.init.ones_(shared.table.weight)
    shared.table.reset()
    assert not shared.table.weight.any()
