"""The flash-attention kernels, run by Triton's interpreter, against full matrices in float64."""

import contextlib
import math
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tiny import mask_of, slow_but
from whatwhere import kernel_flash, kernel_launch
from whatwhere.attention_mask import dense_mask
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_plain import plain_attention

pytestmark = pytest.mark.usefixtures("on_device")

# (B, H, G, Q, K, D), and tiles that visit several blocks of each axis.
SHAPES = {
    "one-row": ((2, 2, 1, 1, 40, 16), Tiles(16, 16)),
    "square-63": ((1, 2, 2, 63, 63, 40), Tiles(32, 32)),
    "grouped-100": ((1, 4, 2, 100, 100, 16), Tiles(64, 32)),
    "longer-keys": ((2, 2, 1, 63, 100, 64), Tiles(32, 64)),
    "square-257": ((1, 2, 1, 257, 257, 16), Tiles(64, 128)),
}
FEW = ("one-row", "square-63", "longer-keys")
MASKS = ("causal", "padding", "packed", "holes", "any")
# Every mask with square and with longer keys, and the ends.
CHOSEN = {
    *(("causal", "one-row"), ("any", "one-row"), ("packed", "grouped-100"), ("any", "square-257")),
    *((mask, shape) for mask in MASKS for shape in ("square-63", "longer-keys")),
}
# Every mask with one of the smaller shapes; the other pairs are slow.
QUICK = {
    ("causal", "one-row"),
    ("padding", "square-63"),
    ("packed", "grouped-100"),
    ("holes", "longer-keys"),
    ("any", "one-row"),
}
PAIRS = [
    pytest.param(*SHAPES[shape], mask, id=f"{mask}-{shape}", marks=[] if (mask, shape) in QUICK else [pytest.mark.slow])
    for shape in SHAPES
    for mask in MASKS
    if (mask, shape) in CHOSEN
]


def visible_by(key_ranges: torch.Tensor | None, Q: int, K: int) -> torch.Tensor:
    """bool (1 or B, 1, Q, K)."""
    return torch.ones(1, 1, Q, K, dtype=torch.bool).tril(K - Q) if key_ranges is None else dense_mask(key_ranges, Q)


def polar_of(R: int, B: int, H: int, K: int) -> tuple[torch.Tensor, ...]:
    """Random phases of a decoding step, as cosines and sines, and shifts: float32."""
    query_phases = torch.rand(B, 1, R) * 20 - 10
    key_phases = torch.rand(B, K, R) * 20 - 10
    shift = -2 * math.pi * torch.rand(H, R)
    return query_phases.cos(), query_phases.sin(), key_phases.cos(), key_phases.sin(), shift


