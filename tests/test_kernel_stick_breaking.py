"""Stick-breaking attention by flash-linear-attention, run by Triton's interpreter, against the paper's products."""

import sys

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("fla.ops.stickbreaking_attn.parallel", reason="fla-core is not installed")

import fla.ops.stickbreaking_attn.parallel as parallel

import oracles
from tiny import key_ranges_of, tiny_model, tokens
from whatwhere import attention_fla
from whatwhere.attention_fla import _fused_attention, fused_stick_breaking_attention
from whatwhere.forward_arguments import CACHE
from whatwhere.position_stick_breaking import stick_breaking_attention

pytestmark = pytest.mark.usefixtures("on_device")

SCALING = 0.4
# A hole in a document, another document and right padding; left padding.
SEGMENTS = [[0] * 33 + [-1] * 5 + [0] * 3 + [1] * 20 + [-1] * 9, [-1] * 3 + [0] * 67]


@pytest.fixture(autouse=True)
def used(device, monkeypatch):
    """On a CPU too, where the interpreter has no times to choose by. On a GPU products of float32 have TF32."""
    if device.type == "cuda":
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
        return
    for kernel in vars(parallel).values():
        tuner = getattr(kernel, "fn", None)
        if hasattr(tuner, "configs"):
            monkeypatch.setattr(tuner, "configs", tuner.configs[:1])
    monkeypatch.setattr(attention_fla, "FUSED_DEVICES", ("cpu",))


def inputs(batch=1, length=70, heads=2, groups=1, width=20, dtype=torch.float32):
    """Query, key and value as projections leave them."""
    shapes = [(batch, length, heads, width), (batch, length, groups, width), (batch, length, groups, width)]
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def compare(tensors, tolerance, **options):
    """Output, remainder and all gradients with those of `blockwise` in float64, which the oracle checks."""
    exact = [one.detach().double().requires_grad_() for one in tensors]
    grads = [torch.randn(one.shape).to(one.dtype) for one in (tensors[0], tensors[0][..., 0])]
    found = []
    for function, given in ((fused_stick_breaking_attention, tensors), (stick_breaking_attention, exact)):
        parts = list(function(*given, scaling=SCALING, **options))[:2]
        parts += torch.autograd.grad(parts, given, [one.to(part.dtype) for one, part in zip(grads, parts)])
        found.append([part.detach() for part in parts])
    assert [one.dtype for one in found[0]] == [tensors[0].dtype] * 5
    if tensors[0].is_cuda:
        tolerance = max(tolerance, 4e-3)
    for one, other in zip(*found, strict=True):
        assert (one.double() - other).norm() <= tolerance * max(1.0, other.norm().item())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("inclusive", [False, True])
def test_equals_blockwise(masked, inclusive):
    """Rows of padding give 0, and leave everything."""
    tensors = inputs(2) if masked else inputs(heads=4, groups=2)
    compare(tensors, 2e-6, mask=key_ranges_of(SEGMENTS, 70) if masked else None, inclusive=inclusive)


def test_equals_the_paper():
    query, key, value = inputs(length=12)
    segments = SEGMENTS[0][30:42]
    output, remainder = fused_stick_breaking_attention(
        query, key, value, mask=key_ranges_of(segments, 12), scaling=SCALING
    )
    visible = oracles.visible_oracle(12, 12, segments)
    states = [one.detach().double() for one in (query[0, 1], key[0, 0], value[0, 0])]
    expected, _, rest = oracles.stick_breaking_oracle(*states, visible, list(range(12)), SCALING)
    tolerance = 4e-3 if query.is_cuda else 1e-5
    torch.testing.assert_close(output[0, 1].double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(remainder[0, 1].double(), rest, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("opening", [-30.0, 30.0])
def test_extreme_logits(opening):
    """Nothing is broken off, or everything at once."""
    tensors = inputs(heads=1)
    with torch.no_grad():
        tensors[0][..., 0], tensors[1][..., 0] = 1.0, opening / SCALING
    compare(tensors, 1e-4)


def test_half_precision():
    compare(inputs(dtype=torch.float16), 2e-3)


@pytest.fixture
def calls(monkeypatch):
    """What flash-linear-attention is called with."""
    found, right = [], _fused_attention()

    def attend(*tensors, **options):
        found.append(options)
        return right(*tensors, **options)

    monkeypatch.setattr(attention_fla, "_fused_attention", lambda: attend)
    return found


@pytest.mark.parametrize("remainder", ["none", "value", "head_bias"])
def test_models(remainder, calls):
    """A batch with padding, and a decoding step, which is not fused."""
    model = tiny_model(
        "llama", "stick_breaking", num_hidden_layers=1, position_encoding_parameters={"remainder": remainder}
    )
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :4] = 0
    found = []
    for implementation in ("blockwise", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        out = model(ids[:, :11], attention_mask=mask[:, :11])
        step = model(ids[:, 11:], attention_mask=mask, cache=out[CACHE])
        logits = torch.cat((out.logits, step.logits), 1)[mask.bool()]
        logits.square().mean().backward()
        found.append([logits.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
    assert len(calls) == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=4e-3 if one.is_cuda else 1e-5)


def test_what_it_does_not_compute(calls):
    """Decoding, other masks, dropout, types, and masks that are not those of documents."""
    query, key, value = inputs(2, length=20)
    key_ranges = key_ranges_of([[0] * 20] * 2, 20)
    ahead = key_ranges.clone()
    ahead[:, :, :19, 1] += 1
    hidden = key_ranges.clone()
    hidden[:, :, 20 + 3] = 0
    options = {"scaling": SCALING}
    assert fused_stick_breaking_attention(query, key, value, mask=key_ranges, **options) is not None
    calls.clear()
    for mask in (ahead, hidden, key_ranges_of([[-1] * 20] * 2, 20), torch.ones(2, 1, 20, 20, dtype=torch.bool)):
        assert fused_stick_breaking_attention(query, key, value, mask=mask, **options) is None
    assert fused_stick_breaking_attention(query[:, :, 19:], key, value, **options) is None
    assert fused_stick_breaking_attention(query, key, value, dropout=0.1, **options) is None
    assert fused_stick_breaking_attention(*(one.double() for one in (query, key, value)), **options) is None
    assert not calls


def test_gradients_of_gradients_are_refused():
    tensors = inputs(length=5)
    output, _ = fused_stick_breaking_attention(*tensors, scaling=SCALING)
    with pytest.raises(NotImplementedError, match="attn_implementation='eager'"):
        torch.autograd.grad(output.sum(), tensors, create_graph=True)


@pytest.mark.parametrize("installed", ["not", "old"])
def test_without_it(installed, monkeypatch):
    """Blockwise computes the call, which is said once."""
    said = []
    monkeypatch.setattr(attention_fla.logger, "warning_once", said.append)
    if installed == "not":
        monkeypatch.setitem(sys.modules, "fla.ops.stickbreaking_attn", None)
    else:
        monkeypatch.setattr("fla.ops.stickbreaking_attn.parallel_stickbreaking_attn", lambda q, k, v, inv_temp: q)
    _fused_attention.cache_clear()
    try:
        for _ in range(2):
            assert fused_stick_breaking_attention(*inputs(length=5), scaling=SCALING) is None
    finally:
        _fused_attention.cache_clear()
    assert len(said) == 1
    assert "pip install fla-core" in said[0]
