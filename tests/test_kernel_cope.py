"""The CoPE kernels, run by Triton's interpreter, against full-matrix CoPE in float64: outputs and every gradient."""

import itertools
import math

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from compile_kernels import recording
from oracles import contextual_positions_of_all
from tiny import check_operator, slow_but
from whatwhere import kernel_cope
from whatwhere.attention_mask import dense_mask
from whatwhere.kernel_cope import cope_attention
from whatwhere.kernel_flash import flash_backward, flash_forward, row_products
from whatwhere.kernel_launch import INTERPRETED, Tiles

pytestmark = pytest.mark.usefixtures("on_device")

SHIPPED_TILES = kernel_cope._window_tiles


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch):
    """The interpreter takes as long for a small tile as for a large one."""
    if not INTERPRETED:
        return
    monkeypatch.setattr(kernel_cope, "_window_tiles", lambda *_: kernel_cope._WindowTiles(*[[Tiles(64, 64)]] * 3))


def causal_limits(batch, rows, keys, low=None, valid=None):
    """`key_ranges` (B, 1, Q + K, 2) of causal rows at the end of the keys; low (B, Q), valid (B, K)."""
    high = torch.arange(keys - rows + 1, keys + 1).expand(batch, rows)
    low = torch.zeros(batch, rows, dtype=torch.long) if low is None else low
    valid = torch.ones(batch, keys, dtype=torch.bool) if valid is None else valid
    own = valid[:, keys - rows :]
    high = torch.where(own, high, low)
    head = torch.stack([low, high], -1)
    tail = torch.stack([valid.long(), torch.zeros_like(valid.long())], -1)
    return torch.cat([head, tail], 1)[:, None].int()


def reference(
    query,
    key,
    value,
    table,
    gate_key=None,
    position_query=None,
    embeddings=None,
    decay=None,
    places=None,
    key_ranges=None,
    scaling=0.25,
    position_scale=0.25,
):
    H, Q = query.shape[1:3]
    K, groups = key.shape[2], H // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    content = query @ key.transpose(2, 3) * scaling
    gate_logits = content
    if gate_key is not None:
        gate_logits = query @ gate_key.repeat_interleave(groups, 1).transpose(2, 3) * scaling
    causal = torch.ones(Q, K, dtype=torch.bool).tril(K - Q)[None, None]
    mask = causal if key_ranges is None else dense_mask(key_ranges, Q)
    gates = torch.sigmoid(gate_logits).masked_fill(~mask, 0)
    last = table.shape[1] - 1
    positions = contextual_positions_of_all(gates, last)
    z = (query if position_query is None else position_query) @ table * position_scale
    # NaN is no index.
    floor = positions.detach().long().clamp(0, last)
    below, above = z.gather(-1, floor), z.gather(-1, (floor + 1).clamp(max=last))
    logits = content + below + (positions - floor) * (above - below)
    if embeddings is not None:
        distance = (places[0][:, :, None] - places[1][:, None]).clamp(0, len(embeddings) - 1)[:, None]
        bias = (query @ embeddings.T * scaling).gather(-1, distance.expand(query.shape[0], H, Q, K))
        logits = logits + bias
    if decay is not None:
        logits = logits + (decay[0][..., None] - decay[1][:, :, None]).clamp(max=0)
    weights = torch.softmax(logits.masked_fill(~mask, -1e30), -1) * mask
    return weights @ value


def inputs(batch, heads, groups, rows, keys, channels, positions=16, openness=0.0, separate=False, dtype=torch.float32):
    """Random query, key, value, table and, if separate, gate keys. `openness` shifts all gates' logits."""
    query, key = torch.randn(batch, heads, rows, channels), torch.randn(batch, groups, keys, channels)
    gate_key = torch.randn(batch, groups, keys, channels) if separate else None
    # One channel that all share.
    query[..., 0] = 4.0
    for gating in (key, gate_key):
        if gating is not None:
            gating[..., 0] = openness
    value, table = torch.randn(batch, groups, keys, channels), torch.randn(channels, positions)
    tensors = (query, key, value, table, gate_key)
    return [None if one is None else one.to(dtype).requires_grad_() for one in tensors]


