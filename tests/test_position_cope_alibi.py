"""CoPE_ALiBi: the shipped specification and the blockwise path against Eq. 10; parameters."""

import types

import pytest
import torch

import oracles
from bias_checks import SEGMENTS, check_bias, states_of
from tiny import bias_of, position_context, tiny_model
from whatwhere.attention_blockwise import blockwise_attention
from whatwhere.position_alibi import alibi_slopes
from whatwhere.position_cope_alibi import CoPEALiBi, CoPEALiBiParameters

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "learned": {"slopes": "learned"},
}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"slopes": "fixd"}, r"\['slopes'\]='fixd'.*'fixed', 'alibi', 'learned'"),
    ({"first_slope": 0.0}, r"\['first_slope'\]=0.0.*not 0"),
    ({"first_slope": 1e308}, r"\['first_slope'\]=1e[+]308 is not valid"),
    ({"first_slope": -1e30}, r"\['first_slope'\]=-1e[+]30 is not valid: it must be in"),
    ({"slopes": "learned", "first_slope": 0.25}, r"\['first_slope'\]=0.25.*slopes='learned'"),
    ({"slopes": "alibi", "first_slope": -1.0}, r"\['first_slope'\]=-1.0.*slopes='alibi'"),
]

CONFIG = types.SimpleNamespace(hidden_size=16, num_attention_heads=4, head_dim=4)


def slopes_of(first=0, **parameters):
    layer = CoPEALiBi(CONFIG, CoPEALiBiParameters(**parameters), 0)
    return bias_of(layer, position_context(torch.zeros(1, 1, dtype=torch.long), head_offset=first), 0.5).tensors[0]


@pytest.mark.parametrize("parameters", [{"slopes": "learned"}, {"first_slope": -0.5}], ids=["learned", "penalty"])
@pytest.mark.parametrize("spread", [0.3, 12.0], ids=["half-open", "open-or-closed"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["causal", "packed-padded"])
def test_equals_the_paper(parameters, spread, segments):
    """Eq. 10 written as loops."""
    layer = CoPEALiBi(CONFIG, CoPEALiBiParameters(**parameters), 0).double()
    learned = list(layer.parameters())
    for slopes in learned:
        torch.nn.init.normal_(slopes)
    context = position_context(torch.arange(2, 9)[None], torch.arange(9)[None])
    slopes = bias_of(layer, context, 0.5).tensors[0].double()
    query, key, value = states = states_of(4, 2, 7, 9, spread)

    def oracle(b, h, g, visible):
        return oracles.cope_alibi_oracle(query[b, h], key[b, g], value[b, g], slopes[h], visible, 0.5)

    check_bias(layer, states, oracle, context, segments=segments, inputs=learned, tolerance=1e-8)


def test_slopes():
    """The paper's sets for four heads; those of ALiBi; learned ones, 0 at the start, a parameter of each layer."""
    for first in (1, 0.25, 0.0625):
        expected = torch.tensor([first, first / 2, first / 4, first / 8])
        assert torch.equal(slopes_of(first_slope=first), expected)
        assert torch.equal(slopes_of(2, first_slope=first), expected[2:])
    assert torch.equal(slopes_of(slopes="alibi"), alibi_slopes(4))
    model = tiny_model("llama", "cope_alibi", position_encoding_parameters={"slopes": "learned"})
    fresh = type(model)._from_config(model.config)
    learned = {name: p for name, p in fresh.named_parameters() if "encodings" in name}
    assert [name.rsplit(".", 3)[1:] for name in learned] == [["cope_alibi", "slopes", "weight"]] * 2
    assert all(not weight.any() and weight.shape == (4,) for weight in learned.values())


def test_gradient_of_the_local_heads_slopes():
    """Under tensor parallelism a rank has the first heads of those that it is given."""
    context = position_context(torch.zeros(1, 1, dtype=torch.long), head_offset=1)
    layer = CoPEALiBi(CONFIG, CoPEALiBiParameters(slopes="learned"), 0)
    torch.nn.init.normal_(layer.slopes.weight)
    query, key, value = (torch.randn(1, 2, 20, 4) for _ in range(3))
    bias = bias_of(layer, context, 0.5)
    found = []
    for direct in (True, False):
        out = blockwise_attention(query, key, value, scaling=0.5, biases=[bias], direct=direct)
        found.append(torch.autograd.grad(out.square().sum(), layer.slopes.weight, retain_graph=True)[0])
    torch.testing.assert_close(*found)
    assert found[0].ne(0).tolist() == [False, True, True, False]