def turned(features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Real parts, imaginary parts, plain channels."""
    R = cos.shape[-1]
    phase = torch.atan2(sin.double(), cos.double())[:, None]
    if shift is not None:
        phase = phase - shift[:, None]
    polar = features[..., :R]
    return torch.cat((polar * phase.cos(), polar * phase.sin(), features[..., R:]), dim=-1)


def reference(query, key, value, visible, scaling, polar=None, constant=None, others=None):
    """Output and log-sum-exp in float64; `others` are logits (B, H, Q, X) and values (B, H, X, D) of further keys."""
    if polar is not None:
        cos_q, sin_q, cos_k, sin_k, shift = polar
        query, key = turned(query, cos_q, sin_q, shift), turned(key, cos_k, sin_k, None)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = query @ key.mT * scaling
    if constant is not None:
        logits = logits + constant[..., None]
    logits = logits.masked_fill(~visible, -math.inf)
    if others is not None:
        logits = torch.cat((others[0], logits), dim=-1)
        value = torch.cat((others[1], value), dim=-2)
    seen = (logits > -math.inf).any(-1, keepdim=True)
    lse = torch.where(seen, logits, 0.0).logsumexp(-1)
    weights = torch.where(seen, (logits - lse[..., None]).exp(), 0.0)
    return weights @ value, torch.where(seen[..., 0], lse, 1e30)


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, V: int | None = None) -> list[torch.Tensor]:
    """query, key, value, gradient of the output; not all contiguous."""
    B, H, G, Q, K, D = shape
    V = V or D
    query = torch.randn(B, Q, H, D).to(dtype).transpose(1, 2)
    both = torch.randn(B, K, G, D + V).to(dtype).transpose(1, 2)
    return [query, both[..., :D], both[..., D:], torch.randn(B, H, Q, V).to(dtype)]


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert not expected.isnan().any(), "the reference is NaN"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def with_tiles(*tiles: Tiles):
    """Kernels run with these tiles, or with small ones where a GPU has no room for them."""
    return mock.patch.object(kernel_flash, "_candidates", return_value=(*tiles, Tiles(16, 16)))


def check(shape, tiles, *, V=None, key_ranges=None, bound=None, dtype=torch.float32, tolerance=2e-5) -> None:
    B, H, _, Q, K, D = shape
    scaling = 0.7 / math.sqrt(D)
    tensors = inputs(shape, dtype, V)
    query, key, value, grad = tensors
    wanted = leaves(tensors[:3])
    visible = visible_by(key_ranges, Q, K)
    if bound is not None:
        start, rows = bound
        visible = visible & (torch.arange(K) < start[:, :, torch.arange(Q) // rows, None])
    out, lse = reference(*wanted, visible, scaling)
    expected = torch.autograd.grad(out, wanted, grad.double())

    settings = {"scaling": scaling, "key_ranges": key_ranges, "bound": bound}
    with with_tiles(tiles):
        actual, actual_lse = kernel_flash.flash_forward(query, key, value, **settings)
        delta = kernel_flash.row_products(grad, actual)
        backward = (grad, query, key, value, actual_lse, delta)
        grad_query, grad_key, grad_value, _ = kernel_flash.flash_backward(*backward, **settings)
    assert actual.dtype == dtype
    close(actual, out, tolerance)
    close(actual_lse, lse, tolerance)
    close(delta, (grad.double() * actual.double()).sum(-1))
    close(grad_query, expected[0], tolerance)
    close(grad_key, expected[1], tolerance)
    close(grad_value, expected[2], tolerance)
    if not visible.any(-1).all():
        nothing = ~visible.any(-1).expand(B, H, Q)
        assert (actual[nothing] == 0).all()
        assert (grad_query[nothing] == 0).all()


@pytest.mark.parametrize(("shape", "tiles", "mask"), PAIRS)
def test_equals_full_matrices(shape: tuple[int, ...], tiles: Tiles, mask: str) -> None:
    B, _, _, Q, K, _ = shape
    check(shape, tiles, key_ranges=mask_of(mask, B, Q, K))


@pytest.mark.parametrize(
    ("mask", "shape", "rows"),
    slow_but(
        [("causal", "square-63", 16), ("packed", "longer-keys", 64)],
        [
            *(("causal", "square-63", rows) for rows in (1, 16)),
            *(("packed", "longer-keys", rows) for rows in (16, 64)),
            *(("causal", "longer-keys", 64), ("packed", "one-row", 1)),
        ],
    ),
)
def test_bound(mask: str, shape: str, rows: int) -> None:
    sizes, tiles = SHAPES[shape]
    B, H, _, Q, K, _ = sizes
    # Rising with the rows in the first head, in any order in the others, some of them 0.
    start = torch.randint(-1, K + 10, (B, H, -(-Q // rows)), dtype=torch.int32)
    start[:, 0] = start[:, 0].sort(-1).values
    check(sizes, tiles, key_ranges=mask_of(mask, B, Q, K), bound=(start, rows))


def test_nothing_is_seen() -> None:
    key_ranges = torch.zeros(1, 1, 40 + 40, 2, dtype=torch.int32)
    check((1, 2, 1, 40, 40, 16), Tiles(16, 16), key_ranges=key_ranges)


def first_attention(empty: torch.Tensor, D: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Output and log-sum-exp of rows over other keys, nothing where `empty` (B, H, Q); their logits and values."""
    logits, value = 2 * torch.randn(*empty.shape, 5), torch.randn(*empty.shape[:2], 5, D)
    logits[empty] = -math.inf
    lse = torch.where(empty, 1e30, logits.logsumexp(-1))
    out = torch.where(empty[..., None], 0.0, logits).softmax(-1) @ value * ~empty[..., None]
    return (out, lse), (logits.double(), value.double())


@pytest.mark.parametrize(
    ("mask", "shape"),
    slow_but(
        [("causal", "square-63"), ("any", "one-row")],
        [("causal", "square-63"), ("any", "one-row"), ("any", "longer-keys")],
    ),
)
def test_continues_an_attention(mask: str, shape: str) -> None:
    """An attention over other keys comes first, and the logits have a constant: as in CoPE's window."""
    sizes, tiles = SHAPES[shape]
    B, H, _, Q, K, D = sizes
    scaling = 0.3
    query, key, value, grad = tensors = inputs(sizes)
    key_ranges = mask_of(mask, B, Q, K)
    visible = visible_by(key_ranges, Q, K)
    bound = (torch.randint(0, K, (B, H, -(-Q // 16)), dtype=torch.int32), 16)
    visible = visible & (torch.arange(K) < bound[0][:, :, torch.arange(Q) // 16, None])
    constant = 3 * torch.randn(B, H, Q)
    # The first attention saw nothing in some rows.
    empty = torch.zeros(B, H, Q, dtype=torch.bool)
    empty[:, :, ::3] = True
    initial, others = first_attention(empty, D)
    wanted = leaves(tensors[:3])
    out, lse = reference(*wanted, visible, scaling, constant=constant.double(), others=others)
    expected = torch.autograd.grad(out, wanted, grad.double())
    settings = {"scaling": scaling, "key_ranges": key_ranges, "bound": bound}
    first = torch.randn(B, H, Q, D)
    firsts = torch.randn_like(key.contiguous()), torch.randn_like(value.contiguous())
    with with_tiles(tiles):
        actual, actual_lse = kernel_flash.flash_forward(
            query, key, value, constant=constant, initial=initial, **settings
        )
        backward = (grad, query, key, value, actual_lse - constant, kernel_flash.row_products(grad, actual))
        befores = (first, *firsts)
        grad_query, grad_key, grad_value, _ = kernel_flash.flash_backward(*backward, initial=befores, **settings)
    close(actual, out)
    close(actual_lse, lse)
    close(grad_query, expected[0] + first)
    close(grad_key, expected[1] + firsts[0])
    close(grad_value, expected[2] + firsts[1])


@pytest.mark.parametrize(
    ("shape", "mask", "V"),
    slow_but(
        [("square-63", "padding", 20), ("longer-keys", "holes", 61)],
        [
            ("square-63", "padding", 20),
            ("longer-keys", "holes", 61),
            ("one-row", "causal", 8),
            ("grouped-100", "any", 13),
        ],
    ),
)
def test_values_narrower_than_keys(shape: str, mask: str, V: int) -> None:
    sizes, tiles = SHAPES[shape]
    B, _, _, Q, K, _ = sizes
    check(sizes, tiles, V=V, key_ranges=mask_of(mask, B, Q, K))


def _high(on: bool) -> None:
    torch.set_float32_matmul_precision("high" if on else "highest")


def _legacy(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = on


def _everywhere(on: bool) -> None:
    # As `TrainingArguments(tf32=...)` does.
    torch.backends.fp32_precision = "tf32" if on else "ieee"


def _products(on: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if on else "ieee"


@pytest.mark.parametrize("switch", [_high, _legacy, _everywhere, _products])
def test_tf32_as_pytorch_would(switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it was allowed by, and without an error where `allow_tf32` cannot be read any more."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        for on in (True, False):
            switch(on)
            assert kernel_launch.precision(torch.float32, 64) == ("tf32" if on else "ieee")
            assert kernel_launch.precision(torch.bfloat16, 64) == "ieee"
    finally:
        _legacy(False)
        torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"


@pytest.mark.parametrize(("dtype", "V"), [(torch.bfloat16, 32), (torch.float16, 20)])
def test_low_precision(dtype: torch.dtype, V: int) -> None:
    tolerance = 3e-2 if dtype == torch.bfloat16 else 4e-3
    check((1, 2, 1, 63, 100, 32), Tiles(32, 64), V=V, dtype=dtype, tolerance=tolerance)


def test_tiles_of_the_table() -> None:
    """Without an override, whatever the head dim."""
    for D, V in ((16, 16), (48, 48), (256, 256), (96, 48), (512, 256)):
        query, key, value, grad = inputs((1, 2, 1, 40, 40, D), V=V)
        out, lse = kernel_flash.flash_forward(query, key, value, scaling=0.1)
        expected, _ = reference(*leaves([query, key, value]), visible_by(None, 40, 40), 0.1)
        close(out, expected)
        backward = (grad, query, key, value, lse, kernel_flash.row_products(grad, out))
        gradients = kernel_flash.flash_backward(*backward, scaling=0.1)[:3]
        assert not any(one.isnan().any() for one in gradients)


@contextlib.contextmanager
def decoding_with(splits: int) -> Iterator[None]:
    """Decoding in this number of splits, with small tiles."""
    with mock.patch.multiple(kernel_flash, INTERPRETED_SPLITS=splits, _DECODE=(Tiles(16, 32),)):
        yield


# Every mask with one number of splits; the other pairs are slow.
@pytest.mark.parametrize(
    ("mask", "part", "splits"),
    slow_but(
        [("causal", 0, 3), ("causal", 1, 1), ("window", 0.5, 7), ("padding", 0.5, 3), ("nothing", 1, 1)],
        [
            *(("causal", 0, 3), ("causal", 1, 1), ("window", 0.5, 7), ("padding", 0.5, 3), ("nothing", 1, 1)),
            *(("window", 0, 1), ("causal", 0.5, 7), ("nothing", 0, 3)),
        ],
    ),
)
def test_decode(mask: str, part: float, splits: int) -> None:
    B, H, G, K, D = 2, 3, 1, 101, 40
    query, key, value, _ = tensors = inputs((B, H, G, 1, K, D))
    key_ranges = None
    if mask != "causal":
        key_ranges = torch.ones(B, 1, 1 + K, 2, dtype=torch.int32)
        first, last = {"window": (37, 90), "padding": (5, K), "nothing": (0, 0)}[mask]
        key_ranges[:, 0, 0] = torch.tensor([first, last])
        key_ranges[0, 0, 60:70] = 0
    polar = polar_of(int(part * D), B, H, K) if part else None
    expected, _ = reference(*leaves(tensors[:3]), visible_by(key_ranges, 1, K), 0.2, polar)
    with decoding_with(splits):
        out = kernel_flash.flash_decode(query, key, value, scaling=0.2, key_ranges=key_ranges, polar=polar)
    close(out, expected)


@pytest.mark.parametrize("splits", slow_but([20], [1, 20]))
def test_decode_continues_an_attention(splits: int) -> None:
    B, H, G, K, D = 2, 4, 2, 70, 16
    query, key, value, _ = tensors = inputs((B, H, G, 1, K, D))
    start = torch.tensor([[[50], [0]], [[17], [70]]], dtype=torch.int32)
    visible = torch.arange(K) < start.repeat_interleave(H // G, 1)[..., None]
    constant = torch.randn(B, H, 1)
    # One head saw nothing before, another neither before nor now.
    empty = torch.zeros(B, H, 1, dtype=torch.bool)
    empty[:, 2] = empty[0, 0] = True
    initial, others = first_attention(empty, D)
    expected, _ = reference(*leaves(tensors[:3]), visible, 0.2, constant=constant.double(), others=others)
    with decoding_with(splits):
        out = kernel_flash.flash_decode(
            query, key, value, scaling=0.2, bound=(start, 1), constant=constant, initial=initial
        )
    close(out, expected)


def test_inputs_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may be repeated."""
    query, key, value, _ = tensors = inputs((1, 2, 1, 40, 40, 16))
    initial = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40)
    before = [tensor.clone() for tensor in (*tensors, *initial)]
    results = [kernel_flash.flash_forward(query, key, value, scaling=0.2, initial=initial) for _ in range(2)]
    for tensor, copy in zip((*tensors, *initial), before):
        assert torch.equal(tensor, copy)
    assert torch.equal(results[0][0], results[1][0])


def test_wrong_arguments() -> None:
    query, key, value, _ = inputs((1, 2, 1, 40, 40, 16))
    with pytest.raises(ValueError, match="do not fit"):
        plain_attention(query, key[:, :, 1:], value[:, :, 1:], scaling=1.0)
    with pytest.raises(ValueError, match="twice as many"):
        plain_attention(query, key, value[..., :7], scaling=1.0)
    with pytest.raises(ValueError, match="valid types"):
        plain_attention(query, key.half(), value, scaling=1.0)
    with pytest.raises(ValueError, match="scaling=-1"):
        plain_attention(query, key, value, scaling=-1.0)
    with pytest.raises(ValueError, match=r"decay=\(1, 2, 4\)"):
        plain_attention(query, key, value, scaling=1.0, decay=(torch.zeros(1, 2, 4), torch.zeros(1, 2, 5)))
    with pytest.raises(ValueError, match="key_ranges="):
        plain_attention(query, key, value, scaling=1.0, key_ranges=torch.zeros(1, 1, 40, 2, dtype=torch.int32))


@pytest.mark.parametrize("jump", [0.0, -1e6])
@pytest.mark.parametrize("columns", [16, 64])
def test_decay_that_falls_far(columns, jump, monkeypatch):
    """Large numbers, whose differences are small on both sides of a jump; some keys have larger numbers than a row."""
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(16, columns)])
    query, key, value, grad = tensors = inputs((1, 2, 2, 150, 150, 16))
    c = -torch.rand(1, 2, 150).double().cumsum(-1) - 3e4
    c[..., 37:] += jump
    c[:, 1, 41:43] += 5.0
    states = leaves(tensors[:3])
    bias = (c[..., :, None] - c[..., None, :]).clamp(max=0)
    seen = torch.ones(150, 150, dtype=torch.bool).tril()
    logits = (0.3 * states[0] @ states[1].mT + bias).masked_fill(~seen, float("-inf"))
    expected = logits.softmax(-1) @ states[2]
    given = [one.detach().requires_grad_() for one in (query, key, value)]
    out = plain_attention(*given, decay=(c, c), scaling=0.3)
    close(out, expected)
    truth = torch.autograd.grad(expected, states, grad.double())
    for one, other in zip(torch.autograd.grad(out, given, grad), truth):
        close(one, other)


def test_strides_of_a_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay (B, K, H) in memory."""
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(64, 64)])
    query, key, value, _ = inputs((2, 2, 2, 130, 130, 16))
    c = -torch.rand(2, 130, 2).double().cumsum(1).mT
    expected, found = (plain_attention(query, key, value, decay=(one, one), scaling=0.3) for one in (c.contiguous(), c))
    assert torch.equal(found, expected)