def compare(
    tensors,
    key_ranges=None,
    tolerance=2e-5,
    scaling=0.25,
    position_scale=0.25,
    position_query=None,
    decay=None,
    embeddings=None,
    positions=None,
):
    """Compares the output and every gradient with the float64 reference."""
    options = {"key_ranges": key_ranges, "scaling": scaling, "position_scale": position_scale, "decay": decay}
    tensors = [*tensors, position_query, embeddings]
    *main, gate_key, _, _ = tensors
    relative = None if embeddings is None else (embeddings, *positions)
    out = cope_attention(*main, gate_key=gate_key, position_query=position_query, relative=relative, **options)
    # One tensor may have two roles.
    exact = {id(one): one.detach().double().requires_grad_() for one in tensors if one is not None}
    roles = [None if one is None else exact[id(one)] for one in tensors]
    expected = reference(*roles, **options, places=positions)
    grad = torch.randn(out.shape)
    present = list({id(one): one for one in tensors if one is not None}.values())
    found = [out, *torch.autograd.grad(out, present, grad.to(out.dtype))]
    wanted = [expected, *torch.autograd.grad(expected, list(exact.values()), grad.double())]
    names = ["out", "dq", "dk", "dv", "dtable", *(["dgate_key"] if gate_key is not None else []), "dposition_query"]
    names[-1:] = names[-1:] * (position_query is not None) + ["dembeddings"]
    for name, ours, truth in zip(names, found, wanted):
        error = (ours.double() - truth).norm() / torch.maximum(truth.norm(), 0.1 * grad.norm())
        assert error <= tolerance, f"{name}: {error:.2g}"


# Every kind of gates with a short length; the other pairs are slow.
@pytest.mark.parametrize(
    ("rows", "keys", "openness"),
    slow_but(
        [(1, 1, 0.0), (63, 63, -2.0), (63, 63, 12.0), (100, 257, -12.0)],
        [
            *((1, 1, 0.0), (63, 63, -2.0), (63, 63, 12.0), (100, 257, -12.0)),
            *((100, 257, 0.0), (257, 257, -2.0), (257, 257, 12.0)),
        ],
    ),
)
def test_output_and_gradients(rows, keys, openness):
    """Lengths that are no multiple of a block; windows from one block to the whole row."""
    compare(inputs(1, 2, 2, rows, keys, 16, openness=openness))


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "dtype", "tolerance"), [(128, torch.float32, 2e-5), (16, torch.bfloat16, 2e-2)])
def test_shipped_tiles(monkeypatch, channels, dtype, tolerance):
    monkeypatch.setattr(kernel_cope, "_window_tiles", SHIPPED_TILES)
    tensors = inputs(1, 2, 1, 90, 110, channels, openness=-1.0, dtype=dtype)
    compare(tensors, tolerance=tolerance, scaling=0.1, position_scale=0.1)


@pytest.mark.parametrize("openness", [-12.0, 12.0])
def test_tiles_of_different_width(monkeypatch, openness):
    """The forward pass and the rows walk narrower blocks of keys than the columns, whose edges they leave."""
    tiles = kernel_cope._WindowTiles([Tiles(64, 16)], [Tiles(64, 16)], [Tiles(64, 32)])
    monkeypatch.setattr(kernel_cope, "_window_tiles", lambda *_: tiles)
    tensors = inputs(1, 1, 1, 60, 123, 16, openness=openness)
    compare(tensors)
    # The oldest key is in the upper half of a block.
    compare(tensors, causal_limits(1, 60, 123, low=torch.full((1, 60), 50)))


