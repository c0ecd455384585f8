"""Dropout of attention weights in the Triton kernels, run by Triton's interpreter.

Where the values are the identity, the output is the weights, and shows which of them are dropped.
"""

import pytest
import torch

pytest.importorskip("triton")

from tiny import slow_but
from whatwhere import kernel_plain
from whatwhere.kernel_cope import cope_attention
from whatwhere.kernel_plain import plain_attention
from whatwhere.kernel_pope import pope_attention
from whatwhere.scripts.benchmark.kernel_cases import KERNELS, case

pytestmark = pytest.mark.usefixtures("on_device")

B, H, G, T = 2, 2, 1, 80
ROWS = torch.arange(T)
FEW = {"num_positions": 8}
KINDS = {
    **{name: (name, FEW if name == "cope" else {}) for name in KERNELS},
    "cope separate": ("cope", {**FEW, "gates": "separate_key"}),
    "cope+relative": ("cope", {**FEW, "encoding": "cope+relative"}),
}


@pytest.mark.parametrize("kind", slow_but(["fox", "pope", "cope"], KINDS))
def test_gradients_are_those_of_the_dropped_weights(kind, device, little_scratch, monkeypatch):
    """Forward and backward pass, windows and plain part, and all parts of PoPE drop the same weights."""
    monkeypatch.setattr(kernel_plain, "CHUNK_ROWS", 32)
    name, options = KINDS[kind]
    shape = {"batch": B, "heads": H, "groups": G, **options}
    # The inputs of both are the same.
    whole, dropped = (KERNELS[name].call(case(name, "float32", T, T, **shape, dropout=p), device) for p in (0.0, 0.3))
    inputs = [one.requires_grad_() for one in whole.inputs]
    identity = torch.eye(T).expand(B, G, T, T).contiguous()
    weights, some = (call.kernel(*inputs[:2], identity, *inputs[3:]).detach() for call in (whole, dropped))
    kept = (some / weights.where(weights > 0, 1.0)).double()
    assert 0.6 < kept[weights > 0].gt(0).double().mean() < 0.8
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.7), rtol=1e-4, atol=0)

    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected_weights = whole.reference(*exact[:2], identity.double(), *exact[3:], rows=ROWS)
    expected = (expected_weights * kept) @ exact[2].repeat_interleave(H // G, 1)
    grad = torch.randn(B, H, T, T)
    if whole.undecided is not None:
        grad[whole.undecided(*(one.detach() for one in exact), rows=ROWS)] = 0
    found = dropped.kernel(*inputs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(found, inputs, grad)
    for one, other in zip(found, torch.autograd.grad(expected, exact, grad.double())):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


def test_each_weight_is_dropped_by_itself():
    """The share, and agreement with neighbours, other heads, batch entries and seeds, of 16,000 weights and more."""
    query, key = torch.zeros(2, 2, 128, 128), torch.zeros(2, 1, 128, 128)
    value = torch.eye(128).expand(2, 1, -1, -1).contiguous()

    def dropped(seed):
        torch.manual_seed(seed)
        return plain_attention(query, key, value, scaling=1.0, dropout=0.25) == 0

    seen = torch.ones(128, 128).tril().bool()
    first, second = dropped(0), dropped(1)
    assert torch.equal(first, dropped(0))
    assert first[..., ~seen].all()
    inner = seen[1:, :-1] & seen[:-1, :-1]
    pairs = {
        "row": (first[:, :, 1:, :-1][..., inner], first[:, :, :-1, :-1][..., inner]),
        "key": (first[:, :, 1:, 1:][..., inner], first[:, :, 1:, :-1][..., inner]),
        "head": (first[:, 0][:, seen], first[:, 1][:, seen]),
        "entry": (first[0][:, seen], first[1][:, seen]),
        "seed": (first[..., seen], second[..., seen]),
        "diagonal": (first[:, :, 1:, 1:][..., inner], first[:, :, :-1, :-1][..., inner]),
    }
    for name, (one, other) in pairs.items():
        count = one.numel()
        for found, share in ((one, 0.25), (one & other, 0.25**2)):
            deviations = (found.double().mean() - share).abs() / (share * (1 - share) / count) ** 0.5
            assert deviations < 5, (name, share, deviations)


def test_probabilities():
    query = torch.randn(1, 1, 4, 16)
    assert (plain_attention(query, query, query, scaling=1.0, dropout=1.0) == 0).all()
    for dropout in (-0.1, 1.5):
        with pytest.raises(ValueError, match=rf"dropout={dropout}.*\[0, 1\]"):
            plain_attention(query, query, query, scaling=1.0, dropout=dropout)


def test_one_row_is_dropped_too():
    """Not by the decoding kernels, which have no dropout."""
    query, key = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 64, 64)
    value = torch.eye(64)[None, None]
    tables = (torch.ones(1, 1, 64), torch.zeros(1, 1, 64), torch.ones(1, 64, 64), torch.zeros(1, 64, 64), None)
    options = {"scaling": 0.1, "dropout": 0.5}
    for weights in (
        plain_attention(query, key, value, **options),
        pope_attention(query, key, value, tables, **options),
        cope_attention(query, key, value, torch.randn(64, 4), position_scale=1.0, **options),
    ):
        assert 10 < (weights == 0).sum() < 54
