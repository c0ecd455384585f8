"""The flash-attention kernels, run by Triton's interpreter, against full matrices in float64."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tiny import slow_but
from whatwhere import kernel_flash, kernel_launch
from whatwhere.kernel_flash import Polar
from whatwhere.kernel_launch import Tiles

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

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
]


def ranges_of(kind: str, B: int, Q: int, K: int) -> torch.Tensor | None:
    """int32 (B, 1, Q + K, 2) of a kind of mask."""
    if kind == "causal":
        return None
    slots = torch.arange(K)
    high = (K - Q + torch.arange(Q) + 1).repeat(B, 1)
    low = torch.zeros(B, Q, dtype=torch.int64)
    valid = torch.ones(B, K, dtype=torch.bool)
    if kind == "padding":
        # Left in even entries, right in odd ones.
        for b in range(B):
            valid[b] = slots >= K // 3 if b % 2 == 0 else slots < K - K // 4
    elif kind == "packed":
        for b in range(B):
            for edge in sorted({(K * part) // (5 + b) for part in range(1, 5)}):
                low[b, high[b] > edge] = edge
    elif kind == "holes":
        valid = torch.rand(B, K) > 0.3
    else:
        low, high = torch.randint(0, K, (B, Q)), torch.randint(0, K + 1, (B, Q))
        valid = torch.rand(B, K) > 0.1
    if kind in ("padding", "holes"):
        own = valid[:, K - Q :]
        low, high = low * own, high * own
    ranges = torch.empty(B, 1, Q + K, 2, dtype=torch.int32)
    ranges[:, 0, :Q, 0], ranges[:, 0, :Q, 1] = low, high
    ranges[:, 0, Q:] = valid[..., None]
    return ranges


def visible_by(ranges: torch.Tensor | None, Q: int, K: int) -> torch.Tensor:
    """bool (1 or B, 1, Q, K)."""
    slots = torch.arange(K)
    if ranges is None:
        return (slots <= torch.arange(Q)[:, None] + K - Q)[None, None]
    low, high = ranges[:, :, :Q, :1], ranges[:, :, :Q, 1:]
    return (slots >= low) & (slots < high) & (ranges[:, :, None, Q:, 0] != 0)


def polar_of(R: int, B: int, H: int, Q: int, K: int, *, shifted: bool, same: bool = True) -> Polar:
    """Tables of random phases, float32; `same`: one table for all entries of the batch."""
    query_phases = torch.rand(1 if same else B, Q, R) * 20 - 10
    key_phases = torch.rand(1 if same else B, K, R) * 20 - 10
    shift = -2 * math.pi * torch.rand(H, R) if shifted else None
    return Polar(query_phases.cos(), query_phases.sin(), key_phases.cos(), key_phases.sin(), shift)


def turned(features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, shift: torch.Tensor | None) -> torch.Tensor:
    """Real parts, imaginary parts, plain channels."""
    R = cos.shape[-1]
    phase = torch.atan2(sin.double(), cos.double())[:, None]
    if shift is not None:
        phase = phase - shift[:, None]
    polar = features[..., :R]
    return torch.cat((polar * phase.cos(), polar * phase.sin(), features[..., R:]), dim=-1)


def reference(query, key, value, visible, scaling, polar=None, shift=None, constant=None, others=None):
    """Output and log-sum-exp in float64; `others` are logits (B, H, Q, X) and values (B, H, X, D) of further keys."""
    if polar is not None:
        query, key = turned(query, polar.cos_q, polar.sin_q, shift), turned(key, polar.cos_k, polar.sin_k, None)
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


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """query, key, value, gradient of the output; not all contiguous."""
    B, H, G, Q, K, D = shape
    query = torch.randn(B, Q, H, D).to(dtype).transpose(1, 2)
    key, value = torch.randn(B, K, 2 * G, D).to(dtype).transpose(1, 2).chunk(2, 1)
    return [query, key, value, torch.randn(B, H, Q, D).to(dtype)]


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing was written to is NaN."""
    empty = torch.empty

    def poisoned(*size: int, **settings: object) -> torch.Tensor:
        memory = empty(*size, **settings)
        return memory.fill_(math.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(torch, "empty", poisoned)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert not expected.isnan().any(), "the reference is NaN"
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def check(shape, tiles, *, ranges=None, polar=None, bound=None, dtype=torch.float32, tolerance=2e-5) -> None:
    B, H, _, Q, K, D = shape
    scaling = 0.7 / math.sqrt(D)
    tensors = inputs(shape, dtype)
    query, key, value, grad = tensors
    wanted = leaves(tensors[:3])
    shift = None
    if polar is not None and polar.shift is not None:
        shift = polar.shift.double().requires_grad_()
    visible = visible_by(ranges, Q, K)
    if bound is not None:
        start, rows = bound
        visible = visible & (torch.arange(K) < start[:, :, torch.arange(Q) // rows, None])
    out, lse = reference(*wanted, visible, scaling, polar, shift)
    expected = torch.autograd.grad(out, [*wanted, *([] if shift is None else [shift])], grad.double())

    settings = {"scaling": scaling, "ranges": ranges, "polar": polar, "bound": bound, "tiles": [tiles]}
    actual, actual_lse = kernel_flash.flash_forward(query, key, value, **settings)
    assert actual.dtype == dtype
    close(actual, out, tolerance)
    close(actual_lse, lse, tolerance)
    delta = kernel_flash.row_products(grad, actual)
    close(delta, (grad.double() * actual.double()).sum(-1))
    backward = (grad, query, key, value, actual_lse, delta)
    grad_query, grad_shift = kernel_flash.flash_backward_rows(*backward, **settings)
    close(grad_query, expected[0], tolerance)
    if shift is None:
        assert grad_shift is None
    else:
        close(grad_shift, expected[3], 5 * tolerance)
    grad_key, grad_value = kernel_flash.flash_backward_columns(*backward, **settings)
    close(grad_key, expected[1], tolerance)
    close(grad_value, expected[2], tolerance)
    if not visible.any(-1).all():
        nothing = ~visible.any(-1).expand(B, H, Q)
        assert (actual[nothing] == 0).all()
        assert (grad_query[nothing] == 0).all()


@pytest.mark.parametrize(("shape", "tiles", "mask"), PAIRS)
def test_equals_full_matrices(shape: tuple[int, ...], tiles: Tiles, mask: str) -> None:
    B, _, _, Q, K, _ = shape
    check(shape, tiles, ranges=ranges_of(mask, B, Q, K))


@pytest.mark.parametrize(
    ("mask", "shape"),
    slow_but([("causal", "square-63"), ("packed", "longer-keys")], itertools.product(("causal", "packed"), FEW)),
)
def test_bound(mask: str, shape: str) -> None:
    sizes, tiles = SHAPES[shape]
    B, H, _, Q, K, _ = sizes
    rows = 16
    # Rising with the rows in the first head, in any order in the others, some of them 0.
    start = torch.randint(-1, K + 10, (B, H, -(-Q // rows)), dtype=torch.int32)
    start[:, 0] = start[:, 0].sort(-1).values
    check(sizes, tiles, ranges=ranges_of(mask, B, Q, K), bound=(start, rows))


@pytest.mark.parametrize("rows", slow_but([64], [1, 64]))
def test_bound_of_other_rows_than_the_tiles(rows: int) -> None:
    shape = (1, 2, 1, 100, 120, 16)
    start = torch.randint(0, 120, (1, 2, -(-100 // rows)), dtype=torch.int32)
    check(shape, Tiles(32, 16), bound=(start, rows))


def test_nothing_is_seen() -> None:
    ranges = torch.zeros(1, 1, 40 + 40, 2, dtype=torch.int32)
    check((1, 2, 1, 40, 40, 16), Tiles(16, 16), ranges=ranges)


@pytest.mark.parametrize(
    ("mask", "shape"),
    slow_but([("causal", "square-63"), ("any", "one-row")], itertools.product(("causal", "any"), FEW)),
)
def test_continues_an_attention(mask: str, shape: str) -> None:
    """An attention over other keys comes first, and the logits have a constant: as in CoPE's window."""
    sizes, tiles = SHAPES[shape]
    B, H, _, Q, K, D = sizes
    scaling = 0.3
    query, key, value, grad = tensors = inputs(sizes)
    ranges = ranges_of(mask, B, Q, K)
    visible = visible_by(ranges, Q, K)
    bound = (torch.randint(0, K, (B, H, -(-Q // 16)), dtype=torch.int32), 16)
    visible = visible & (torch.arange(K) < bound[0][:, :, torch.arange(Q) // 16, None])
    constant = 3 * torch.randn(B, H, Q)
    logits, other_value = 2 * torch.randn(B, H, Q, 5), torch.randn(B, H, 5, D)
    # The first attention saw nothing in some rows.
    logits[:, :, ::3] = -math.inf
    seen = logits[..., :1] > -math.inf
    initial_lse = torch.where(seen[..., 0], logits.logsumexp(-1), 1e30)
    initial = torch.where(seen, logits, 0.0).softmax(-1) @ other_value * seen

    wanted = leaves(tensors[:3])
    out, lse = reference(
        *wanted, visible, scaling, constant=constant.double(), others=(logits.double(), other_value.double())
    )
    expected = torch.autograd.grad(out, wanted, grad.double())
    settings = {"scaling": scaling, "ranges": ranges, "bound": bound, "tiles": [tiles]}
    actual, actual_lse = kernel_flash.flash_forward(
        query, key, value, constant=constant, initial=(initial, initial_lse), **settings
    )
    close(actual, out)
    close(actual_lse, lse)
    backward = (grad, query, key, value, actual_lse - constant, kernel_flash.row_products(grad, actual))
    first = torch.randn(B, H, Q, D)
    grad_query, _ = kernel_flash.flash_backward_rows(*backward, initial=first, **settings)
    close(grad_query, expected[0] + first)
    firsts = torch.randn_like(key.contiguous()), torch.randn_like(value.contiguous())
    grad_key, grad_value = kernel_flash.flash_backward_columns(*backward, initial=firsts, **settings)
    close(grad_key, expected[1] + firsts[0])
    close(grad_value, expected[2] + firsts[1])


@pytest.mark.parametrize(
    ("part", "shifted", "same", "groups"),
    slow_but(
        [(0.3, True, False, 1)],
        [
            (1.0, True, True, 2),
            (1.0, True, True, 1),
            (0.5, True, False, 2),
            (0.5, False, True, 2),
            (0.3, True, False, 1),
        ],
    ),
)
def test_polar(part: float, shifted: bool, same: bool, groups: int) -> None:
    """All channels or some of them, with and without a shift, one table or one per entry, grouped heads or not."""
    B, H, _, Q, K, D = shape = (2, 2, 2 // groups, 40, 70, 40)
    check(shape, Tiles(32, 32), polar=polar_of(int(part * D), B, H, Q, K, shifted=shifted, same=same))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "mask"), list(zip(SHAPES, MASKS)), ids=SHAPES)
def test_polar_masks(shape: str, mask: str) -> None:
    sizes, tiles = SHAPES[shape]
    B, H, _, Q, K, D = sizes
    polar = polar_of(D, B, H, Q, K, shifted=True)
    check(sizes, tiles, ranges=ranges_of(mask, B, Q, K), polar=polar)


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
            assert kernel_launch.precision(torch.float32) == ("tf32" if on else "ieee")
            assert kernel_launch.precision(torch.bfloat16) == "ieee"
    finally:
        _legacy(False)
        torch.backends.cuda.matmul.fp32_precision = torch.backends.fp32_precision = "none"


@pytest.mark.parametrize(
    ("dtype", "part"),
    slow_but(
        [(torch.bfloat16, 0), (torch.float16, 0.5)],
        [(torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float16, 0), (torch.float16, 0.5)],
    ),
)
def test_low_precision(dtype: torch.dtype, part: float) -> None:
    B, H, _, Q, K, D = shape = (1, 2, 1, 63, 100, 32)
    polar = polar_of(int(part * D), B, H, Q, K, shifted=True) if part else None
    check(shape, Tiles(32, 64), polar=polar, dtype=dtype, tolerance=3e-2 if dtype == torch.bfloat16 else 4e-3)


def test_tiles_of_the_table() -> None:
    """Without an override, whatever the head dim."""
    for D in (16, 48, 256):
        query, key, value, grad = inputs((1, 2, 1, 40, 40, D))
        out, lse = kernel_flash.flash_forward(query, key, value, scaling=0.1)
        expected, _ = reference(*leaves([query, key, value]), visible_by(None, 40, 40), 0.1)
        close(out, expected)
        backward = (grad, query, key, value, lse, kernel_flash.row_products(grad, out))
        assert not kernel_flash.flash_backward_rows(*backward, scaling=0.1)[0].isnan().any()
        assert not kernel_flash.flash_backward_columns(*backward, scaling=0.1)[0].isnan().any()


# Every mask with one number of splits; the other pairs are slow.
@pytest.mark.parametrize(
    ("mask", "part", "splits"),
    slow_but(
        [("causal", 0, None), ("causal", 1, 1), ("window", 0.5, 7), ("padding", 0.5, None), ("nothing", 1, 1)],
        [
            (mask, part, splits)
            for mask, part in [("causal", 0), ("causal", 1), ("window", 0.5), ("padding", 0.5), ("nothing", 1)]
            for splits in (None, 1, 7)
        ],
    ),
)
def test_decode(mask: str, part: float, splits: int | None) -> None:
    B, H, G, K, D = 2, 3, 1, 101, 40
    query, key, value, _ = tensors = inputs((B, H, G, 1, K, D))
    ranges = None
    if mask != "causal":
        ranges = torch.ones(B, 1, 1 + K, 2, dtype=torch.int32)
        first, last = {"window": (37, 90), "padding": (5, K), "nothing": (0, 0)}[mask]
        ranges[:, 0, 0] = torch.tensor([first, last])
        ranges[0, 0, 60:70] = 0
    polar = polar_of(int(part * D), B, H, 1, K, shifted=True, same=False) if part else None
    shift = None if polar is None or polar.shift is None else polar.shift.double()
    expected, _ = reference(*leaves(tensors[:3]), visible_by(ranges, 1, K), 0.2, polar, shift)
    out = kernel_flash.flash_decode(
        query, key, value, scaling=0.2, ranges=ranges, polar=polar, splits=splits, tiles=[Tiles(16, 32)]
    )
    close(out, expected)


@pytest.mark.parametrize("splits", slow_but([20], [1, 20]))
def test_decode_continues_an_attention(splits: int) -> None:
    B, H, G, K, D = 2, 4, 2, 70, 16
    query, key, value, _ = tensors = inputs((B, H, G, 1, K, D))
    start = torch.tensor([[[50], [0]], [[17], [70]]], dtype=torch.int32)
    visible = torch.arange(K) < start.repeat_interleave(H // G, 1)[..., None]
    constant = torch.randn(B, H, 1)
    logits, other_value = torch.randn(B, H, 1, 5), torch.randn(B, H, 5, D)
    # One head saw nothing before, another neither before nor now.
    logits[:, 2] = -math.inf
    logits[0, 0] = -math.inf
    seen = logits[..., :1] > -math.inf
    initial_lse = torch.where(seen[..., 0], logits.logsumexp(-1), 1e30)
    initial = torch.where(seen, logits, 0.0).softmax(-1) @ other_value * seen
    expected, _ = reference(
        *leaves(tensors[:3]), visible, 0.2, constant=constant.double(), others=(logits.double(), other_value.double())
    )
    out = kernel_flash.flash_decode(
        query, key, value, scaling=0.2, bound=(start, 1), constant=constant, initial=(initial, initial_lse),
        splits=splits, tiles=[Tiles(16, 32)],
    )  # fmt: skip
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
        kernel_flash.flash_forward(query, key[:, :, 1:], value[:, :, 1:], scaling=1.0)
    with pytest.raises(ValueError, match="valid types"):
        kernel_flash.flash_forward(query, key.half(), value, scaling=1.0)
    with pytest.raises(ValueError, match="scaling=-1"):
        kernel_flash.flash_forward(query, key, value, scaling=-1.0)
    with pytest.raises(ValueError, match="ranges="):
        kernel_flash.flash_forward(query, key, value, scaling=1.0, ranges=torch.zeros(1, 1, 40, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="one row"):
        kernel_flash.flash_decode(query, key, value, scaling=1.0)