def test_small_gates_and_a_long_table():
    """A gate of 1/20,000 counts, however many positions there are."""
    compare(inputs(1, 1, 1, 8, 150, 16, positions=2**14, openness=-10.0))


def padded_and_packed(rows, keys):
    """Limits of three batch entries: left padding and a hole, right padding, and documents that begin at 40 and 90."""
    valid = torch.ones(3, keys, dtype=torch.bool)
    valid[0, :13] = valid[0, 70:75] = False
    valid[1, keys - 11 :] = False
    low = torch.zeros(3, rows, dtype=torch.long)
    low[0] = 13
    slots = torch.arange(keys - rows, keys)
    low[2] = torch.where(slots >= 90, 90, torch.where(slots >= 40, 40, 0))
    return causal_limits(3, rows, keys, low, valid)


@pytest.mark.parametrize(
    ("rows", "keys", "openness"),
    slow_but([(30, 110, 0.0)], itertools.product((110, 30), (110,), (-12.0, 0.0))),
)
def test_padding_holes_and_documents(rows, keys, openness):
    """Keys that a row does not see are not counted; rows that see nothing give 0."""
    key_ranges = padded_and_packed(rows, keys)
    tensors = inputs(3, 2, 1, rows, keys, 16, openness=openness)
    compare(tensors, key_ranges)
    if rows == keys:
        out = cope_attention(*tensors[:4], key_ranges=key_ranges, scaling=0.25, position_scale=0.25)
        assert out[0, :, :13].abs().max() == 0
        assert out[1, :, -11:].abs().max() == 0


def test_rows_that_see_the_future():
    """Limits need not be causal."""
    key_ranges = causal_limits(1, 40, 100)
    key_ranges[:, :, :40, 1] = 100
    compare(inputs(1, 2, 2, 40, 100, 16), key_ranges)


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "positions"), [(16, 2), (40, 33), (128, 300), (256, 8)])
def test_widths(channels, positions):
    """Head dims and tables that are no power of two; more positions than keys."""
    compare(inputs(1, 2, 2, 70, 70, channels, positions), scaling=0.1, position_scale=0.1)


@pytest.mark.parametrize("gates", ["separate", "value"])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "rows", "keys"),
    slow_but([(1, 2, 1, 30, 100)], [(1, 2, 1, 30, 100), (2, 4, 2, 70, 100)]),
)
def test_gates_of_their_own(gates, batch, heads, groups, rows, keys):
    tensors = inputs(batch, heads, groups, rows, keys, 16, separate=True)
    if gates == "value":
        tensors[4] = tensors[2]
    compare(tensors)
    compare(tensors, padded_and_packed(rows, keys)[:batch])


@pytest.mark.parametrize(("openness", "separate"), slow_but([(0.0, True)], [(-2.0, False), (0.0, True), (12.0, False)]))
def test_a_query_of_its_own_for_the_table(openness, separate):
    """As RoPE needs it; the two queries get a gradient each."""
    tensors = inputs(1, 2, 1, 30, 110, 16, openness=openness, separate=separate)
    # Strided as a projection leaves it.
    position_query = torch.randn(1, 30, 2, 16).transpose(1, 2).requires_grad_()
    compare(tensors, position_query=position_query)
    compare(tensors, padded_and_packed(30, 110)[:1], position_query=position_query)
    same = [one.detach().requires_grad_() for one in tensors[:4]]
    compare([*same, None], position_query=same[0])


def documents_of_30(rows, keys):
    """Limits of three batch entries with documents of 30 keys, with padding in two of them."""
    low = torch.arange(keys - rows, keys) // 30 * 30
    valid = torch.ones(3, keys, dtype=torch.bool)
    valid[0, 30:33] = valid[0, 65:] = valid[1, 58:] = False
    return causal_limits(3, rows, keys, low.repeat(3, 1), valid)


