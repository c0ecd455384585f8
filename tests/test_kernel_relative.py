"""The kernels of relative positions, run by Triton's interpreter, against loops in float64: outputs and gradients."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import oracles
from tiny import ranges_of, slow_but
from whatwhere import kernel_flash, kernel_launch, kernel_relative
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_relative import relative_attention

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

B, H, G, D = 2, 4, 2, 16


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, some of them far from the diagonal."""
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(32, 16)])


def inputs(Q, K, P, dtype=torch.float32):
    """Query, key, value, table."""
    shapes = [(B, H, Q, D), (B, G, K, D), (B, G, K, D), (P, D)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def case(kind, Q, K):
    """Documents (B, K), -1 for padding, or None; positions of the keys (1 or B, K)."""
    slots = torch.arange(K)
    if kind == "causal":
        return None, slots[None] + 100
    if kind == "padded":
        # Left and right: the last rows see nothing.
        documents = torch.stack([torch.where(slots >= K // 3, 0, -1), torch.where(slots < K - K // 4, 0, -1)])
        return documents, ((documents == 0).cumsum(-1) - 1).clamp(min=0)
    documents = (slots * 3 // K).expand(B, -1)
    starts = torch.where(torch.diff(documents, dim=-1, prepend=documents[:, :1] - 1) > 0, slots, 0).cummax(-1).values
    positions = slots - starts
    # Two tokens of the same distance from all rows, and negative distances.
    return documents, positions // 2 if kind == "repeated" else positions


def expected_of(states, documents, positions, Q, scaling=0.25):
    query, key, value, table = states
    K, rows = key.shape[2], []
    for b, h in itertools.product(range(B), range(H)):
        segments = None if documents is None else documents[b].tolist()
        places = positions[b % len(positions)]
        visible = oracles.visible_oracle(Q, K, segments)
        tensors = (query[b, h], key[b, h // (H // G)], value[b, h // (H // G)], table, places[K - Q :], places)
        rows.append(oracles.relative_oracle(*tensors, visible, scaling, "last"))
    return torch.stack(rows).unflatten(0, (B, H))


def compare(states, kind, Q, K, tolerance=2e-5, repeats=1):
    documents, positions = case(kind, Q, K)
    ranges = ranges_of(documents, Q)
    exact = [one.detach().double().requires_grad_() for one in states]
    expected = expected_of(exact, documents, positions, Q)
    grad = torch.randn(expected.shape).to(states[0].dtype)
    truth = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    runs = []
    for _ in range(repeats):
        out = relative_attention(*states, positions[:, K - Q :], positions, ranges=ranges, scaling=0.25)
        runs.append([out, *torch.autograd.grad(out, states, grad)])
    for name, found, other, right in zip(("out", "dq", "dk", "dv", "dtable"), runs[0], runs[-1], truth):
        assert torch.equal(found, other)
        error = (found.double() - right).norm() / max(right.norm(), 0.1 * grad.double().norm())
        assert error <= tolerance, f"{name}: {error:.2g}"
    with torch.no_grad():
        last = None if ranges is None else ranges[:, :, Q - 1 :]
        row = relative_attention(
            states[0][:, :, -1:], *states[1:], positions[:, -1:], positions, ranges=last, scaling=0.25
        )
    assert (row - expected[:, :, -1:]).norm() <= tolerance * max(expected[:, :, -1:].norm(), 0.1)


KINDS = ("causal", "padded", "packed", "repeated")


@pytest.mark.parametrize(
    ("Q", "K", "P", "kind"),
    slow_but(
        [(5, 9, 4, "padded"), (5, 9, 1, "causal"), (5, 9, 4, "repeated")],
        [
            *((5, 9, P, kind) for P in (1, 4, 20) for kind in KINDS),
            *((T, T, 7, kind) for T in (1, 33, 70) for kind in KINDS),
            *((33, 70, P, "causal") for P in (7, 70)),
        ],
    ),
)
def test_output_and_gradients(Q, K, P, kind):
    """Tables shorter and longer than the distances; decoding; twice the same, but where positions repeat."""
    compare(inputs(Q, K, P), kind, Q, K, repeats=1 if kind == "repeated" else 2)


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_low_precision(dtype):
    compare(inputs(5, 9, 4, dtype), "packed", 5, 9, tolerance=4e-2 if dtype == torch.bfloat16 else 4e-3)


@pytest.mark.parametrize("kind", slow_but(["packed"], ["causal", "packed", "padded"]))
def test_chunks_of_rows(kind, monkeypatch):
    """A small budget for scratch memory changes nothing but the number of passes."""
    monkeypatch.setattr(kernel_relative, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(kernel_relative, "SCRATCH_FACTOR", 0)
    monkeypatch.setattr(kernel_relative, "CHUNK_ROWS", 8)
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(16, 16)])
    compare(inputs(10, 14, 4), kind, 10, 14)


@pytest.mark.parametrize("rows", [7, 1])
def test_operator(rows):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    states = inputs(rows, 9, 4)
    positions = torch.arange(9 - rows, 9)[None], torch.arange(9)[None]
    torch.library.opcheck(kernel_relative._forward, (*states, *positions, None, None, 0.25, 0.0), test_utils=tests)
    if rows == 1:
        states = [one.detach() for one in states]
        torch.library.opcheck(kernel_relative._decode, (*states, *positions, None, 0.25), test_utils=tests)


def test_second_derivative_is_refused():
    states = inputs(5, 5, 4)
    out = relative_attention(*states, torch.arange(5)[None], torch.arange(5)[None], scaling=0.25)
    (grad,) = torch.autograd.grad(out.sin().sum(), states[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), states[0])


def test_bad_inputs():
    query, key, value, table = inputs(5, 9, 4)
    positions = torch.arange(4, 9)[None], torch.arange(9)[None]
    with pytest.raises(ValueError, match=r"table=\(4, 8\) is not valid: it must be \(P, 16\)"):
        relative_attention(query, key, value, table[:, :8], *positions, scaling=0.25)
    with pytest.raises(ValueError, match=r"positions=\(1, 9\) is not valid: it must be \(1 or batch, 5\)"):
        relative_attention(query, key, value, table, positions[1], positions[1], scaling=0.25)
