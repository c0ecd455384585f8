"""Dropout of attention weights in the Triton kernels, run by Triton's interpreter.

Where the values are the identity, the output is the weights, and shows which of them are dropped.
"""

import pytest
import torch

pytest.importorskip("triton")

from tiny import slow_but
from whatwhere import kernel_flash, kernel_launch, kernel_plain, kernel_pope
from whatwhere.kernel_cope import cope_attention
from whatwhere.kernel_plain import plain_attention
from whatwhere.kernel_pope import pope_attention
from whatwhere.scripts.benchmark.references import cope_reference, plain_reference, pope_reference, undecided_rows

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

B, H, G, T = 2, 2, 1, 80
ROWS = torch.arange(T)
SCALING = T**-0.5


def random(*shape):
    return torch.randn(*shape, requires_grad=True)


def small_table():
    return (torch.randn(T, 8) / 10).requires_grad_()


def plain():
    return plain_attention, plain_reference, [], {}


def decayed():
    rows = -torch.arange(T).expand(1, H, T) / 10
    keys = rows.expand(B, H, T).clone().requires_grad_()

    def reference(query, key, value, keys, *, rows, scaling):
        # c_i - c_j as another pair of channels.
        c = -torch.arange(T, dtype=query.dtype) / 10
        query = query.repeat_interleave(H // query.shape[1], 1) * scaling
        key = key.repeat_interleave(H // key.shape[1], 1)
        ones = torch.ones(B, H, T, 1, dtype=query.dtype)
        query = torch.cat((query, c.expand(B, H, T)[..., None], ones), -1)
        key = torch.cat((key, ones, -keys[..., None]), -1)
        return plain_reference(query, key, value, rows=ROWS, scaling=1.0)

    def kernel(query, key, value, keys, **options):
        return plain_attention(query, key, value, decay=(rows, keys), **options)

    return kernel, reference, [keys], {}


def pope():
    phases = torch.arange(T)[None, :, None] * 0.5 ** torch.arange(T // 2)
    tables = (phases.cos(), phases.sin()) * 2

    def kernel(query, key, value, shift, **options):
        return pope_attention(query, key, value, (*tables, shift), **options)

    return kernel, pope_reference, [random(H, T // 2)], {"tables": tables}


def cope_kernel(query, key, value, table, gate_key=None, **options):
    return cope_attention(query, key, value, table, gate_key=gate_key, position_scale=1.0, **options)


def cope():
    return cope_kernel, cope_reference, [small_table()], {}


def cope_separate():
    return cope_kernel, cope_reference, [small_table(), random(B, G, T, T)], {}


def with_distances(query, key, embeddings):
    """Queries and keys, further channels of which have q.e[distance] as their product."""
    distance = (ROWS[:, None] - ROWS).clamp(0, len(embeddings) - 1)
    products = (query @ embeddings.T).gather(-1, distance.expand(B, H, T, T))
    return torch.cat((query, products), -1), torch.cat((key, torch.eye(T).to(key).expand(B, G, T, T)), -1)


def relative():
    def kernel(query, key, value, embeddings, **options):
        return plain_attention(query, key, value, relative=(embeddings, ROWS[None], ROWS[None]), **options)

    def reference(query, key, value, embeddings, *, rows, scaling):
        return plain_reference(*with_distances(query, key, embeddings), value, rows=rows, scaling=scaling)

    return kernel, reference, [random(20, T)], {}


def cope_relative():
    def kernel(query, key, value, table, gate_key, embeddings, **options):
        return cope_kernel(query, key, value, table, gate_key, relative=(embeddings, ROWS[None], ROWS[None]), **options)

    def reference(query, key, value, table, gate_key, embeddings, **options):
        pair = with_distances(query, key, embeddings)
        gate_key, table = torch.cat((gate_key, 0 * gate_key), -1), torch.cat((table, 0 * table))
        return cope_reference(*pair, value, table, gate_key, **options)

    return kernel, reference, [small_table(), random(B, G, T, T), random(20, T)], {}


KINDS = {kind.__name__: kind for kind in (plain, decayed, pope, cope, cope_separate, relative, cope_relative)}


@pytest.mark.parametrize("name", slow_but(["decayed", "pope", "cope"], KINDS))
def test_gradients_are_those_of_the_dropped_weights(name, monkeypatch):
    """Forward and backward pass, windows and plain part, and all parts of PoPE drop the same weights."""
    for module in (kernel_pope, kernel_flash):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(kernel_flash, "SCRATCH_FACTOR", 0)
    monkeypatch.setattr(kernel_plain, "CHUNK_ROWS", 32)
    torch.manual_seed(3)
    kernel, formula, own, fixed = KINDS[name]()
    query, key, value = random(B, H, T, T), random(B, G, T, T), random(B, G, T, T)
    identity = torch.eye(T).expand(B, G, T, T).contiguous()

    def run(value, dropout):
        torch.manual_seed(5)
        return kernel(query, key, value, *own, scaling=SCALING, dropout=dropout)

    weights = run(identity, 0.0).detach()
    kept = (run(identity, 0.3).detach() / weights.where(weights > 0, 1.0)).double()
    assert 0.6 < kept[weights > 0].gt(0).double().mean() < 0.8
    torch.testing.assert_close(kept[kept > 0], torch.full_like(kept[kept > 0], 1 / 0.7), rtol=1e-4, atol=0)

    inputs = [query, key, value, *own]
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected_weights = formula(*exact[:2], identity.double(), *exact[3:], rows=ROWS, scaling=SCALING, **fixed)
    expected = (expected_weights * kept) @ exact[2].repeat_interleave(H // G, 1)
    grad = torch.randn(B, H, T, T)
    if name.startswith("cope"):
        gates = [one.detach() for one in exact[4:5]]
        near = undecided_rows(exact[0].detach(), exact[1].detach(), *gates, rows=ROWS, scaling=SCALING, num_positions=8)
        grad[near] = 0
    found = run(value, 0.3)
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
