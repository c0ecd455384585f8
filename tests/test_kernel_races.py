"""No races, no reads of unwritten memory and none outside of tensors in the kernels: see `race_check`."""

import functools
import math

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from compile_kernels import variants
from race_check import BARRIER, LANES, OUTSIDE, PROGRAMS, UNWRITTEN, checked
from tiny import mask_of, slow_but
from whatwhere import kernel_cope, kernel_flash, kernel_launch, kernel_plain
from whatwhere.kernel_cope import cope_attention
from whatwhere.kernel_launch import Tiles
from whatwhere.kernel_plain import plain_attention
from whatwhere.kernel_pope import pope_attention

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

FLASH = {"forward_kernel", "row_products_kernel", "backward_rows_kernel", "backward_columns_kernel"}
COPE = FLASH | {"_position_values", "_window_forward", "_window_rows", "_window_columns"}
POPE = FLASH | {"turn_kernel"}
DECODING = {"decode_kernel", "combine_kernel"}

# (B, H, G, Q, K, D): head dims that are a power of two and not, grouped heads, more keys than rows, one row.
SHAPES = {
    "small": (1, 2, 2, 40, 75, 20),
    "square": (1, 2, 2, 70, 70, 16),
    "grouped": (2, 2, 1, 40, 75, 20),
    "wide": (1, 6, 2, 66, 135, 40),
    "one-row": (2, 4, 2, 1, 75, 20),
}
MASKS = ("causal", "padding", "packed", "any")
# Every shape and every mask.
PAIRS = [
    *(("square", "packed"), ("grouped", "padding"), ("grouped", "any"), ("wide", "causal")),
    *(("one-row", "padding"), ("one-row", "any")),
]


def inputs(shape, dtype=torch.float32):
    """Query, key, value; beside something else in memory, as projections leave them."""
    B, H, G, Q, K, D = shape
    query = torch.randn(B, Q, H, D + 3).to(dtype)[..., :D].transpose(1, 2)
    both = torch.randn(B, K, G, 2 * D).to(dtype).transpose(1, 2)
    return query, both[..., :D], both[..., D:]


def search(attend, tensors, kernels):
    """Calls `attend` on the tensors, forward and backward, or without gradients if it decodes; nothing is found.

    kernels: the names of those that run; each has several programs.
    """
    decodes = bool(kernels & DECODING)
    tensors = [None if one is None else one.detach().requires_grad_(not decodes) for one in tensors]
    with checked() as report:
        results = [attend(*tensors)]
        if not decodes:
            grad = torch.randn(results[0].shape).to(results[0].dtype)
            results += torch.autograd.grad(results[0], [one for one in tensors if one is not None], grad)
    assert not report.findings, f"\n{report}"
    assert set(report.programs) == kernels
    assert all(programs > 1 for programs in report.programs.values()), report.programs
    # PyTorch has not read memory that nothing was written to either.
    assert all(one.isfinite().all() for one in results)


# Plain attention.


def search_plain(shape, mask, decay, dtype=torch.float32):
    B, H, _, Q, K, _ = shape
    key_ranges = mask_of(mask, shape[0], *shape[3:5])
    numbers = -torch.rand(1 if decay == "one" else B, H, K).cumsum(-1).double()

    def attend(query, key, value, of_keys):
        of_rows = numbers[..., K - Q :]
        pair = {"none": None, "one": (of_rows, numbers), "each": (of_rows, of_keys)}[decay]
        return plain_attention(query, key, value, decay=pair, key_ranges=key_ranges, scaling=0.3)

    query, key, value = inputs(shape, dtype)
    # With the decay of each entry, keys are wider than values.
    value = value[..., 3:] if decay == "each" else value
    tensors = (query, key, value, numbers if decay == "each" else None)
    search(attend, tensors, DECODING if Q == 1 else FLASH)


@pytest.mark.parametrize(
    ("shape", "mask", "decay"),
    slow_but(
        [("grouped", "padding", "each"), ("one-row", "any", "each"), ("one-row", "packed", "one")],
        [
            *((*pair, "each") for pair in PAIRS),
            *(("grouped", "packed", decay) for decay in ("none", "one")),
            *(("one-row", "packed", decay) for decay in ("none", "one")),
        ],
    ),
)
def test_plain_attention(shape, mask, decay):
    """Without a decay, with one of all batch entries (ALiBi), with one of each entry and its gradient (FoX)."""
    search_plain(SHAPES[shape], mask, decay)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mask"), [(torch.bfloat16, "causal"), (torch.float16, "packed")])
