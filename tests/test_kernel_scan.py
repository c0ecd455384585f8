"""CoPE_ALiBi and stick-breaking attention in Triton, run by its interpreter, against the papers in float64."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")

import oracles
from test_kernel_flash import close, poison, visible_by  # noqa: F401
from tiny import check_operator, mask_of, ranges_of, slow_but
from whatwhere import kernel_flash, kernel_launch, kernel_scan
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_scan import cope_alibi_attention, stick_attention

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

# (B, H, G, Q, K, D).
SHAPES = {
    "one-token": (2, 2, 1, 1, 1, 16),
    "one-row": (2, 4, 2, 1, 40, 20),
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
def narrow(little_scratch, monkeypatch):
    """Several blocks of rows and keys in short inputs, and a chunk for each block of rows."""
    monkeypatch.setattr(kernel_scan, "_tiles", lambda *_: ([Tiles(16, 16)], [Tiles(16, 16)]))


def test_the_reference_is_the_papers():
    """Loops and products, on packed and padded documents."""
    shape = B, H, _, Q, K, _ = (2, 4, 2, 5, 7, 16)
    segments = [-1, 0, 0, 0, 1, 1, -1]
    ranges = ranges_of([segments] * B, Q)
    query, key, value, slopes = (one.double() for one in inputs(shape))
    visible = oracles.visible_oracle(Q, K, segments)
    for way in WAYS:
        out, remainder = reference(way, query, key, value, slopes, ranges)
        for b, h in itertools.product(range(B), range(H)):
            tensors = query[b, h], key[b, h // 2], value[b, h // 2]
            if way == "cope_alibi":
                expected = oracles.cope_alibi_oracle(*tensors, slopes[h], visible, SCALING)
            else:
                own = range(K - Q, K)
                expected, _, rest = oracles.stick_breaking_oracle(*tensors, visible, own, SCALING, way == "inclusive")
                close(remainder[b, h], rest, 1e-12)
            close(out[b, h], expected, 1e-12)


QUICK = [
    ("strict", "one-token", "causal"),
    ("inclusive", "short", "padding"),
    ("cope_alibi", "one-row", "holes"),
    ("cope_alibi", "longer-keys", "packed"),
    ("inclusive", "square", "packed"),
]


@pytest.mark.parametrize(("way", "shape", "mask"), slow_but(QUICK, itertools.product(WAYS, SHAPES, MASKS)))
def test_equals_the_papers(way, shape, mask):
    B, _, _, Q, K, _ = SHAPES[shape]
    check(way, inputs(SHAPES[shape]), mask_of(mask, B, Q, K))


@pytest.mark.parametrize(
    ("way", "mask"),
    slow_but([("cope_alibi", "causal"), ("strict", "any")], itertools.product(WAYS, (*MASKS, "any"))),
)
def test_several_blocks_and_chunks(way, mask, narrow):
    check(way, inputs((1, 2, 1, 33, 40, 16)), mask_of(mask, 1, 33, 40))


@pytest.mark.parametrize("way", slow_but(["strict"], WAYS))
@pytest.mark.parametrize("opening", [-30.0, 30.0])
def test_extreme_logits(way, opening, narrow):
    """Gates closed and open, sticks never spent and spent at once; then logits of all sizes, up to thousands."""
    tensors = inputs((1, 2, 1, 33, 40, 16))
    tensors[0][..., 0], tensors[1][..., 0] = 1.0, opening / SCALING
    # Keys of 100 multiply the errors of the gradients.
    check(way, tensors, tolerance=5e-4)
    query, key, value, slopes = inputs((1, 2, 1, 33, 40, 16), spread=10 * abs(opening))
    results = attend(way, query, key, value, slopes, None)
    expected = reference(way, *(one.double() for one in (query, key, value, slopes)), None)
    for one, other in zip(results, expected):
        close(one, other, 2e-3)


def test_logits_near_the_largest_numbers():
    """All weight goes to the newest key with a positive logit, in any type."""
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value, _ = inputs((1, 1, 1, 6, 6, 16), dtype)
        query.zero_()[..., 0] = 1.0
        key.zero_()[..., 0] = 1e8 * torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0]).to(dtype)
        given = [one.detach().requires_grad_() for one in (query, key, value)]
        out, remainder = attend("strict", *given, None, None)
        close(out[0, 0, 1:], value[0, 0, [0, 1, 1, 3, 3]].float(), 1e-6)
        assert remainder.tolist() == [[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]]
        gradients = torch.autograd.grad([out, remainder], given, [torch.ones_like(out), torch.ones_like(remainder)])
        assert all(one.isfinite().all() for one in gradients)


def test_spent_sticks_are_not_read(narrow):
    """Sticks break in half at every key: what is older than about 58 keys and a few blocks is not touched."""
    query, key, value, _ = inputs((1, 1, 1, 16, 400, 16))
    query.zero_()
    key[:, :, :250], value[:, :, :250] = math.nan, math.nan
    given = [one.detach().requires_grad_() for one in (query, key, value)]
    out, remainder = attend("strict", *given, None, None)
    gradients = torch.autograd.grad(out.sum() + remainder.sum(), given)
    assert all(one.isfinite().all() for one in (out, *gradients))


@pytest.mark.parametrize("way", slow_but(["inclusive"], WAYS))
def test_nothing_is_seen(way):
    ranges = torch.zeros(1, 1, 40, 2, dtype=torch.int32)
    for Q in (1, 20):
        tensors = inputs((1, 2, 1, Q, 20, 16))
        out, second, *_ = check(way, tensors, ranges[:, :, : Q + 20])
        assert not out.any()
        # The remainder, or a gradient.
        assert (second == (0 if way == "cope_alibi" else 1)).all()


@pytest.mark.parametrize(
    ("way", "dtype"),
    slow_but(
        [("cope_alibi", torch.bfloat16), ("strict", torch.bfloat16), ("inclusive", torch.float16)],
        itertools.product(WAYS, (torch.bfloat16, torch.float16)),
    ),
)
def test_low_precision(way, dtype):
    """Errors relative to float64 with the same numbers: one rounding of the weights, and one of the result."""
    tensors = inputs((1, 2, 1, 33, 70, 32), dtype)
    used, outputs = (4, 1) if way == "cope_alibi" else (3, 2)
    grads = [torch.randn(1, 2, 33, 32).to(dtype), torch.randn(1, 2, 33)][:outputs]

    def results(function, cast):
        given = [cast(one).detach().requires_grad_() for one in tensors]
        found = function(way, *given, None)[:outputs]
        upstream = [one.to(out.dtype) for one, out in zip(grads, found)]
        return [*found, *torch.autograd.grad(found, given[:used], upstream)]

    exact, ours = results(reference, torch.Tensor.double), results(attend, torch.Tensor.clone)
    errors = [((one.double() - truth).norm() / truth.norm()).item() for one, truth in zip(ours, exact, strict=True)]
    assert max(errors) <= torch.finfo(dtype).eps, errors


@pytest.mark.parametrize(
    ("way", "splits", "mask"),
    slow_but(
        [("cope_alibi", 3, "padding"), ("strict", 3, "causal")],
        itertools.product(WAYS, (1, 3, 8), ("causal", "padding", "holes")),
    ),
)
def test_decoding_is_the_last_row(way, splits, mask, monkeypatch):
    """Splits of the keys, more of them than blocks too."""
    monkeypatch.setattr(kernel_flash, "INTERPRETED_SPLITS", splits)
    query, key, value, slopes = inputs((2, 4, 2, 3, 150, 16))
    ranges = mask_of(mask, 2, 3, 150)
    full = attend(way, query, key, value, slopes, ranges)
    step = attend(way, query[:, :, 2:], key, value, slopes, None if ranges is None else ranges[:, :, 2:])
    for one, other in zip(step, full):
        close(one, other[:, :, 2:])


@pytest.mark.parametrize("way", slow_but(["cope_alibi", "strict"], WAYS))
def test_dropout(way, narrow):
    """Where the values are the identity, the output is the weights: the same are dropped forward and backward."""
    query, key, value, slopes = (one.requires_grad_() for one in inputs((1, 2, 1, 24, 24, 24)))
    inclusive = {} if way == "cope_alibi" else {"inclusive": way == "inclusive"}

    def run(value, dropout, query=query):
        torch.manual_seed(5)
        options = {"scaling": SCALING, "dropout": dropout, **inclusive}
        if way == "cope_alibi":
            return (cope_alibi_attention(query, key, value, slopes, **options),)
        return stick_attention(query, key, value, **options)

    identity = torch.eye(24)[None, None]
    weights, *_ = run(identity, 0.0)
    kept = run(identity, 0.3)[0].detach() / weights.detach().where(weights > 0, 1.0)
    assert 0.6 < kept[weights > 0].gt(0).double().mean() < 0.8
    found, *remainders = run(value, 0.3)
    given = [query, key, value, slopes][: 4 - len(remainders)]
    exact = [one.detach().double().requires_grad_() for one in (query, key, value, slopes)]
    dense, rest = reference(way, exact[0], exact[1], identity.double(), exact[3], None)
    expected = [(dense * kept) @ exact[2], rest][: 1 + len(remainders)]
    grads = [torch.randn(one.shape) for one in expected]
    truth = torch.autograd.grad(expected, exact[: len(given)], [one.double() for one in grads])
    gradients = torch.autograd.grad([found, *remainders], given, grads)
    for one, other in zip((found, *remainders, *gradients), (*expected, *truth), strict=True):
        close(one, other.detach(), 1e-4)
    # One row is dropped too: in its own, split over programs.
    step = run(identity, 0.5, query[:, :, 23:])[0]
    assert 2 < (step[..., :23] == 0).sum() < 44


def test_operators():
    query, key, value, slopes = (one.requires_grad_() for one in inputs((1, 2, 1, 5, 7, 16)))
    for m, own in ((slopes, 0), (None, 1)):
        check_operator(kernel_scan._attention.forward, [query, key, value, m], [None, None], 0.3, own, 0.0)


def test_refusals():
    query, key, value, slopes = (one.requires_grad_() for one in inputs((1, 4, 2, 5, 5, 16)))
    with pytest.raises(ValueError, match=r"slopes=\(3,\) is not valid: it must be \(4,\)"):
        cope_alibi_attention(query, key, value, slopes[:3], scaling=1.0)
    with pytest.raises(ValueError, match=r"scaling=0\.0 is not valid: it must be positive"):
        stick_attention(query, key, value, scaling=0.0)
    with pytest.raises(ValueError, match=r"dropout=1\.5 is not valid: it must be in \[0, 1\]"):
        stick_attention(query, key, value, scaling=1.0, dropout=1.5)
    with pytest.raises(
        ValueError, match=r"value=\(1, 2, 5, 12\) is not valid: it must be as the keys, \(1, 2, 5, 16\)"
    ):
        stick_attention(query, key, value[..., :12], scaling=1.0)
    with pytest.raises(ValueError, match=r"ranges=\(1, 1, 5, 2\).*must be int32 \(1, 1, 10, 2\)"):
        cope_alibi_attention(query, key, value, slopes, ranges=torch.zeros(1, 1, 5, 2, dtype=torch.int32), scaling=1.0)
