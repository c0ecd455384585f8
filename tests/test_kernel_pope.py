"""PoPE's operators on the Triton kernels, run by Triton's interpreter: against float64, and as PyTorch operators."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")

from tiny import check_operator, mask_of, slow_but
from whatwhere import kernel_pope
from whatwhere.attention_mask import dense_mask
from whatwhere.kernel_pope import pope_attention

pytestmark = pytest.mark.usefixtures("on_device")

# B, H, G, Q, K, D, R
SHAPES = {
    "one-row": (2, 2, 1, 1, 40, 16, 16),
    "square-63": (1, 2, 2, 63, 63, 40, 20),
    "grouped-longer-keys": (2, 4, 2, 20, 45, 16, 16),
    "square-100": (1, 2, 1, 100, 100, 64, 64),
}


def inputs(shape, dtype=torch.float32, *, shifted=True, per_entry=False):
    """query, key, value, the five tables."""
    B, H, G, Q, K, D, R = shape
    query = torch.rand(B, Q, H, D).to(dtype).transpose(1, 2).requires_grad_()
    key = torch.rand(B, K, G, D).to(dtype).transpose(1, 2).requires_grad_()
    value = torch.randn(B, G, K, D).to(dtype).requires_grad_()
    positions = torch.arange(K).repeat(B if per_entry else 1, 1)
    positions = positions + 10 * torch.arange(positions.shape[0])[:, None]
    phases = positions[..., None] * 100.0 ** (-torch.arange(R) / R)
    cos, sin = phases.cos(), phases.sin()
    shift = (-2 * math.pi * torch.rand(H, R)).requires_grad_() if shifted else None
    return query, key, value, (cos[:, K - Q :], sin[:, K - Q :], cos, sin, shift)


def reference(query, key, value, tables, key_ranges, scaling):
    """Eq. 5 as a full matrix, one channel at a time, in the type of the inputs."""
    H, Q, K = query.shape[1], query.shape[2], key.shape[2]
    groups = H // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    cos_q, sin_q, cos_k, sin_k, shift = tables
    query_phase = torch.atan2(sin_q.double(), cos_q.double())[:, None]
    key_phase = torch.atan2(sin_k.double(), cos_k.double())[:, None]
    R = cos_q.shape[-1]
    logits = query[..., R:] @ key[..., R:].mT
    for c in range(R):
        phase = key_phase[..., None, :, c] - query_phase[..., :, None, c]
        if shift is not None:
            phase = phase + shift[:, c, None, None]
        logits = logits + query[..., c, None] * key[..., None, :, c] * phase.cos()
    visible = torch.ones(Q, K, dtype=torch.bool).tril(K - Q) if key_ranges is None else dense_mask(key_ranges, Q)
    logits = (logits * scaling).masked_fill(~visible, -1e30)
    return logits.softmax(-1) * visible.any(-1, keepdim=True) @ value


def close(actual, expected, tolerance=2e-5):
    assert not expected.isnan().any(), "the reference is NaN"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def wanted(query, key, value, tables):
    return [tensor for tensor in (query, key, value, tables[-1]) if tensor is not None]


def doubled(query, key, value, tables):
    double = [None if t is None else t.detach().double().requires_grad_() for t in (query, key, value, tables[-1])]
    return (*double[:3], (*tables[:4], double[3]))


# Every two of the three options in all four ways, each with a shape; the other ways and shapes are slow.
QUICK = [
    ("one-row", False, False, False),
    ("square-63", True, True, False),
    ("square-63", True, False, True),
    ("grouped-longer-keys", False, True, True),
]
MORE = [
    *(("grouped-longer-keys", True, False, False), ("square-100", True, True, True)),
    *(("square-100", False, False, False), ("one-row", True, True, True)),
]


@pytest.mark.parametrize(
    ("shape", "padded", "shifted", "per_entry"),
    [
        pytest.param(
            SHAPES[name],
            padded,
            shifted,
            per_entry,
            id=f"{name}-{padded=}-{shifted=}-{per_entry=}",
            marks=[] if (name, padded, shifted, per_entry) in QUICK else [pytest.mark.slow],
        )
        for name, padded, shifted, per_entry in (*QUICK, *MORE)
    ],
)
def test_equals_the_formula(shape, padded, shifted, per_entry):
    arguments = inputs(shape, shifted=shifted, per_entry=per_entry)
    key_ranges = mask_of("padding", shape[0], shape[3], shape[4]) if padded else None
    out = pope_attention(*arguments, key_ranges=key_ranges, scaling=0.4)
    grad = torch.randn(out.shape)
    actual = torch.autograd.grad(out, wanted(*arguments), grad)
    copies = doubled(*arguments)
    expected_out = reference(*copies, key_ranges, 0.4)
    close(out, expected_out)
    expected = torch.autograd.grad(expected_out, wanted(*copies), grad.double())
    for one, other in zip(actual, expected):
        close(one, other, 5e-5)


@pytest.mark.parametrize(
    ("shifted", "limited"),
    slow_but([(True, True), (False, False)], itertools.product((True, False), (False, True))),
)
def test_decoding_equals_the_last_row(shifted, limited):
    """Without a gradient the keys are split over programs."""
    shape = (2, 4, 2, 1, 50, 16, 8)
    arguments = inputs(shape, shifted=shifted, per_entry=True)
    key_ranges = mask_of("padding", 2, 1, 50) if limited else None
    with torch.no_grad():
        out = pope_attention(*arguments, key_ranges=key_ranges, scaling=0.4)
    close(out, reference(*doubled(*arguments), key_ranges, 0.4))
    detached = [tensor.detach() for tensor in arguments[:3]]
    tables = tuple(None if table is None else table.detach() for table in arguments[3])
    assert torch.equal(pope_attention(*detached, tables, key_ranges=key_ranges, scaling=0.4), out)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_in_parts(key_heads, monkeypatch):
    """Batch entries, or heads, are computed one after the other where pairs of all would take too much memory."""
    shape = (6, 2, 2, 20, 20, 16, 8) if key_heads == 2 else (3, 4, 2, 20, 90, 16, 16)
    arguments = inputs(shape, per_entry=True)
    key_ranges = mask_of("padding", shape[0], shape[3], shape[4])
    whole = pope_attention(*arguments, key_ranges=key_ranges, scaling=0.4)
    grad = torch.randn(whole.shape)
    gradients = torch.autograd.grad(whole, wanted(*arguments), grad)
    monkeypatch.setattr(kernel_pope, "POPE_SCRATCH_BYTES", 1)
    query, key, value, (*phases, shift) = arguments
    parts = kernel_pope._pope_parts([query, key, value, shift, *phases, key_ranges, None], 0.0)
    assert [part_value.shape[:2] for *_, part_value, _ in parts] == [(1, key_heads)] * 6
    again = pope_attention(*arguments, key_ranges=key_ranges, scaling=0.4)
    close(again, whole)
    for one, other in zip(torch.autograd.grad(again, wanted(*arguments), grad), gradients):
        close(one, other)


# The interpreter cuts bfloat16 off where a GPU rounds.
@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 5), (torch.float16, 2)], ids=["bfloat16", "float16"])
def test_low_precision(dtype, factor):
    """Errors at most a small multiple of those of PyTorch's own operations in the same type."""
    arguments = inputs((1, 2, 1, 40, 40, 32, 32), dtype)
    out = pope_attention(*arguments, scaling=0.3)
    assert out.dtype == dtype
    grad = torch.randn(out.shape).to(dtype)
    copies = doubled(*arguments)
    exact = reference(*copies, None, 0.3)
    gradients = torch.autograd.grad(exact, wanted(*copies), grad.double())

    cos_q, sin_q, cos_k, sin_k, shift = arguments[3]
    leaf = [tensor.detach().requires_grad_() for tensor in (*arguments[:3], shift)]
    phase = torch.atan2(sin_q, cos_q) - leaf[3][:, None]
    query = torch.cat((leaf[0] * phase.cos().to(dtype), leaf[0] * phase.sin().to(dtype)), -1)
    key = torch.cat((leaf[1] * cos_k.to(dtype), leaf[1] * sin_k.to(dtype)), -1)
    plain = torch.nn.functional.scaled_dot_product_attention(
        query, key, leaf[2], is_causal=True, scale=0.3, enable_gqa=True
    )
    actual = (out, *torch.autograd.grad(out, wanted(*arguments), grad))
    theirs = (plain, *torch.autograd.grad(plain, leaf, grad))
    for one, other, expected in zip(actual, theirs, (exact, *gradients)):
        error = (one.double() - expected).norm()
        assert error <= factor * (other.double() - expected).norm()


