"""The kernels of relative positions, run by Triton's interpreter, against loops in float64: outputs and gradients."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import oracles
from tiny import check_operator, key_ranges_of, slow_but
from whatwhere import kernel_flash, kernel_plain
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_plain import plain_attention

pytestmark = pytest.mark.usefixtures("on_device")

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
    key_ranges = key_ranges_of(documents, Q)
    exact = [one.detach().double().requires_grad_() for one in states]
    expected = expected_of(exact, documents, positions, Q)
    grad = torch.randn(expected.shape).to(states[0].dtype)
    truth = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    runs = []
    for _ in range(repeats):
        relative = states[3], positions[:, K - Q :], positions
        out = plain_attention(*states[:3], relative=relative, key_ranges=key_ranges, scaling=0.25)
        runs.append([out, *torch.autograd.grad(out, states, grad)])
    for name, found, other, right in zip(("out", "dq", "dk", "dv", "dtable"), runs[0], runs[-1], truth):
        assert torch.equal(found, other)
        error = (found.double() - right).norm() / max(right.norm(), 0.1 * grad.double().norm())
        assert error <= tolerance, f"{name}: {error:.2g}"
    with torch.no_grad():
        last = None if key_ranges is None else key_ranges[:, :, Q - 1 :]
        relative = states[3], positions[:, -1:], positions
        row = plain_attention(states[0][:, :, -1:], *states[1:3], relative=relative, key_ranges=last, scaling=0.25)
    assert (row - expected[:, :, -1:]).norm() <= tolerance * max(expected[:, :, -1:].norm(), 0.1)


KINDS = ("causal", "padded", "packed", "repeated")


@pytest.mark.parametrize(
    ("Q", "K", "P", "kind"),
    slow_but(
        [(5, 9, 4, "padded"), (5, 9, 1, "causal"), (5, 9, 4, "repeated")],
        [
            *((5, 9, P, "causal") for P in (1, 20)),
            *((5, 9, 4, kind) for kind in ("padded", "packed", "repeated")),
            *((1, 1, 7, "causal"), (33, 33, 7, "repeated"), (70, 70, 7, "padded"), (70, 70, 7, "packed")),
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
def test_chunks_of_rows(kind, little_scratch, monkeypatch):
    """A small budget for scratch memory changes nothing but the number of passes."""
    monkeypatch.setattr(kernel_plain, "CHUNK_ROWS", 8)
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(16, 16)])
    compare(inputs(10, 14, 4), kind, 10, 14)


@pytest.mark.parametrize("rows", [7, 1])
def test_operator(rows):
    *states, table = inputs(rows, 9, 4)
    positions = torch.arange(9 - rows, 9)[None], torch.arange(9)[None]
    operator, others = kernel_plain._plain_operator, [None, None, *positions, None, None]
    check_operator(operator.forward, [*states, None, None, table], others, 0.25, 0.0)
    if rows == 1:
        *states, table = (one.detach() for one in (*states, table))
        check_operator(operator.decode, [*states, None, None, table], others, 0.25, 0.0)


def test_gradient_where_operations_must_be_deterministic():
    states, positions = inputs(5, 9, 4), torch.arange(9)[None]
    out = plain_attention(*states[:3], relative=(states[3], positions[:, 4:], positions), scaling=0.25)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(ValueError, match=r"use_deterministic_algorithms.*allowed: False"):
        out.sum().backward()


def test_bad_inputs():
    query, key, value, table = inputs(5, 9, 4)
    rows, keys = torch.arange(4, 9)[None], torch.arange(9)[None]
    decay = torch.zeros(B, H, 5), torch.zeros(B, H, 9)
    for given, message in (
        ({"relative": (table[:, :8], rows, keys)}, r"table=\(4, 8\) is not valid: it must be \(P, 16\)"),
        ({"relative": (table, keys, keys)}, r"positions=\(1, 9\) is not valid: it must be \(1 or batch, 5\)"),
        ({"relative": (table, rows, keys), "decay": decay}, "give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            plain_attention(query, key, value, **given, scaling=0.25)
