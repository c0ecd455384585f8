"""RoPE on all or on some channels, against the paper's formula; all scalings equal the stock Llama elsewhere."""

import pytest
import torch

from oracles import rope_rotation
from tiny import FAMILIES, position_context, tiny_config
from whatwhere.position_registry import PositionEncodings, SharedPositionEncodings


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.25])
def test_against_the_paper(factor):
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor}
    config = tiny_config("llama", "rope", rope_parameters=parameters)
    rotated = int(config.head_dim * factor)
    query = torch.randn(1, 4, 5, config.head_dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, config.head_dim, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 1, 2, 9, 40]])
    context = SharedPositionEncodings(config)(query, position_context(positions))
    actual = PositionEncodings(config, 0).before_cache(query, key, context)
    for states, found in zip((query, key), actual):
        expected = torch.stack(
            [
                torch.stack([rope_rotation(states[0, h, t], positions[0, t], 100.0, rotated) for t in range(5)])
                for h in range(states.shape[1])
            ]
        )[None]
        # Angles are float32 in the shipped path.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        weight = torch.randn_like(expected)
        (one,) = torch.autograd.grad((found * weight).sum(), states)
        (other,) = torch.autograd.grad((expected * weight).sum(), states)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("factor", [0.0, 1.5, "half", None, 0.13, 0.4])
def test_bad_factors(family, factor):
    with pytest.raises(ValueError, match=r"partial_rotary_factor.*=.*not valid.*must be"):
        tiny_config(family, "rope", rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": factor})