def decay_of(batch, heads, rows, keys):
    """Slopes times positions far from 0: the differences need more digits than float32 has."""
    numbers = -torch.rand(1, heads, 1).double() * (torch.arange(keys).repeat(batch, 1, 1) + 10**7)
    return numbers[..., keys - rows :], numbers


@pytest.mark.parametrize(
    ("rows", "keys", "openness", "separate", "dtype"),
    slow_but(
        [(33, 70, 0.0, False, torch.float32)],
        [
            *((5, 5, 0.0, False, torch.float32), (33, 70, 0.0, False, torch.float32)),
            *((70, 70, openness, False, torch.float32) for openness in (-12.0, 12.0)),
            (70, 70, 0.0, True, torch.float32),
            (33, 70, 0.0, False, torch.bfloat16),
        ],
    ),
)
def test_decay(rows, keys, openness, separate, dtype):
    """Added to the logits, not to the gates; in the windows and left of them."""
    tensors = inputs(3, 4, 2, rows, keys, 16, openness=openness, separate=separate, dtype=dtype)
    decay = decay_of(3, 4, rows, keys)
    key_ranges = None
    if keys == 70:
        key_ranges = documents_of_30(rows, keys)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    compare(tensors, key_ranges, decay=decay, tolerance=tolerance)
    compare(
        [one if one is None else one[:1].detach().requires_grad_() for one in tensors[:3]] + tensors[3:4] + [None],
        decay=[one[:1] for one in decay],
        tolerance=tolerance,
    )


@pytest.mark.parametrize(
    ("rows", "keys", "openness", "separate", "dtype", "chunks"),
    slow_but(
        [(33, 70, 0.0, False, torch.float32, False)],
        [
            *((5, 5, 0.0, False, torch.float32, False), (33, 70, 0.0, False, torch.float32, False)),
            *((70, 70, openness, False, torch.float32, False) for openness in (-12.0, 12.0)),
            *((70, 100, openness, True, torch.float32, True) for openness in (0.0, 12.0)),
            (33, 70, 0.0, False, torch.bfloat16, False),
        ],
    ),
)
def test_relative_positions(rows, keys, openness, separate, dtype, chunks, request):
    """Added to the logits, not to the gates; in the windows and left of them; in chunks of rows; decoding."""
    if chunks:
        request.getfixturevalue("little_scratch")
    tensors = inputs(3, 4, 2, rows, keys, 16, openness=openness, separate=separate, dtype=dtype)
    embeddings = torch.randn(20, 16).to(dtype).requires_grad_()
    key_ranges = documents_of_30(rows, keys)
    places = torch.arange(keys) % 30 + torch.arange(3)[:, None]
    options = {"embeddings": embeddings, "tolerance": 2e-5 if dtype == torch.float32 else 2e-2}
    compare(tensors, key_ranges, positions=(places[:, keys - rows :], places), **options)
    places = torch.arange(keys)[None] + 5
    compare(tensors, positions=(places[:, keys - rows :], places), **options)
    with torch.no_grad():
        tensors = [tensors[0][:, :, -1:], *tensors[1:]]
        relative = embeddings, places[:, -1:], places
        settings = {"scaling": 0.25, "position_scale": 0.25}
        row = cope_attention(*tensors[:4], gate_key=tensors[4], relative=relative, **settings)
        exact = [None if one is None else one.double() for one in (*tensors, None, embeddings)]
        expected = reference(*exact, places=relative[1:])
        assert (row - expected).norm() / expected.norm() < options["tolerance"]


def test_scale_of_positions_is_its_own():
    compare(inputs(1, 1, 1, 40, 40, 16), scaling=0.2, position_scale=1.0)