@pytest.mark.slow
@pytest.mark.parametrize(("shifted", "limited"), [(True, True), (False, False)])
def test_operators(shifted, limited):
    query, key, value, (*phases, shift) = inputs((2, 2, 1, 12, 20, 16, 8), shifted=shifted)
    key_ranges = mask_of("padding", 2, 12, 20) if limited else None
    operator = kernel_pope._pope_operator
    check_operator(operator.forward, [query, key, value, shift], [*phases, key_ranges, None], 0.3, 0.0)
    one = [tensor.detach() for tensor in (query[:, :, :1], key, value)]
    first = [phases[0][:, :1], phases[1][:, :1], *phases[2:]]
    step = mask_of("padding", 2, 1, 20) if limited else None
    constant = None if shift is None else shift.detach()
    check_operator(operator.decode, [*one, constant], [*first, step, None], 0.3, 0.0)


def test_wrong_arguments():
    query, key, value, (*phases, shift) = inputs((1, 2, 1, 8, 10, 16, 16))
    with pytest.raises(ValueError, match="tables="):
        pope_attention(query, key, value, (*phases[2:], *phases[2:], shift), scaling=1.0)
    with pytest.raises(ValueError, match="shift="):
        pope_attention(query, key, value, (*phases, shift[:, :3]), scaling=1.0)
    with pytest.raises(ValueError, match=r"query=\(1, 2, 8, 16\), key=\(1, 1, 7, 16\).*do not fit"):
        pope_attention(query, key[:, :, 3:], value[:, :, 3:], (*phases, shift), scaling=1.0)
    with pytest.raises(ValueError, match=r"value=\(1, 1, 10, 8\) is not valid: it must be as the keys"):
        pope_attention(query, key, value[..., :8], (*phases, shift), scaling=1.0)
    with pytest.raises(ValueError, match="no gradient"):
        pope_attention(query, key, value, (phases[0].requires_grad_(), *phases[1:], shift), scaling=1.0)
