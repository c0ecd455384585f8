"""RoPE on all or on some channels, against the paper's formula; all scalings equal the stock Llama elsewhere."""

import pytest
import torch

from bias_checks import assert_same, every_head
from oracles import rope_rotation
from tiny import position_context, tiny_config
from whatwhere.position_modules import PositionEncodings, SharedPositionEncodings


@pytest.mark.parametrize("factor", [1.0, 0.5, 0.25])
def test_against_the_paper(factor):
    parameters = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": factor}
    config = tiny_config("llama", "rope", rope_parameters=parameters)
    rotated = int(config.head_dim * factor)
    query = torch.randn(1, 4, 5, config.head_dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, 5, config.head_dim, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[0, 1, 2, 9, 40]])
    context = SharedPositionEncodings(config)(query, position_context(positions))
    actual = PositionEncodings(config, 0)["rope"].before_cache(query, key, context)
    for states, found in zip((query, key), actual):

        def turned(h, t, states=states):
            return rope_rotation(states[0, h, t], positions[0, t], 100.0, rotated)

        # Angles are float32 in the shipped path.
        assert_same([found], every_head(turned, states.shape[1], 5)[None], [states], 1e-5)
