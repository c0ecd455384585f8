"""Stick-breaking attention: specification and blockwise path against the paper's products; windows, remainders."""

import types

import pytest
import torch

import oracles
import whatwhere.attention_blockwise as blockwise
from tiny import LargestTensor, key_ranges_of, position_context
from whatwhere.position_stick_breaking import (
    HeadGroupNorm,
    StickBreaking,
    StickBreakingParameters,
    stick_breaking_attention,
)

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "value": {"remainder": "value", "inclusive": True},
    "head_bias": {"remainder": "head_bias"},
}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"remainder": "bias"}, r"\['remainder'\]='bias'.*'none', 'value', 'head_bias'"),
    ({"inclusive": 1}, r"\['inclusive'\]=1 .*bool"),
]

CONFIG = types.SimpleNamespace(hidden_size=16, num_attention_heads=4, head_dim=4, attention_weights="softmax")


def inputs(Q, K, *, B=2, H=4, G=2, D=4, logit=0.0, dtype=torch.float64):
    """Random queries, keys and values; with `logit`, one direction that all share moves all logits (at scaling 0.5)."""
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in [(B, H, Q, D), (B, G, K, D), (B, G, K, D)])
    if logit:
        query[..., 0], key[..., 0] = 2.0, logit
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_()]


def context_of(**fields):
    """A context; stick-breaking attention does not read positions."""
    return position_context(torch.zeros(1, 1, dtype=torch.long), **fields)


def oracle(query, key, value, visible, own, *, inclusive, rest=None):
    """All heads: output, weights, remainders."""
    B, H, n = *query.shape[:2], query.shape[1] // key.shape[1]

    def head(b, h):
        states = query[b, h], key[b, h // n], value[b, h // n]
        own_rest = None if rest is None else rest[b, h]
        return oracles.stick_breaking_oracle(*states, visible, own, 0.5, inclusive, own_rest)

    heads = [[head(b, h) for h in range(H)] for b in range(B)]
    return [torch.stack([torch.stack([one[part] for one in batch]) for batch in heads]) for part in range(3)]


def attention(query, key, value, **settings):
    return stick_breaking_attention(query, key, value, scaling=0.5, **settings)


def assert_same(found, expected, states, tolerance=1e-10):
    """Outputs, remainders and all gradients."""
    grads = [torch.randn_like(part) for part in expected]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    truth = torch.autograd.grad(expected, states, grads, retain_graph=True)
    for one, other in zip(torch.autograd.grad(found, states, grads), truth):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inclusive", [False, True], ids=["strict", "inclusive"])
@pytest.mark.parametrize("segments", [None, [-1, 0, 0, -1, 0, 1, 1, 1, -1]], ids=["causal", "packed-padded"])
def test_equals_the_paper(inclusive, segments):
    """All forms of a mask, at once and in blocks: outputs, weights, remainders, every gradient."""
    Q, K = 7, 9
    states = inputs(Q, K)
    visible = oracles.visible_oracle(Q, K, segments)
    own = [K - Q + i for i in range(Q)]
    out, weights, remainder = oracle(*states, visible, own, inclusive=inclusive)
    compact = key_ranges_of(segments and [segments, segments], Q)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    for mask in (compact, visible[None, None], additive[None, None], additive[None, None].half()):
        for settings in ({"direct": True}, {"direct": False, "block_size": 3}):
            *found, returned = attention(*states, mask=mask, inclusive=inclusive, **settings)
            assert_same(found, (out, remainder), states)
            if settings["direct"]:
                torch.testing.assert_close(returned, weights)
            else:
                assert returned is None


@pytest.mark.parametrize("mask_value", [float("-inf"), torch.finfo(torch.bfloat16).min, -1e4])
@pytest.mark.parametrize("direct", [True, False])
def test_own_slot_in_trees_and_static_caches(direct, mask_value):
    """With a 4D mask the own slot is the newest one seen: after it come branches, and slots that nothing fills yet."""
    # Slots 0 to 2 are cached, 3 is followed by both 4 and 5, and 6 follows 5; row 4 is padding.
    states = inputs(5, 9)
    visible = torch.zeros(5, 9, dtype=torch.bool)
    for row, seen in enumerate([[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6], []]):
        visible[row, seen] = True
    out, _, remainder = oracle(*states, visible, [3, 4, 5, 6, None], inclusive=False)
    for mask in (visible, torch.where(visible, 0.0, mask_value)):
        found = attention(*states, mask=mask[None, None], direct=direct, block_size=2)[:2]
        assert_same(found, (out, remainder), states)
        assert not found[0][:, :, 4].any()
        assert (found[1][:, :, 4] == 1).all()


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (3, 1)], ids=lambda heads: f"H{heads[0]}G{heads[1]}")
@pytest.mark.parametrize("logit", [-40.0, -6.0, 0.0, 3.0, 40.0], ids=["closed", "low", "half", "high", "open"])
def test_windows(heads, logit):
    """Blocks end where sticks are spent, and equal the whole matrix; documents and padding of other lengths too."""
    T = 150
    segments = torch.zeros(2, T, dtype=torch.long)
    segments[0, 100:] = -1
    segments[1] = torch.arange(T) // 60
    for mask in (None, key_ranges_of(segments, T), torch.rand(2, 1, T, T) < 0.7):
        states = inputs(T, T, H=heads[0], G=heads[1], logit=logit)
        expected = attention(*states, mask=mask, direct=True)[:2]
        assert_same(attention(*states, mask=mask, direct=False, block_size=16)[:2], expected, states, 1e-9)