def test_plain_attention_in_half_precision(dtype, mask, monkeypatch):
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(16, 32)])
    search_plain(SHAPES["grouped"], mask, "each", dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tiles", "mask"), [(Tiles(16, 64), "any"), (Tiles(64, 16), "causal"), (Tiles(128, 64), "any")]
)
def test_plain_attention_with_other_tiles(tiles, mask, monkeypatch):
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [tiles])
    search_plain(SHAPES["wide"], mask, "each")


@pytest.mark.parametrize(
    ("shape", "mask"), slow_but([("grouped", "padding"), ("one-row", "any")], [("small", "causal"), *PAIRS])
)
def test_relative_positions(shape, mask, little_scratch, monkeypatch):
    """Positions that are distinct; tiles near and far; chunks of rows."""
    monkeypatch.setattr(kernel_flash, "_candidates", lambda *_: [Tiles(16, 16)])
    monkeypatch.setattr(kernel_plain, "CHUNK_ROWS", 32)
    _, _, _, Q, K, D = shape = SHAPES[shape]
    key_ranges, positions = mask_of(mask, shape[0], Q, K), torch.arange(K)[None]

    def attend(*tensors):
        *states, table = tensors
        relative = table, positions[:, K - Q :], positions
        return plain_attention(*states, relative=relative, key_ranges=key_ranges, scaling=0.3)

    search(attend, (*inputs(shape), torch.randn(20, D)), DECODING if Q == 1 else FLASH)


# PoPE.


@pytest.mark.parametrize(
    ("shape", "mask", "rotated", "chunks"),
    slow_but(
        [("grouped", "causal", "some", True), ("one-row", "padding", "some", False)],
        [
            *((*pair, "some", False) for pair in PAIRS),
            *((shape, "packed", "all", False) for shape in ("grouped", "one-row")),
            *((shape, "causal", "unshifted", False) for shape in ("grouped", "one-row")),
            *(("grouped", mask, "some", True) for mask in ("causal", "any")),
        ],
    ),
)
def test_pope(shape, mask, rotated, chunks, request):
    """All channels rotated or some, with a shift or without; in one part or a part for each key head."""
    shape = B, H, _, Q, K, D = SHAPES[shape]
    if chunks:
        request.getfixturevalue("little_scratch")
    R = D if rotated == "all" else D // 2 - 1
    key_ranges = mask_of(mask, shape[0], *shape[3:5])
    # Tables of all batch entries, or of each.
    phases = torch.rand(B if rotated == "some" else 1, K, R) * 6
    cos, sin = phases.cos(), phases.sin()

    def attend(query, key, value, shift):
        tables = (cos[:, K - Q :], sin[:, K - Q :], cos, sin, shift)
        return pope_attention(query, key, value, tables, key_ranges=key_ranges, scaling=0.3)

    shift = None if rotated == "unshifted" else -2 * math.pi * torch.rand(H, R)
    search(attend, (*inputs(shape), shift), DECODING if Q == 1 else POPE)


# CoPE.


def search_cope(shape, mask, gates, openness, dtype=torch.float32):
    """gates: "keys", "values", or "own": keys of their own, a query of its own for the table, and a decay.

    With values there are also relative positions.
    """
    B, H, _, Q, K, D = shape
    numbers = -torch.rand(B, H, K).cumsum(-1).double()
    decay = (numbers[..., K - Q :], numbers) if gates == "own" else None
    query, key, value = inputs(shape, dtype)
    own = [torch.randn_like(key), torch.randn_like(query)] if gates == "own" else [None, None]
    # One channel that all share opens and closes the gates.
    query[..., 0] = 4.0
    for gating in {"keys": [key], "values": [value], "own": own[:1]}[gates]:
        gating[..., 0] = openness
    key_ranges = mask_of(mask, shape[0], *shape[3:5])

    positions = torch.arange(K)[None]

    def attend(query, key, value, table, gate_key, position_query, embeddings):
        options = {"gate_key": value if gates == "values" else gate_key, "position_query": position_query}
        options["decay"] = decay
        if embeddings is not None:
            options["relative"] = embeddings, positions[:, K - Q :], positions
        return cope_attention(
            query, key, value, table, **options, key_ranges=key_ranges, scaling=0.25, position_scale=0.25
        )

    kernels = DECODING | {"_position_values", "_window_forward"} if shape[3] == 1 else COPE
    embeddings = torch.randn(20, D) if gates == "values" else None
    search(attend, (query, key, value, torch.randn(D, 37), *own, embeddings), kernels)


@pytest.fixture
def narrow(monkeypatch):
    """Several blocks of rows and keys in short inputs."""
    monkeypatch.setattr(kernel_cope, "WINDOW_ROWS", 32)
    tiles = kernel_cope._WindowTiles([Tiles(32, 16)], [Tiles(32, 16)], [Tiles(32, 32)])
    monkeypatch.setattr(kernel_cope, "_window_tiles", lambda *_: tiles)


