"""Positions that are added to the embeddings: learned (`absolute`) and fixed (`sinusoidal`)."""

import math

import pytest
import torch

from tiny import FAMILIES, tiny_config, tiny_model, tokens
from whatwhere.position_modules import embedding


@pytest.mark.parametrize("family", FAMILIES)
def test_sinusoids_are_the_paper_s(family):
    config = tiny_config(family, "sinusoidal", position_encoding_parameters={"theta": 100.0, "scale": 0.5})
    hidden = torch.randn(1, 5, 32)
    added = embedding(config)(hidden, torch.tensor([[0, 1, 7, 40, 1000]])) - hidden
    for row, position in enumerate((0, 1, 7, 40, 1000)):
        for channel in range(32):
            phase = position / 100.0 ** (2 * (channel // 2) / 32)
            expected = 0.5 * (math.sin(phase) if channel % 2 == 0 else math.cos(phase))
            assert added[0, row, channel] == pytest.approx(expected, abs=2e-4)


def test_the_default_amplitude_is_that_of_fresh_tokens():
    assert tiny_config("llama", "sinusoidal").position_encoding_parameters == {"theta": 10000.0, "scale": 0.2}


@pytest.mark.parametrize(("family", "name"), [("llama", "model.embed_positions"), ("gpt2", "transformer.wpe")])
def test_learned_positions(family, name):
    model = tiny_model(family, "absolute")
    table = model.get_submodule(name)
    assert table.weight.shape == (48, 32)
    hidden = torch.randn(2, 3, 32)
    expected = hidden + table.weight[[4, 0, 47]]
    torch.testing.assert_close(table(hidden, torch.tensor([[4, 0, 47]])), expected)
    for first, message in ((-1, r"the position -1; .*'absolute' supports 0 to 47"), (46, "A sequence of 49 tokens")):
        with pytest.raises(ValueError, match=message):
            model(tokens(1, 3), position_ids=torch.arange(first, first + 3)[None])
    with torch.no_grad():
        table.weight.zero_()
        plain = tiny_model(family, "none")
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith(name)})
        assert torch.equal(model(tokens(1, 9)).logits, plain(tokens(1, 9)).logits)