@pytest.mark.parametrize(
    ("openness", "heads", "rows", "keys"),
    slow_but([(0.0, 1, 70, 90)], [(0.0, 1, 70, 90), (-4.0, 2, 257, 300), (0.0, 2, 257, 300)]),
)
def test_chunks_of_rows(little_scratch, openness, heads, rows, keys):
    """A small budget for scratch memory changes nothing but the number of passes."""
    tensors = inputs(1, heads, 1, rows, keys, 16, openness=openness)
    assert kernel_cope._Pass([*tensors[:4], *[None] * 9], 1.0, 1.0).chunk == kernel_cope.WINDOW_ROWS
    compare(tensors)


def test_windows_end_where_positions_do():
    """With open gates a window is as long as the table, not as the row; with closed gates it is the row."""
    query, key, value, table, _ = inputs(1, 1, 1, 257, 257, 16, positions=16, openness=12.0)
    window = kernel_cope._Pass([query, key, value, table, *[None] * 9], 0.25, 0.25).window_forward()
    first_rows = torch.arange(0, 257, kernel_cope.WINDOW_ROWS)
    assert (first_rows - window.start[0, 0] <= 16 + kernel_cope.MOST_COLUMNS.value).all()
    key = key.detach().clone()
    key[..., 0] = -12.0
    window = kernel_cope._Pass([query, key, value, table, *[None] * 9], 0.25, 0.25).window_forward()
    assert (window.start == 0).all()