@pytest.mark.parametrize(
    ("shape", "mask", "gates", "openness"),
    slow_but(
        [("small", "causal", "keys", 12.0), ("one-row", "packed", "own", 0.0)],
        [
            *((*pair, "own", 0.0) for pair in PAIRS),
            *(("small", mask, "keys", openness) for mask, openness in (("packed", -12.0), ("causal", 12.0))),
            *(("one-row", "packed", kind, openness) for kind, openness in (("own", 0.0), ("keys", 12.0))),
            *(("grouped", mask, "values", openness) for mask, openness in (("any", 0.0), ("packed", 12.0))),
            ("one-row", "any", "values", 12.0),
        ],
    ),
)
def test_cope(shape, mask, gates, openness, narrow):
    """Gates from closed to open: windows from all keys to a few."""
    search_cope(SHAPES[shape], mask, gates, openness)


@pytest.mark.parametrize(
    ("shape", "mask", "gates", "openness"),
    slow_but(
        [("small", "padding", "own", 0.0)],
        [
            *(("small", mask, "own", 0.0) for mask in ("padding", "any")),
            ("small", "packed", "values", 12.0),
            *(("square", mask, "keys", openness) for mask, openness in (("causal", -12.0), ("packed", 12.0))),
        ],
    ),
)
def test_cope_in_chunks(shape, mask, gates, openness, narrow, little_scratch):
    """The scratch memory of a chunk of rows is used again by the next."""
    search_cope(SHAPES[shape], mask, gates, openness)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "mask"), [(torch.float32, "packed"), (torch.bfloat16, "causal")])
def test_cope_with_its_own_tiles(dtype, mask, little_scratch):
    search_cope((1, 4, 2, 100, 150, 20), mask, "own", 0.0, dtype)


def test_all_kernels_are_searched():
    launched = {entry[0].fn.__name__ for entries in variants().values() for entry in entries}
    assert launched == COPE | POPE | DECODING


# Planted defects, and what is right beside them.


@triton.jit
def copy(source, target, BLOCK: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr):
    """Program i copies the BLOCK elements from FIRST + i * STEP on."""
    at = FIRST + tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


@triton.jit
def copy_masked(source, target, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < n), mask=at < n)


@triton.jit
def add_all(source, total, BLOCK: tl.constexpr):
    tl.atomic_add(total, tl.sum(tl.load(source + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))))


@triton.jit
def add_and_read(source, total, copied, BLOCK: tl.constexpr):
    tl.atomic_add(total, tl.sum(tl.load(source + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))))
    tl.debug_barrier()
    tl.store(copied + tl.program_id(0), tl.load(total))


@triton.jit
def through_memory(source, memory, target, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """Reverses a block by way of memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(memory + at, tl.load(source + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(target + at, tl.load(memory + tl.program_id(0) * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)))


@triton.jit
def reverse(data, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """In place."""
    at = tl.arange(0, BLOCK)
    read = tl.load(data + at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(data + BLOCK - 1 - at, read)


@triton.jit
def store_twice(data, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    """A level for each element, then another for the first."""
    tl.store(data + tl.arange(0, BLOCK), tl.full([BLOCK], 1.0, tl.float32))
    if BARRIER:
        tl.debug_barrier()
    tl.store(data, 2.0)


@triton.jit
def scatter(source, target, DIVISOR: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at // DIVISOR, tl.load(source + at))


@triton.jit
def sum_pair(pair, target, BLOCK: tl.constexpr):
    """The sum of two tensors in a tuple."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(pair.data + at) + tl.load(pair.row + at))


def found(kernel, grid, *arguments, **constants):
    """The kind, argument and programs of each finding."""
    with checked() as report:
        kernel[(grid,)](*arguments, **constants)
    assert report.programs == {kernel.fn.__name__: grid}
    return [(one.kind, one.argument, tuple(x for x, _, _ in one.programs)) for one in report.findings]


def numbers(count=64):
    return torch.arange(count, dtype=torch.float32)


def test_two_programs_write():
    copy_blocks = functools.partial(found, copy, 3, numbers(), torch.zeros(64), BLOCK=16, FIRST=0)
    assert copy_blocks(STEP=16) == []
    assert copy_blocks(STEP=15) == [(PROGRAMS, "target", (0, 1))]


def test_a_program_reads_what_another_writes():
    memory = numbers()
    for first, second in [(memory[16:], memory), (memory, memory[16:])]:
        # In one order the reader comes first, in the other the writer.
        ((kind, argument, programs),) = found(copy, 2, first, second, BLOCK=16, STEP=16, FIRST=0)
        assert (kind, argument, programs) == (PROGRAMS, "source or target", (0, 1))
    assert found(copy, 2, memory, memory, BLOCK=16, STEP=16, FIRST=0) == []


def test_atomics():
    assert found(add_all, 4, numbers(), torch.zeros(1), BLOCK=16) == []
    findings = found(add_and_read, 4, numbers(), torch.zeros(1), torch.zeros(4), BLOCK=16)
    # The load is before another program's atomic, and after it.
    assert findings == [(PROGRAMS, "total", (0, 1))] * 2


def test_a_store_and_a_load_without_a_barrier():
    tensors = (numbers(), torch.empty(64), torch.empty(64))
    assert found(through_memory, 2, *tensors, BARRIER=True, BLOCK=32) == []
    assert torch.equal(tensors[2][:32], tensors[0][:32].flip(0))
    assert found(through_memory, 2, *tensors, BARRIER=False, BLOCK=32) == [(BARRIER, "memory", (0,))]


def test_a_load_and_a_store_by_another_lane_without_a_barrier():
    assert found(reverse, 1, numbers(16), BARRIER=True, BLOCK=16) == []
    assert found(reverse, 1, numbers(16), BARRIER=False, BLOCK=16) == [(BARRIER, "data", (0,))]


def test_two_stores_without_a_barrier():
    assert found(store_twice, 1, numbers(16), BARRIER=True, BLOCK=16) == []
    assert found(store_twice, 1, numbers(16), BARRIER=False, BLOCK=16) == [(BARRIER, "data", (0,))]


def test_lanes_of_one_store():
    assert found(scatter, 1, numbers(16), numbers(16), DIVISOR=1, BLOCK=16) == []
    assert found(scatter, 1, numbers(16), numbers(16), DIVISOR=2, BLOCK=16) == [(LANES, "target", (0,))]
    # The same value.
    assert found(scatter, 1, torch.full((16,), math.nan), numbers(16), DIVISOR=2, BLOCK=16) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64])