@pytest.mark.parametrize("padded", [False, True])
def test_spent_sticks_save_work(padded, monkeypatch):
    """With logits near 0 the number of logits grows with the length, and not with its square."""
    counted = []
    content = blockwise._Attention.content

    def counting(self, block):
        found = content(self, block)
        counted.append(found.numel())
        return found

    monkeypatch.setattr(blockwise._Attention, "content", counting)
    totals = []
    for T in (1024, 2048):
        mask = key_ranges_of([0] * (T // 2) + [-1] * (T // 2), T) if padded else None
        counted.clear()
        with torch.no_grad():
            attention(*inputs(T, T, B=1, H=1, G=1, dtype=torch.float32), mask=mask)
        totals.append(sum(counted))
    # Twice as many are linear, four times as many quadratic.
    assert totals[1] < 3 * totals[0]
    assert totals[1] < 2048 * 256


@pytest.mark.parametrize("size", [50.0, 1e4, 1e8])
def test_large_logits(size):
    """Linear softplus, and nothing overflows; all weight goes to the newest key that is not closed."""
    query, key, value = inputs(6, 6, B=1, H=1, G=1, dtype=torch.float32)
    with torch.no_grad():
        query[:], key[:] = 0.0, 0.0
        query[..., 0], key[..., 0] = 1.0, 2 * torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0]) * size
    for direct in (True, False):
        out, remainder, _ = attention(query, key, value, direct=direct)
        newest = [0, 1, 1, 3, 3]
        torch.testing.assert_close(out[0, 0, 1:], value[0, 0, newest], rtol=1e-5, atol=1e-5)
        assert not out[0, 0, 0].any()
        torch.testing.assert_close(remainder[0, 0], torch.tensor([1.0, 0, 0, 0, 0, 0]), rtol=0, atol=1e-5)
        gradients = torch.autograd.grad([out, remainder], [query, key, value], [out, remainder])
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("inclusive", [False, True], ids=["strict", "inclusive"])
@pytest.mark.parametrize("remainder", ["none", "value", "head_bias"])
@pytest.mark.parametrize("blocks", [False, True], ids=["eager", "blockwise"])
def test_remainders(inclusive, remainder, blocks):
    """What `attend` returns, with the gradients of all parameters; the value is that of the new tokens."""
    Q, K = 6, 8
    layer = StickBreaking(CONFIG, StickBreakingParameters(inclusive, remainder), 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    states = inputs(Q, K)
    new_value = states[2][:, :, K - Q :]
    visible = oracles.visible_oracle(Q, K)
    rest = {"none": lambda: None, "value": lambda: new_value.repeat_interleave(2, 1)}.get(
        remainder, lambda: layer.head_bias.weight[None, :, None].expand(2, -1, Q, -1)
    )()
    expected, weights, _ = oracle(*states, visible, range(K - Q, K), inclusive=inclusive, rest=rest)
    if remainder == "head_bias":
        channels = expected.transpose(1, 2).reshape(2 * Q, 16)
        channels = torch.nn.functional.group_norm(
            channels, 4, layer.norm.weight.flatten(), layer.norm.bias.flatten(), eps=1e-5
        )
        expected = channels.view(2, Q, 4, 4).transpose(1, 2)
    settings = {"scaling": 0.5, "dropout": 0.0, "implementation": "blockwise" if blocks else "eager"}
    found, returned = layer.attend(*states, None, context_of(new_value=new_value), **settings)
    assert_same([found], [expected], [*states, *layer.parameters()])
    if blocks:
        assert returned is None
    else:
        torch.testing.assert_close(returned, weights)


def test_local_heads_take_their_own_parameters():
    """Under tensor parallelism a rank has the heads from `head_offset` on."""
    layer = StickBreaking(CONFIG, StickBreakingParameters(remainder="head_bias"), 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    query, key, value = inputs(6, 6)
    settings = {"scaling": 0.5, "dropout": 0.0, "implementation": "blockwise"}
    both, _ = layer.attend(query, key, value, None, context_of(), **settings)
    second, _ = layer.attend(query[:, 2:], key[:, 1:], value[:, 1:], None, context_of(head_offset=2), **settings)
    torch.testing.assert_close(second, both[:, 2:])


def test_dropout(monkeypatch):
    """Weights are dropped or scaled, the same ones in the backward pass; the remainder is that of all weights."""
    monkeypatch.setattr(blockwise, "CHUNK_LOGITS", 1)
    T = 70
    query, key, value = inputs(T, T, B=1, H=2, G=1, D=T)
    _, remainder, weights = attention(query, key, value, direct=True)
    units = torch.eye(T, dtype=torch.float64).expand(1, 1, T, T)
    for direct in (False, True):
        torch.manual_seed(3)
        dropped, left, _ = attention(query, key, units, dropout=0.3, direct=direct)
        keep = dropped / weights.clamp(min=1e-300)
        # In blocks, smaller weights than 2^-80 are 0.
        seen = weights > 2.0**-80
        assert abs((keep[seen] > 0).double().mean() - 0.7) < 0.05
        expected = (keep > 0.5).double() / 0.7
        torch.testing.assert_close(keep[seen], expected[seen])
        torch.testing.assert_close(left, remainder)
        torch.manual_seed(3)
        found = attention(query, key, value, dropout=0.3, direct=direct)[:2]
        reference = attention(query, key, value, direct=True)[2] * expected.detach() @ value
        assert_same(found, (reference, remainder), [query, key, value], 1e-8)


def test_gradcheck_and_opcheck():
    states = inputs(5, 7, B=1, H=2, G=1, D=3)
    torch.autograd.gradcheck(lambda *x: attention(*x, direct=False, block_size=2)[:2], states)
    key_ranges = key_ranges_of([0, 0, 0, 1, 1, 1, -1], 5)
    arguments = blockwise._attention.arguments(states, [key_ranges, torch.tensor([5])])
    torch.library.opcheck(blockwise._attention.forward, (*arguments, "stick_breaking", [0, 1], [1.0], 2, 0.5, 0.1))


def test_second_derivative_is_refused_in_blocks():
    query, key, value = inputs(9, 9)
    first = torch.autograd.grad(attention(query, key, value)[0].square().sum(), query, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match=r"second derivative.*'eager'"):
        first.sum().backward()


@pytest.mark.parametrize("logit", [0.0, -16.0], ids=["half", "closed"])
def test_memory_is_linear_in_length(logit):
    """No operation of a training step makes a tensor with T * T elements, even if no stick is ever spent."""
    sizes, saved = [], []
    for T in (512, 1024):
        states = inputs(T, T, B=1, H=2, dtype=torch.float32, logit=logit)
        with LargestTensor() as mode, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockwise, "CHUNK_LOGITS", 1)
            hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x)
            with hooks:
                out = attention(*states)[0]
            torch.autograd.grad(out.sum(), states)
        sizes.append(mode.largest)
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] <= 64 * 1024
    assert max(saved) <= 2 * 1024 * 4