@pytest.mark.parametrize("dtype", slow_but([torch.bfloat16], [torch.bfloat16, torch.float16]))
def test_low_precision(dtype):
    """The error is that of rounding, not of contextual positions in low precision."""
    tensors = inputs(1, 2, 1, 130, 130, 16, positions=64, openness=1.0, dtype=dtype)
    compare(tensors, tolerance=2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_float32_table_with_bfloat16_queries():
    """Autocast: the table is used as it is, not rounded."""
    tensors = inputs(1, 2, 1, 70, 70, 16, positions=64, dtype=torch.bfloat16)
    tensors[3] = torch.randn(16, 64, requires_grad=True)
    values = torch.empty(2, 128, 64, 2)
    kernel_cope._Pass([*tensors[:4], *[None] * 9], 0.25, 0.25).position_values(0, values)
    exact = tensors[0].double()[0] @ tensors[3].double() * 0.25
    steps = torch.cat([exact[..., 1:] - exact[..., :-1], torch.zeros_like(exact[..., :1])], -1)
    found = values[:, :70] * math.log(2)
    assert (found - torch.stack([exact, steps], -1)).norm() / exact.norm() < 1e-4
    compare(tensors, tolerance=2e-2)


# Each kind of gates once; the other pairs are slow.
@pytest.mark.parametrize(
    ("openness", "separate", "rotated"),
    slow_but(
        [(0.0, False, False), (12.0, True, False), (-12.0, False, True)],
        [
            *((0.0, False, False), (12.0, True, False), (-12.0, False, True)),
            *((12.0, False, False), (0.0, True, False)),
        ],
    ),
)
def test_decoding(openness, separate, rotated):
    """One row, without gradients: its own kernels, over splits of the keys."""
    with torch.no_grad():
        tensors = inputs(3, 4, 2, 1, 257, 16, openness=openness, separate=separate)
        tensors.append(torch.randn(3, 4, 1, 16) if rotated else None)
        key_ranges, decay = padded_and_packed(1, 257), decay_of(3, 4, 1, 257) if rotated else None
        for bounds in (None, key_ranges):
            options = {"key_ranges": bounds, "scaling": 0.25, "position_scale": 0.25, "decay": decay}
            out = cope_attention(*tensors[:4], gate_key=tensors[4], position_query=tensors[5], **options)
            exact = [None if one is None else one.double() for one in tensors]
            expected = reference(*exact, decay=decay, key_ranges=bounds)
            assert (out - expected).norm() / expected.norm() < 2e-5


def test_strides():
    """Heads as a model projects them, and values with channels that are not side by side."""
    query, key, value, table, _ = inputs(2, 2, 2, 40, 40, 16)
    apart = [one.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for one in (query, key)]
    value = value.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    compare([*apart, value, table, None])


@pytest.fixture
def visited(monkeypatch):
    """The fixed-point positions at which z was read, in units of the last place; each read adds a tensor."""
    if not INTERPRETED:
        pytest.skip("looks into the interpreter: TRITON_INTERPRET=1")
    found, interpolate = [], kernel_cope._interpolate

    def recorded(z, level, position):
        levels = torch.from_numpy(level.handle.data)
        found.append(levels[:, None].long() * 2**21 + torch.from_numpy(position.handle.data))
        return interpolate(z, level, position)

    monkeypatch.setattr(kernel_cope, "_interpolate", recorded)
    return found


def within(visited, last):
    """Returns whether there are positions, and all are in the table."""
    positions = torch.cat([one.flatten() for one in visited])
    return len(positions) > 0 and positions.min() >= 0 and positions.max() <= last << 21


@pytest.mark.parametrize("shift", [-3, 3])
def test_backward_with_gates_of_another_rounding(shift, visited, monkeypatch):
    """The newest gates closed, the rest open: where all of the count is taken away, nothing is left, or less."""
    query, key, value, table, _ = inputs(1, 1, 1, 8, 70, 16, openness=1.0)
    with torch.no_grad():
        key[..., 40:, 0] = -40.0
    backward = kernel_cope._Pass.window_backward

    def shifted(self, grad, delta, window):
        assert (window.total > 10 << 21).all()
        return backward(self, grad, delta, window._replace(total=window.total + shift))

    monkeypatch.setattr(kernel_cope._Pass, "window_backward", shifted)
    compare([query, key, value, table, None], tolerance=1e-4)
    assert within(visited, 15)


# NumPy warns of sums and products that are not finite.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("where", "number"),
    slow_but(
        [("query", math.inf), ("key", math.nan), ("table", math.nan), ("gate_key", math.nan), ("gate_key", math.inf)],
        itertools.product(("query", "key", "table", "gate_key"), (math.nan, math.inf)),
    ),
)
def test_what_is_not_finite_reaches_output_and_gradients(where, number, visited):
    tensors = dict(
        zip(("query", "key", "value", "table", "gate_key"), inputs(1, 1, 1, 20, 30, 16, separate=where == "gate_key"))
    )
    with torch.no_grad():
        tensors[where].view(-1, tensors[where].shape[-1])[12 if where == "key" else 3, 2] = number
    options = {"scaling": 0.25, "position_scale": 0.25}
    out = cope_attention(**tensors, **options)
    expected = reference(**{name: None if one is None else one.double() for name, one in tensors.items()})
    # An infinite key or gate key is far away, or nowhere, and its gate is open or closed.
    assert torch.equal(out.isfinite(), expected.isfinite())
    assert not out.isfinite().all() or (number == float("inf") and where == "gate_key")
    present = [one for one in tensors.values() if one is not None]
    if not out.isfinite().all():
        assert not torch.autograd.grad(out.sum(), present)[0].isfinite().all()
    with torch.no_grad():
        row = cope_attention(
            tensors["query"][:, :, -1:], *list(tensors.values())[1:4], gate_key=tensors["gate_key"], **options
        )
    assert torch.equal(row.isfinite(), expected[:, :, -1:].isfinite())
    assert within(visited, 15)