def test_memory_that_nothing_was_written_to(dtype):
    """Written to by PyTorch, and by a kernel; the elements that a mask excludes are not read."""
    with checked() as report:
        scratch, target = torch.empty(64, dtype=dtype), torch.zeros(64, dtype=dtype)
        copy_masked[(4,)](target, scratch, 40, BLOCK=16)
        copy_masked[(4,)](scratch, target, 40, BLOCK=16)
        assert not report.findings
        copy_masked[(4,)](scratch, target, 41, BLOCK=16)
        ((kind, argument, element, programs),) = (
            (one.kind, one.argument, one.element, one.programs) for one in report.findings
        )
        assert (kind, argument, element, programs) == (UNWRITTEN, "source", 40, ((2, 0, 0),))
        report.findings.clear()
        copy_masked[(4,)](torch.empty_like(scratch).zero_(), target, 64, BLOCK=16)
        copy_masked[(4,)](scratch.new_empty(64).fill_(3), target, 64, BLOCK=16)
        assert not report.findings


def test_outside_of_a_tensor():
    copy_blocks = functools.partial(found, copy, 2, BLOCK=16, STEP=16)
    # A load and a store each.
    assert copy_blocks(numbers(32), torch.zeros(33), FIRST=0) == []
    assert copy_blocks(numbers(31), torch.zeros(32), FIRST=0) == [(OUTSIDE, "source", (1,))]
    assert copy_blocks(numbers(32), torch.zeros(31), FIRST=0) == [(OUTSIDE, "target", (1,))]
    assert copy_blocks(numbers(32), torch.zeros(32), FIRST=-1) == [
        (OUTSIDE, "source", (0,)),
        (OUTSIDE, "target", (0,)),
    ]
    # The memory belongs to another tensor of the launch, and to the storage, but not to the argument.
    whole = numbers(96)
    assert copy_blocks(whole[:31], whole[64:], FIRST=0) == [(OUTSIDE, "source", (1,))]
    assert copy_blocks(whole[::2][:32], torch.zeros(32), FIRST=0) == [(OUTSIDE, "source", (0,))]


def test_tensors_in_named_tuples():
    pair = kernel_launch.Heads(numbers(32), 5, None, numbers(31))
    assert found(sum_pair, 2, pair, torch.zeros(32), BLOCK=16) == [(OUTSIDE, "pair.row", (1,))]


def test_report():
    with checked() as report:
        copy[(2,)](numbers(31), torch.zeros(32), BLOCK=16, STEP=16, FIRST=0)
    line = copy.fn.__code__.co_firstlineno + 4
    expected = f"copy: outside: load: source[31], program (1, 0, 0) (test_kernel_races.py:{line} in copy)"
    assert str(report) == expected