def test_low_precision():
    """bfloat16 in, bfloat16 out, float32 between; autocast casts queries, keys and values."""
    states = [state.detach().float() for state in inputs(40, 40)]
    low = [state.bfloat16() for state in states]
    exact = attention(*(state.float() for state in low))[0]
    for direct in (True, False):
        out, remainder, _ = attention(*low, direct=direct)
        assert (out.dtype, remainder.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(attention(*states, direct=direct)[0], out, rtol=0, atol=0)


def test_parameters():
    """Zero vectors and a plain norm at the start; nothing learned without them."""
    layer = StickBreaking(CONFIG, StickBreakingParameters(remainder="head_bias"), 0)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "head_bias.weight": (4, 4),
        "norm.weight": (4, 4),
        "norm.bias": (4, 4),
    }
    for part in (layer.head_bias, layer.norm):
        for parameter in part.parameters():
            torch.nn.init.constant_(parameter, 7.0)
        part.reset()
    assert not layer.head_bias.weight.any()
    assert (layer.norm.weight == 1).all()
    assert not layer.norm.bias.any()
    normed = HeadGroupNorm(4, 4)(torch.randn(2, 4, 5, 4), 0)
    torch.testing.assert_close(normed.mean(-1), torch.zeros(2, 4, 5), rtol=0, atol=1e-5)
    assert not list(StickBreaking(CONFIG, StickBreakingParameters(remainder="value"), 0).parameters())