def test_grids_of_many_heads():
    """More heads than the axes y and z of a grid have, in all kernels; nothing runs, and nothing is allocated."""

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, wide = (70_000, 1), 2**16 - 1
    query, table = meta(*heads, 64, 16), meta(16, 8)
    with recording() as launches:
        attention = kernel_cope._Pass([query, query, query, table, *[None] * 9], 0.25, 0.25)
        window = attention.window_forward()
        attention.window_backward(query, meta(*heads, 64), window)
        row = meta(*heads, 1, 16)
        kernel_cope._cope_decode([row, query, query, table, *[None] * 9], 0.25, 0.25, 0.0)
        flash_forward(query, query, query, scaling=1.0)
        flash_backward(query, query, query, query, meta(*heads, 64), meta(*heads, 64), scaling=1.0)
        row_products(query, query)
    names = {one.kernel.fn.__name__ for one in launches}
    assert names >= {"_position_values", "_window_forward", "_window_rows", "_window_columns"}
    assert names >= {"forward_kernel", "backward_rows_kernel", "backward_columns_kernel", "decode_kernel"}
    for one in launches:
        x, *others = one.grid
        assert 70_000 <= x < 2**31, one.kernel
        assert all(size <= wide for size in others), one.kernel


# Fake implementations, gradients, mutation: what torch.compile, export and FSDP rely on.
@pytest.mark.parametrize(
    ("separate", "rotated"), slow_but([(True, True)], [(True, False), (False, False), (False, True), (True, True)])
)
def test_operator(separate, rotated):
    query, key, value, table, gate_key = inputs(1, 2, 1, 20, 30, 16, separate=separate)
    position_query = torch.randn_like(query).requires_grad_() if rotated else None
    decay = decay_of(1, 2, 20, 30) if rotated else (None, None)
    tensors, nothing = [query, key, value, table, gate_key, position_query], [None] * 2
    forward, settings = kernel_cope._cope_operator.forward, (0.25, 0.25, 0.0)
    check_operator(forward, [*tensors, None], [None, None, *decay, *nothing], *settings)
    relative, *positions = torch.randn(5, 16, requires_grad=True), torch.arange(10, 30)[None], torch.arange(30)[None]
    check_operator(forward, [*tensors, relative], [*positions, None, None, *nothing], *settings)


def test_operator_of_decoding():
    query, *others = (one.detach() for one in inputs(1, 2, 1, 20, 30, 16)[:4])
    tensors = [query[:, :, :1], *others, *[None] * 3]
    check_operator(kernel_cope._cope_operator.decode, tensors, [None] * 6, 0.25, 0.25, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(1, 1, 9, 8)}, "do not fit"),
        ({"table": torch.zeros(16, 1)}, r"table=\(16, 1\) is not valid"),
        ({"table": torch.zeros(8, 4)}, r"table=\(8, 4\) is not valid"),
        ({"gate_key": torch.zeros(1, 1, 9, 8)}, r"gate_key=\(1, 1, 9, 8\)"),
        ({"position_query": torch.zeros(1, 1, 9, 16)}, r"position_query=\(1, 1, 9, 16\).*must be \(1, 1, 10, 16\)"),
        ({"position_query": torch.zeros(1, 1, 10, 16).half()}, r"position_query=.*float16.*must be .*float32"),
        ({"decay": (torch.zeros(1, 1, 9), torch.zeros(1, 1, 10))}, r"decay=\(1, 1, 9\)"),
        ({"decay": (torch.zeros(1, 1, 10), torch.zeros(1, 1, 10, requires_grad=True))}, "no gradient"),
        ({"relative": (torch.zeros(4, 8), torch.zeros(1, 10), torch.zeros(1, 10))}, r"table=\(4, 8\)"),
        ({"relative": (torch.zeros(4, 16), torch.zeros(1, 9), torch.zeros(1, 10))}, r"positions=\(1, 9\)"),
        ({"key_ranges": torch.zeros(1, 1, 20, 2)}, "key_ranges="),
        ({"scaling": 0.0}, "scaling=0.0"),
    ],
)
def test_bad_inputs(change, message):
    query, key, value, table, _ = inputs(1, 1, 1, 10, 10, 16)
    given = {"query": query, "key": key, "value": value, "table": table, "scaling": 0.25, "position_scale": 0.25}
    with pytest.raises(ValueError, match=message):
        cope_attention(**{**given, **change})
