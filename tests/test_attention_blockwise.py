"""Blockwise attention against full-matrix attention: outputs and every gradient, masks, dropout, memory, compilation.

The reference is the shipped, differentiable `BlockBias.bias`, which the tests of the encodings compare with the papers.
"""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, StaticCache

import whatwhere.attention_blockwise as blockwise
from tiny import LargestTensor, causal_lm_class, key_ranges_of, slow_but, tiny_config, tiny_model, tokens
from whatwhere.attention_blockwise import BLOCK_BIASES, HIDDEN_LOGIT, BiasInputs, blockwise_attention
from whatwhere.attention_choice import supported_implementations
from whatwhere.cope_bias import GatedCoPEBias
from whatwhere.position_plan import list_position_encodings

ENCODINGS = ["none", "cope", "cope-gated", "relative", "relative-last", "alibi", "cope+relative", "cope+alibi"]


def reference(query, key, value, *, visible, scaling, biases, keep=None, additive=None):
    """Attention with the full matrix of logits; `visible` is bool (B, 1 or H, Q, K)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    content = query @ key.transpose(2, 3) * scaling
    if additive is not None:
        content = content + additive
    content = content.masked_fill(~visible, HIDDEN_LOGIT)
    logits = content
    for term, tensors, settings in biases:
        logits = logits + term.bias(content, query, tensors, settings)
    weights = torch.softmax(logits, -1) * visible.any(-1, keepdim=True)
    if keep is not None:
        weights = weights * keep
    return weights @ value


def visible_by_segments(Q, K, segments):
    slots = torch.arange(K)
    visible = (slots <= slots[K - Q :, None])[None]
    if segments is not None:
        own = segments[:, K - Q :, None]
        visible = visible & (own == segments[:, None]) & (own >= 0)
    return visible[:, None]


def positions_of(segments, Q, K):
    """Positions that start again in each segment."""
    if segments is None:
        key_positions = torch.arange(K)[None]
    else:
        same = segments[:, None] == segments[:, :, None]
        key_positions = same.tril().sum(-1) - 1
    return key_positions[:, K - Q :], key_positions


class Case:
    """Random inputs, and the biases of an encoding."""

    def __init__(
        self, encoding, Q, K, *, B=2, H=4, G=2, D=8, V=8, P=6, segments=None, logit=0.0, spread=1.0, dtype=torch.float64
    ):
        def tensor(*shape):
            return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()

        self.query, self.key, self.value = tensor(B, H, Q, D), tensor(B, G, K, D), tensor(B, G, K, V)
        with torch.no_grad():
            self.query.mul_(spread)
            if logit != 0.0:
                # One direction that all queries and keys share moves all gates.
                self.query[..., 0], self.key[..., 0] = abs(logit), math.copysign(1.0, logit) * math.sqrt(D)
        self.scaling = D**-0.5
        self.segments, self.mask = segments, key_ranges_of(segments, Q)
        self.grad = torch.randn(B, H, Q, V, dtype=torch.float64).to(dtype)
        query_positions, key_positions = positions_of(segments, Q, K)
        self.tables = []
        self.biases = []
        for name in encoding.split("+"):
            if name == "cope":
                self.tables.append(tensor(D, P))
                self.biases.append(BiasInputs(BLOCK_BIASES["cope"], (self.tables[-1],), (0.7,)))
            elif name == "cope-gated":
                gate_key = tensor(B, G, K, D)
                with torch.no_grad():
                    gate_key[..., 0] += math.copysign(math.sqrt(D), logit) if logit else 0.0
                self.tables += [tensor(D, P), gate_key]
                self.biases.append(BiasInputs(GatedCoPEBias, tuple(self.tables), (0.7, 0.4, 0.0)))
            elif name in ("relative", "relative-last"):
                self.tables.append(tensor(max(2, K // 2), D))
                tensors = (self.tables[-1], query_positions, key_positions)
                self.biases.append(BiasInputs(BLOCK_BIASES["relative"], tensors, (0.7, name == "relative-last")))
            elif name == "alibi":
                slopes = torch.rand(H, dtype=torch.float64)
                self.biases.append(BiasInputs(BLOCK_BIASES["alibi"], (slopes, query_positions, key_positions)))
        self.inputs = [self.query, self.key, self.value, *self.tables]

    def blockwise(self, **settings):
        settings = {"mask": self.mask, "block_size": 64, "direct": False, "biases": self.biases, **settings}
        return blockwise_attention(self.query, self.key, self.value, scaling=self.scaling, **settings)

    def reference(self, **settings):
        if "visible" not in settings:
            settings["visible"] = visible_by_segments(self.query.shape[2], self.key.shape[2], self.segments)
        return reference(self.query, self.key, self.value, scaling=self.scaling, biases=self.biases, **settings)

    def gradients(self, out):
        return torch.autograd.grad(out, self.inputs, self.grad)


def assert_same(case, out, expected, tolerance=1e-10):
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for name, one, other in zip(
        ["query", "key", "value", "table", "table"], case.gradients(out), case.gradients(expected)
    ):
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"gradient of {name}: {text}"
        )


def segments_of(name, B, K):
    segments = torch.zeros(B, K, dtype=torch.int32)
    if name == "left":
        segments[0, : K // 3] = -1
    elif name == "right":
        segments[0, K - K // 3 :] = -1
    elif name == "packed":
        segments[0] = torch.arange(K) // max(1, K // 3)
        segments[1] = torch.arange(K) // max(1, K // 5)
    elif name == "packed-padded":
        segments[0] = torch.arange(K) // max(1, K // 4)
        segments[0, : K // 8] = -1
        segments[1] = torch.arange(K) // max(1, K // 2)
        segments[1, K - K // 4 :] = -1
    elif name == "all-padding":
        segments[0] = -1
    return segments


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("Q", "K"), [(1, 1), (1, 70), (63, 63), (100, 100), (100, 163), (257, 257)])
def test_equals_full_matrix(encoding, Q, K):
    case = Case(encoding, Q, K)
    assert_same(case, case.blockwise(), case.reference())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("mask", ["left", "right", "packed", "packed-padded", "all-padding", "full"])
def test_segments(encoding, mask):
    Q, K = 70, 150
    case = Case(encoding, Q, K, segments=segments_of(mask, 2, K))
    assert_same(case, case.blockwise(), case.reference())


@pytest.mark.parametrize("sizes", [{"H": 1, "G": 1}, {"G": 4}, {"H": 6}, {"H": 3, "G": 1}, {"V": 5}], ids=str)
@pytest.mark.parametrize("encoding", ["cope", "relative", "alibi"])
def test_heads_and_widths(encoding, sizes):
    case = Case(encoding, 90, 90, segments=segments_of("packed", 2, 90), **sizes)
    assert_same(case, case.blockwise(), case.reference())


@pytest.mark.parametrize("encoding", ["none", "cope", "cope-gated", "relative", "alibi", "cope+relative"])
@pytest.mark.parametrize("kind", ["bool", "bool-heads", "bool-one", "float", "float-heads"])
def test_full_masks(encoding, kind):
    Q, K = 70, 90
    case = Case(encoding, Q, K)
    visible = torch.rand(1 if kind == "bool-one" else 2, 4 if "heads" in kind else 1, Q, K) < 0.6
    visible[0, :, 3] = False
    if "float" not in kind:
        assert_same(case, case.blockwise(mask=visible), case.reference(visible=visible))
        return
    additive = torch.randn(visible.shape, dtype=torch.float64)
    mask = additive.masked_fill(~visible, float("-inf"))
    assert_same(case, case.blockwise(mask=mask), case.reference(visible=visible, additive=additive))


@pytest.mark.parametrize("logit", [-8.0, -2.0, 0.0, 2.0, 8.0], ids=["closed", "low", "half", "high", "open"])
@pytest.mark.parametrize("mask", [None, "packed-padded"])
@pytest.mark.parametrize("encoding", ["cope", "cope-gated"])
def test_gates(encoding, logit, mask):
    segments = None if mask is None else segments_of(mask, 2, 200)
    case = Case(encoding, 200, 200, logit=logit, P=9, segments=segments)
    assert_same(case, case.blockwise(), case.reference())


@pytest.mark.parametrize("P", [2, 3, 16, 64, 150])
def test_table_sizes(P):
    case = Case("cope", 150, 150, P=P, spread=3.0)
    assert_same(case, case.blockwise(block_size=32), case.reference())


def test_window_grows_and_shrinks():
    """Gates that are open, then closed, then open: the width of one block is a bad guess for the next."""
    case = Case("cope", 400, 400, P=5, logit=4.0)
    with torch.no_grad():
        case.key[:, :, 100:250, 0] = -3.0 * math.sqrt(8)
    assert_same(case, case.blockwise(block_size=32), case.reference())


def test_small_chunks(monkeypatch):
    """Chunks that split the batch unevenly."""
    monkeypatch.setattr(blockwise, "CHUNK_LOGITS", 2 * 32 * 100 * 3)
    for encoding in ("cope+relative", "cope-gated", "alibi"):
        case = Case(encoding, 100, 100, B=3, segments=segments_of("packed-padded", 3, 100))
        assert_same(case, case.blockwise(block_size=32), case.reference())


def test_inputs_that_are_not_contiguous():
    case = Case("cope", 100, 100)
    expected = case.blockwise()
    for name in ("query", "key", "value"):
        tensor = getattr(case, name).detach()
        setattr(case, name, tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_())
    case.inputs = [case.query, case.key, case.value, *case.tables]
    assert_same(case, case.blockwise(), case.reference())
    torch.testing.assert_close(case.blockwise(), expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(
    ("Q", "mask"),
    [(1, None), (1, "left"), (1, "float"), (3, None), (3, "packed"), (3, "right"), (3, "bool")],
)
def test_direct_path(encoding, Q, mask):
    """Decoding: the direct path equals the last rows of the blockwise one."""
    K = 50
    segments = None if mask in (None, "bool", "float") else segments_of(mask, 2, K)
    case = Case(encoding, Q, K, segments=segments)
    settings = {}
    if mask in ("bool", "float"):
        visible = torch.rand(2, 1, Q, K) < 0.5
        settings["mask"] = visible if mask == "bool" else torch.where(visible, 0.0, float("-inf")).double()
    assert_same(case, case.blockwise(direct=None, **settings), case.blockwise(direct=False, **settings))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bfloat16", "float16", "float32"]
)
@pytest.mark.parametrize("encoding", ["none", "cope", "relative", "alibi"])
def test_low_precision(encoding, dtype):
    """The error is a small multiple of the one that the full matrix in the same type makes (against float64)."""
    low = Case(encoding, 200, 200, D=16, V=16, P=16, dtype=dtype)
    high = copy.copy(low)
    high.query, high.key, high.value, *high.tables = (
        tensor.detach().double().requires_grad_() for tensor in low.inputs
    )
    high.inputs = [high.query, high.key, high.value, *high.tables]
    high.biases = [
        bias._replace(tensors=(high.tables[0], *bias.tensors[1:])) if high.tables else bias for bias in low.biases
    ]
    high.grad = low.grad.double()
    exact = high.reference()
    # The plain PyTorch way: products in the low precision, softmax and positions in float32.
    groups = 2
    key, value = low.key.repeat_interleave(groups, 1), low.value.repeat_interleave(groups, 1)
    content = (low.query @ key.transpose(2, 3)).float() * low.scaling
    content = content.masked_fill(~visible_by_segments(200, 200, None), HIDDEN_LOGIT)
    logits = content + sum(term.bias(content, low.query, tensors, settings) for term, tensors, settings in low.biases)
    plain = torch.softmax(logits, -1).to(dtype) @ value
    out = low.blockwise()
    assert out.dtype == dtype
    results = zip([out, *low.gradients(out)], [plain, *low.gradients(plain)], [exact, *high.gradients(exact)])
    for ours, theirs, truth in results:
        assert ours.dtype == dtype
        error, allowed = (ours - truth).norm(), (theirs - truth).norm()
        # Gradients of the logits are rounded once more, which doubles the error of a table's; three times that.
        assert error <= 6 * allowed + 1e-6 * truth.norm()


def test_dropout_is_the_same_in_both_passes():
    """The output is linear in v with the same masked weights that the backward pass uses."""
    case = Case("cope", 100, 100)
    torch.manual_seed(7)
    out = case.blockwise(dropout=0.3)
    # sum(out * grad) is linear in v, so it equals v . d/dv exactly, if the masks agree.
    grad_value = torch.autograd.grad(out, case.value, case.grad, retain_graph=True)[0]
    torch.testing.assert_close((grad_value * case.value).sum(), (out * case.grad).sum())
    # The weights themselves, from unit vectors as values.
    K = case.key.shape[2]
    with torch.no_grad():
        units = torch.eye(K, dtype=torch.float64).expand(2, 2, K, K)
        plain = blockwise_attention(
            case.query, case.key, units, scaling=case.scaling, biases=case.biases, direct=False, block_size=64
        )
        torch.manual_seed(7)
        dropped = blockwise_attention(
            case.query,
            case.key,
            units,
            scaling=case.scaling,
            biases=case.biases,
            dropout=0.3,
            direct=False,
            block_size=64,
        )
    keep = (dropped / plain.clamp(min=1e-300)).nan_to_num(0.0)
    visible = visible_by_segments(100, 100, None).expand(2, 4, 100, 100)
    assert (
        torch.isclose(keep[visible], torch.tensor(0.0).double())
        .logical_or(torch.isclose(keep[visible], torch.tensor(1 / 0.7).double()))
        .all()
    )
    expected = case.reference(keep=keep)
    torch.testing.assert_close(out, expected)
    for one, other in zip(case.gradients(out), case.gradients(expected)):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_dropout_rate_and_seeds(monkeypatch):
    """Calls, batch entries, heads and rows have masks of their own, across blocks and chunks too."""
    # One head per chunk; with a full mask all blocks have one shape, and with zero logits all weights are equal.
    monkeypatch.setattr(blockwise, "CHUNK_LOGITS", 1)
    B, H, T = 2, 2, 128
    nothing, units = torch.zeros(B, H, T, 8), torch.eye(T).expand(B, H, T, T)
    mask = torch.ones(1, 1, T, T, dtype=torch.bool)
    settings = {"mask": mask, "scaling": 1.0, "dropout": 0.25, "direct": False, "block_size": 64}
    kept = torch.stack([blockwise_attention(nothing, nothing, units, **settings) for _ in range(2)]) > 0
    assert abs(kept.float().mean().item() - 0.75) < 0.01
    rows = kept.flatten(0, 3)
    assert rows.unique(dim=0).shape == rows.shape


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_gradcheck(encoding):
    case = Case(encoding, 5, 7, B=1, H=2, G=1, D=3, V=2, P=3)

    def function(query, key, value, *tables):
        tables = iter(tables)
        biases = [
            bias._replace(tensors=tuple(next(tables) if one.requires_grad else one for one in bias.tensors))
            for bias in case.biases
        ]
        return blockwise_attention(query, key, value, scaling=case.scaling, biases=biases, direct=False, block_size=2)

    torch.autograd.gradcheck(function, tuple(case.inputs))


@pytest.mark.parametrize("mask", [None, "packed-padded", "bool"])
def test_opcheck(mask):
    case = Case("cope+relative", 20, 30, dtype=torch.float32)
    masks = {None: None, "bool": torch.rand(2, 1, 20, 30) < 0.5}
    mask = masks[mask] if mask in masks else key_ranges_of(segments_of(mask, 2, 30), 20)
    table, relative, *positions = (tensor for bias in case.biases for tensor in bias.tensors)
    tensors = [case.query, case.key, case.value, table, relative, None, None]
    others = [None, None, *positions, mask, torch.tensor([5])]
    settings = ("cope+relative", [1, 1, 3, 2], [0.7, 0.7, 0.0], 8, 0.3, 0.1)
    arguments = (*blockwise._attention.arguments(tensors, others), *settings)
    torch.library.opcheck(blockwise._attention.forward, arguments)


@pytest.mark.parametrize("encoding", ["cope", "relative", "alibi"])
def test_compiles_as_one_graph(encoding):
    case = Case(encoding, 40, 40, dtype=torch.float32, segments=segments_of("left", 2, 40))
    expected = case.blockwise()
    compiled = torch.compile(lambda: case.blockwise().square().sum(), fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(), case.inputs)
    for one, other in zip(gradients, torch.autograd.grad(expected.square().sum(), case.inputs)):
        torch.testing.assert_close(one, other)


def test_autocast_uses_low_precision_products_only():
    case = Case("cope", 100, 100, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = case.blockwise()
        gradients = case.gradients(out.float())
    assert out.dtype == torch.bfloat16
    low = [tensor.detach().bfloat16() for tensor in (case.query, case.key, case.value)]
    # The table stays in float32, and so does z.
    expected = blockwise_attention(*low, scaling=case.scaling, biases=case.biases, direct=False, block_size=64)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert all(gradient.dtype == torch.float32 for gradient in gradients)


def test_second_derivative_is_refused():
    case = Case("cope", 10, 10)
    first = torch.autograd.grad(case.blockwise().square().sum(), case.query, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("encoding", ["cope", "cope-closed", "relative", "alibi"])
def test_memory_is_linear_in_length(encoding):
    """No operation of a training step makes a tensor with T * T elements per head."""
    sizes = []
    for T in (1024, 2048):
        logit = -8.0 if encoding == "cope-closed" else 0.0
        case = Case(encoding.removesuffix("-closed"), T, T, B=1, H=2, G=2, dtype=torch.float32, logit=logit)
        # The table of relative positions has T / 2 entries: z is (block, T / 2).
        with LargestTensor() as mode, pytest.MonkeyPatch.context() as patch:
            patch.setattr(blockwise, "CHUNK_LOGITS", 1)
            case.gradients(case.blockwise())
        assert mode.largest > 0
        sizes.append(mode.largest)
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] <= 64 * 2048 * 2


def test_inference_keeps_nothing():
    case = Case("cope", 100, 100)
    with torch.no_grad():
        out = case.blockwise()
    assert out.grad_fn is None
    # With gradients: inputs, output and the log-sum-exp of each row, nothing of size Q x K.
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        case.blockwise()
    assert saved
    assert max(tensor.numel() for tensor in saved) <= case.query.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.zeros(2, 1, 39, 2, dtype=torch.int32)}, r"mask=\(2, 1, 39, 2\)"),
        ({"mask": torch.zeros(2, 20, dtype=torch.int64)}, r"mask=\(2, 20\)"),
        ({"mask": torch.zeros(2, 1, 20, 20, requires_grad=True)}, "mask.requires_grad=True"),
        ({"biases": "reversed"}, r"biases=\['relative', 'cope'\]"),
        ({"key": torch.zeros(2, 3, 20, 8)}, "do not fit"),
    ],
    ids=["mask-shape", "mask-type", "mask-gradient", "order", "heads"],
)
def test_refusals(change, message):
    case = Case("cope+relative", 20, 20, dtype=torch.float32)
    settings = {"mask": None, "key": case.key, "biases": case.biases, **change}
    if settings["biases"] == "reversed":
        settings["biases"] = case.biases[::-1]
    with pytest.raises(ValueError, match=message):
        blockwise_attention(case.query, value=case.value, scaling=1.0, **settings)


# On a GPU: nothing is read by the host, and blocks are large.


def devices(tree):
    return {one.device.type for one in tree_leaves(tree) if isinstance(one, torch.Tensor)}


class NoReads(TorchDispatchMode):
    """Raises if the host gets what is in a tensor, or a tensor what the host has: a CUDA graph allows neither."""

    READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "allclose")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.partition("::")[2].lstrip("_")
        assert name not in [read.lstrip("_") for read in self.READS], f"the host reads a tensor: {func}"
        # By `torch.tensor`; or it is one number that an index assigns, which on a GPU is no copy.
        assert name != "lift_fresh" or args[0].dim() == 0, "a tensor is made of numbers of the host"
        out = func(*args, **(kwargs or {}))
        found = devices((args, kwargs)) | devices(out)
        assert len(found) < 2, f"{func} copies between {found}"
        return out


class NoNumbers(TorchFunctionMode):
    """Raises where a tensor is made of numbers of the host, which no operation shows on the meta device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in ("tensor", "as_tensor", "new_tensor", "from_numpy"), (
            "a tensor is made of numbers of the host"
        )
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Takes the path of a GPU, in which operators may not read."""

    @contextlib.contextmanager
    def guarded(device):
        with torch.autocast(device.type, enabled=False), NoReads():
            yield

    def start():
        monkeypatch.setattr(blockwise, "decides_by_data", lambda device: False)
        monkeypatch.setattr(blockwise, "_without_autocast", guarded)

    return start


def test_a_read_is_found(as_on_a_gpu, monkeypatch):
    as_on_a_gpu()
    monkeypatch.setattr(blockwise, "decides_by_data", lambda device: True)
    with pytest.raises(AssertionError, match="the host reads a tensor"):
        Case("alibi", 70, 70, segments=segments_of("left", 2, 70)).blockwise()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("mask", [None, "packed-padded", "all-padding"])
def test_the_path_of_a_gpu(encoding, mask, as_on_a_gpu):
    as_on_a_gpu()
    for Q, K in ((100, 100), (70, 150)):
        case = Case(encoding, Q, K, segments=None if mask is None else segments_of(mask, 2, K))
        assert_same(case, case.blockwise(block_size=None), case.reference())
    visible = torch.rand(2, 4, 70, 150) < 0.6
    assert_same(case, case.blockwise(mask=visible), case.reference(visible=visible))


def supporting():
    """The encodings that `blockwise` computes."""
    names = list_position_encodings()
    return [name for name in names if "blockwise" in supported_implementations(tiny_config("llama", name))]


@pytest.mark.parametrize("encoding", slow_but(["fox", "stick_breaking"], supporting()))
def test_models_on_the_path_of_a_gpu(encoding, as_on_a_gpu):
    """Padded batches, gradients, and continuations of a cache that grows and of one with empty slots behind."""
    model = tiny_model("llama", encoding, "blockwise").double().train()
    batch, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[0, :11] = 0
    mask[1, 33:] = 0

    def run():
        model.zero_grad()
        logits = model(batch, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        found = {"logits": logits, **{name: one.grad for name, one in model.named_parameters() if one.grad is not None}}
        caches = {"dynamic": DynamicCache(config=model.config)}
        caches["static"] = StaticCache(config=model.config, max_cache_len=48)
        for name, cache in caches.items():
            with torch.no_grad():
                model(batch[:1, :25], attention_mask=mask[:1, :25], cache=cache)
                found[name] = model(batch[:1, 25:], attention_mask=mask[:1], cache=cache).logits
        return found

    expected = run()
    as_on_a_gpu()
    for (name, one), other in zip(run().items(), expected.values()):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def on_meta(monkeypatch):
    """The meta device as a GPU: what is in its tensors cannot be read, and operators run as they are there."""
    monkeypatch.setattr(blockwise, "_without_autocast", lambda device: contextlib.nullcontext())
    for operator in (blockwise._attention.forward, blockwise._attention.backward):
        monkeypatch.setattr(operator, "_abstract_fn", operator._init_fn)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device=None: False)


# One term of each kind with every mask; the other encodings with one.
QUICK_COPIES = list(itertools.product(("alibi", "cope", "stick_breaking"), (None, "padding", "packed")))


@pytest.mark.parametrize(
    ("encoding", "mask"),
    slow_but(QUICK_COPIES, dict.fromkeys([*QUICK_COPIES, *((name, "padding") for name in supporting())])),
)
def test_a_training_step_copies_nothing(encoding, mask, on_meta):
    """Forward and backward of a whole model can be part of a CUDA graph."""
    with torch.device("meta"):
        model = (
            causal_lm_class("llama")
            ._from_config(tiny_config("llama", encoding), attn_implementation="blockwise")
            .train()
        )
        batch = torch.zeros(2, 40, dtype=torch.long)
        masks = {
            None: None,
            "padding": torch.zeros(2, 40, dtype=torch.long),
            "packed": torch.zeros(2, 1, 80, 2, dtype=torch.int32),
        }
    with NoReads(), NoNumbers():
        model(batch, attention_mask=masks[mask], use_cache=False).logits.square().sum().backward()
    assert all(one.grad is not None for one in model.model.layers.parameters())


def test_copies_are_found(on_meta):
    numbers = torch.zeros(3, device="meta")
    for copies in (lambda: torch.zeros(3).to("meta"), lambda: numbers.copy_(torch.zeros(3)), lambda: torch.tensor([1])):
        with pytest.raises(AssertionError, match=r"copies between|numbers of the host"), NoReads():
            copies()
    with pytest.raises(AssertionError, match="numbers of the host"), NoNumbers():
        torch.tensor([1.0], device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        bool(numbers.any())


def blocks_on(device, B, heads, groups, length):
    """How many blocks a layer has."""
    rows = min(blockwise.block_rows(device), length)
    members = blockwise.chunk_members(device, B * groups, heads // groups * rows * length)
    return math.ceil(B * groups / members) * math.ceil(length / rows)


def test_number_of_blocks():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert blocks_on(cpu, 4, 32, 32, 4096) == 1024
    assert blocks_on(gpu, 4, 32, 32, 4096) == 32
    assert blocks_on(gpu, 4, 32, 8, 4096) == 32
    assert blocks_on(gpu, 1, 32, 32, 16384) == 128
    # A head's block always fits, however long.
    assert blocks_on(gpu, 1, 1, 1, 1 << 20) == (1 << 20) // blockwise.GPU_ROWS
