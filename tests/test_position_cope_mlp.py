"""CoPE_MLP: the shipped specification and the blockwise path against the network written as loops; parameters."""

import types

import pytest
import torch

import oracles
from bias_checks import SEGMENTS, check_bias, states_of
from tiny import bias_of, position_context, tiny_config, tiny_model
from whatwhere.attention_blockwise import blockwise_attention
from whatwhere.position_cope import CoPE, CoPEParameters
from whatwhere.position_cope_mlp import CoPEMLP, CoPEMLPParameters
from whatwhere.position_modules import PositionEncodings

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "first": {"hidden_units": 16, "num_positions": 6, "layers": "first"},
}
# What the contract tests take for the defaults: positions end within their short sequences.
SMALL = {"hidden_units": 16, "num_positions": 6}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"hidden_units": 0}, r"\['hidden_units'\]=0.*at least 1"),
    ({"num_positions": 1}, r"\['num_positions'\]=1.*at least 2"),
    ({"layers": "last"}, r"\['layers'\]='last'.*'all', 'first'"),
]

CONFIG = types.SimpleNamespace(
    hidden_size=16, num_attention_heads=4, head_dim=4, layer_encodings=lambda layer: ["cope_mlp"]
)
# It does not read positions.
CONTEXT = position_context(torch.zeros(1, 1, dtype=torch.long))


def encoding(**parameters):
    """CoPE_MLP in double precision."""
    return CoPEMLP(CONFIG, CoPEMLPParameters(**parameters), 0).double()


def set_units(layer, weight, bias):
    with torch.no_grad():
        layer.network.weight.copy_(torch.tensor(weight))
        layer.network.bias.copy_(torch.tensor(bias))
        layer.network.output.normal_()


# Hidden units (weight, bias); the knots, in x = p / last, are -bias / weight.
UNITS = {
    "start": None,
    "both-directions": ([1.3, -0.7, 2.0, -1.1, 0.4], [-0.5, 0.3, -0.2, 0.9, -0.1]),
    "outside": ([1.0, -1.0, 1.0, -1.0, 1.0], [0.5, -0.5, -1.5, 1.5, -0.33]),
    "constant": ([0.0, 0.0, 1.0, 0.0, -1.0], [0.7, -0.7, -0.35, 0.0, 0.35]),
    "together": ([1.0, 1.0, -1.0, 2.0, -2.0], [-0.35, -0.35, 0.35, -0.7, 0.71]),
}


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("num_positions", "spread"), [(2, 1.0), (4, 0.3), (4, 9.0), (30, 1.0)])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "packed-padded"])
def test_equals_the_network(units, num_positions, spread, segments):
    """Knots anywhere, units without one."""
    layer = encoding(hidden_units=5, num_positions=num_positions)
    if UNITS[units] is None:
        layer.network.output.data.normal_()
    else:
        set_units(layer, *UNITS[units])
    query, key, value = states = states_of(4, 2, 7, 9, spread)
    network = layer.network()

    def oracle(b, h, g, visible):
        last = num_positions - 1
        return oracles.cope_mlp_oracle(query[b, h], key[b, g], value[b, g], *network, visible, 0.5, last)

    check_bias(layer, states, oracle, CONTEXT, segments=segments, inputs=list(network), tolerance=1e-8)


def test_many_blocks():
    """Windows that are guessed and that grow, in float32, against the full matrix."""
    layer = encoding(hidden_units=64, num_positions=12).float()
    torch.nn.init.normal_(layer.network.output)
    query, key, value = (torch.randn(2, heads, 200, 4) for heads in (4, 2, 2))
    inputs = [query, key, value, *layer.network()]
    for tensor in inputs[:3]:
        tensor.requires_grad_()
    found = []
    for direct in (True, False):
        options = {"scaling": 0.5, "biases": [bias_of(layer, CONTEXT, 0.5)], "block_size": 16, "direct": direct}
        out = blockwise_attention(query, key, value, **options)
        found.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_can_be_a_table():
    """At the start, output weights alone give any table: N units between N + 1 entries, the first of which is 0."""
    layer = encoding(hidden_units=8, num_positions=9)
    table = CoPE(CONFIG, CoPEParameters(num_positions=9, scale_positions=True), 0).double()
    torch.nn.init.normal_(table.table.weight)
    with torch.no_grad():
        # What bends at p = n is the difference of the steps before and after.
        steps = table.table.weight.diff(dim=1) * 8
        layer.network.output.copy_(torch.cat((steps[:, :1], steps.diff(dim=1)), dim=1))
        query, content = torch.randn(1, 4, 9, 4, dtype=torch.float64), torch.randn(1, 4, 9, 30, dtype=torch.float64)
        difference = layer.bias(content, query, CONTEXT, 0.5) - table.bias(content, query, CONTEXT, 0.5)
    torch.testing.assert_close(difference, difference[..., :1].expand_as(difference))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_start(family):
    """The output is 0, as CoPE's table; all knots are in [0, 1); also after loading."""
    model = tiny_model(family, "cope_mlp", position_encoding_parameters={"hidden_units": 8})
    fresh = type(model)._from_config(model.config)
    state = {name: p for name, p in fresh.state_dict().items() if "encodings" not in name}
    for one in (fresh, type(model).from_pretrained(None, config=model.config, state_dict=state)):
        mlps = [module for name, module in one.named_modules() if name.endswith("cope_mlp.network")]
        assert len(mlps) == 2
        for mlp in mlps:
            assert not mlp.output.any()
            torch.testing.assert_close(-mlp.bias / mlp.weight, torch.arange(8) / 8)


def test_layers():
    for layers, expected in (("all", ["cope_mlp"]), ("first", [])):
        config = tiny_config("llama", "cope_mlp", position_encoding_parameters={"layers": layers})
        assert list(PositionEncodings(config, 0)) == ["cope_mlp"]
        assert list(PositionEncodings(config, 1)) == expected


def test_memory_does_not_grow_with_hidden_units():
    """What the backward pass keeps of eager attention is as large with 256 units as with 4, but for a row's table."""
    kept = []
    for units in (4, 256):
        layer = encoding(hidden_units=units, num_positions=8)
        content = torch.randn(1, 1, 4, 32768, dtype=torch.float64, requires_grad=True)
        query = torch.randn(1, 1, 4, 4, dtype=torch.float64)
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: saved.__setitem__(x.untyped_storage().data_ptr(), x.nbytes) or x, lambda x: x
        ):
            layer.bias(content, query, CONTEXT, 0.5)
        kept.append(sum(saved.values()))
    assert kept[1] < 1.5 * kept[0]
