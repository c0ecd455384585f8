"""CoPE_ALiBi and stick-breaking attention in Triton, run by its interpreter, against the papers in float64."""

import math
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

import oracles
from test_kernel_flash import close, poison, ranges_of, visible_by  # noqa: F401
from tiny import slow_but
from whatwhere import kernel_flash, kernel_launch, kernel_scan
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_scan import cope_alibi_attention, stick_attention

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

# (B, H, G, Q, K, D).
SHAPES = {
    "one-token": (2, 2, 1, 1, 1, 16),
    "one-row": (2, 4, 2, 1, 70, 20),
    "short": (2, 2, 2, 5, 5, 16),
    "square": (1, 2, 1, 33, 33, 24),
    "longer-keys": (1, 4, 2, 33, 70, 16),
    "long": (1, 2, 2, 70, 70, 16),
}
MASKS = ("causal", "padding", "packed", "holes")
WAYS = ("cope_alibi", "strict", "inclusive")
SCALING = 0.3


def stick(logits, visible):
    """Weights and remainder by products, as in the paper: dense, float64."""
    beta = torch.where(visible, logits.sigmoid(), 0.0)
    left = torch.where(visible, (-logits).sigmoid(), 1.0)
    products = left.flip(-1).cumprod(-1).flip(-1)
    newer = torch.cat((products[..., 1:], torch.ones_like(products[..., :1])), -1)
    return beta * newer, products[..., 0]


def reference(way, query, key, value, slopes, ranges):
    """Output and remainder (0 for CoPE_ALiBi); differentiable."""
    B, H, Q, _ = query.shape
    K, groups = key.shape[2], H // key.shape[1]
    visible = visible_by(ranges, Q, K).expand(B, 1, Q, K)
    logits = query @ key.repeat_interleave(groups, 1).mT * SCALING
    value = value.repeat_interleave(groups, 1)
    if way != "cope_alibi":
        if way == "strict":
            high = torch.arange(K - Q + 1, K + 1).expand(B, 1, Q) if ranges is None else ranges[:, :, :Q, 1]
            visible = visible & (torch.arange(K) != high[..., None] - 1)
        weights, remainder = stick(logits, visible)
        return weights @ value, remainder
    positions = torch.where(visible, logits.sigmoid(), 0.0).flip(-1).cumsum(-1).flip(-1)
    logits = (logits + slopes[:, None, None] * positions).masked_fill(~visible, -math.inf)
    some = visible.any(-1, keepdim=True)
    weights = torch.where(some, logits, 0.0).softmax(-1) * some
    return weights @ value, torch.zeros(B, H, Q, dtype=torch.float64)


def attend(way, query, key, value, slopes, ranges):
    if way == "cope_alibi":
        out = cope_alibi_attention(query, key, value, slopes, ranges=ranges, scaling=SCALING)
        return out, torch.zeros(out.shape[:3])
    return stick_attention(query, key, value, ranges=ranges, scaling=SCALING, inclusive=way == "inclusive")


def inputs(shape, dtype=torch.float32, spread=1.0):
    """Query, key, value, slopes of both signs; beside something else in memory, as projections leave them."""
    B, H, G, Q, K, D = shape
    query = (spread * torch.randn(B, Q, H, D + 3)).to(dtype)[..., :D].transpose(1, 2)
    both = torch.randn(B, K, G, 2 * D).to(dtype).transpose(1, 2)
    return query, both[..., :D], both[..., D:], torch.randn(H)


def check(way, tensors, ranges=None, tolerance=2e-5):
    """Output, remainder and every gradient; returns those of the kernel."""
    wanted = [one.detach().double().requires_grad_() for one in tensors]
    given = [one.detach().requires_grad_() for one in tensors]
    used, outputs = (4, 1) if way == "cope_alibi" else (3, 2)
    expected = reference(way, *wanted, ranges)[:outputs]
    found = attend(way, *given, ranges)[:outputs]
    assert [one.dtype for one in found] == [tensors[0].dtype, torch.float32][:outputs]
    grads = [torch.randn(one.shape).to(one.dtype) for one in found]
    truth = torch.autograd.grad(expected, wanted[:used], [one.double() for one in grads])
    results = [*found, *torch.autograd.grad(found, given[:used], grads)]
    for one, other in zip(results, (*expected, *truth), strict=True):
        # Errors grow with the sums that they are in.
        close(one, other.detach(), tolerance * max(1.0, other.abs().max().item()))
    return results


@pytest.fixture
def narrow(monkeypatch):
    """Several blocks of rows and keys in short inputs."""
    monkeypatch.setattr(kernel_scan, "ROWS", 16)
    monkeypatch.setattr(kernel_scan, "_tiles", lambda *_: ([Tiles(16, 16)], [Tiles(16, 16)]))


@pytest.fixture
def little_scratch(monkeypatch):
    """A chunk for each block of rows."""
    monkeypatch.setattr(kernel_scan, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(kernel_scan, "SCRATCH_FACTOR", 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_papers(way, shape, mask):
    B, _, _, Q, K, _ = SHAPES[shape]
    check(way, inputs(SHAPES[shape]), ranges_of(mask, B, Q, K))
