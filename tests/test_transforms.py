"""Transforms of PyTorch's functions: gradients by torch.func, gradients of each sample by vmap, and fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

from test_contract import ENCODINGS, build, close, models, quick_implementations
from tiny import slow_but, tokens
from whatwhere.forward_arguments import CACHE

LENGTH = 9


def loss_of(model):
    """The loss of one text, as a function of parameters, tokens (T,) and perhaps a mask (T,)."""

    def loss(parameters, ids, mask=None):
        options = {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        mask = mask if mask is None else mask[None]
        return functional_call(model, parameters, (), {**options, "attention_mask": mask}).loss

    return loss


def expected(model, ids, mask=None):
    """The gradients of one text by autograd."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss_of(model)(parameters, ids, mask), [*parameters.values()], allow_unused=True)
    return {name: torch.zeros_like(p) if one is None else one for (name, p), one in zip(parameters.items(), found)}


@models()
def test_gradients_by_func(family, encoding):
    model, (ids,) = build(family, encoding), tokens(1, LENGTH)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in quick_implementations(model):
        model.set_attn_implementation(name)
        close(grad(loss_of(model))(detached, ids), expected(model, ids), 1e-5)


@pytest.mark.parametrize("encoding", ["token_gated_cope", "relative", "stick_breaking"])
def test_gradients_of_several_blocks(encoding):
    model, (ids,) = build("llama", encoding, "blockwise", max_position_embeddings=80), tokens(1, 70)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
    close(grad(loss_of(model))(detached, ids), expected(model, ids), 1e-5)


@models(first=1)
def test_gradients_of_each_sample(family, encoding):
    model, ids = build(family, encoding), tokens(3, LENGTH)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in quick_implementations(model):
        model.set_attn_implementation(name)
        found = vmap(grad(loss_of(model)), (None, 0))(detached, ids)
        for index in range(3):
            close({name: one[index] for name, one in found.items()}, expected(model, ids[index]), 1e-4)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("encoding", slow_but(["pope"], ["pope", "cope", "fox", "alibi"]))
def test_kernels(encoding, device):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    model, ids = build("llama", encoding, "triton").to(device), tokens(2, LENGTH).to(device)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
    close(grad(loss_of(model))(detached, ids[0]), expected(model, ids[0]), 1e-4)
    found = vmap(grad(loss_of(model)), (None, 0))(detached, ids)
    close({name: one[1] for name, one in found.items()}, expected(model, ids[1]), 1e-4)


@pytest.mark.parametrize("encoding", slow_but(["pope", "cope", "fox", "relative"], ENCODINGS))
def test_gradients_of_each_padded_sample(encoding):
    """A batch of masks cannot be read; Transformers' own mask for `sdpa` reads it in the stock models, too."""
    model, ids = build("llama", encoding), tokens(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[2, 6:] = 0, 0
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in quick_implementations(model):
        if name == "sdpa":
            continue
        model.set_attn_implementation(name)
        found = vmap(grad(loss_of(model)), (None, 0, 0))(detached, ids, mask)
        for index in range(3):
            close({name: one[index] for name, one in found.items()}, expected(model, ids[index], mask[index]), 1e-4)


def test_gradients_of_gradients_by_func():
    """Attention in blocks has no second derivative, with functions as with autograd; `eager` has one."""
    model, (ids,) = build("llama", "cope"), tokens(1, LENGTH)
    detached = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def squares(parameters):
        return sum(one.square().sum() for one in grad(loss_of(model))(parameters, ids).values())

    with pytest.raises(NotImplementedError, match="no second derivative: use attn_implementation='eager'"):
        grad(squares)(detached)
    model.set_attn_implementation("eager")
    assert all(one.isfinite().all() for one in grad(squares)(detached).values())


@models(both=ENCODINGS)
def test_fake_tensors(family, encoding):
    model = build(family, encoding)
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    for name in quick_implementations(model):
        model.set_attn_implementation(name)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            fake_ids, fake_mask = mode.from_tensor(ids), mode.from_tensor(mask)
            out = model(fake_ids, attention_mask=fake_mask, use_cache=True)
            assert out.logits.shape == (2, LENGTH, model.config.vocab_size)
            longer = torch.nn.functional.pad(fake_mask, (0, 1), value=1)
            step = model(fake_ids[:, :1], attention_mask=longer, cache=out[CACHE])
            assert step.logits.shape == (2, 1, model.config.vocab_size)
