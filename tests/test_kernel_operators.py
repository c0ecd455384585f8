"""What holds for the operators of all kernels: strides of results, empty batches, many heads that share a key head."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from tiny import slow_but
from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM, kernel_flash
from whatwhere.scripts.benchmark.kernel_cases import KERNELS, case

pytestmark = pytest.mark.usefixtures("on_device")


class Calls(TorchDispatchMode):
    """Records the calls of our operators."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        result = operator(*arguments, **(options or {}))
        if operator.namespace.startswith("whatwhere_"):
            self.found.append((operator, arguments, result))
        return result


def layout(tensor):
    """Type, shape and strides; where there is one element along an axis, its stride means nothing."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape) if size > 1]
    return tensor.dtype, tuple(tensor.shape), strides


def transposed(tensor):
    """The same numbers in memory as a model has them: (B, T, H, D) for (B, H, T, D)."""
    if tensor.dim() < 2:
        return tensor.detach()
    axes = (tensor.dim() - 3, tensor.dim() - 2) if tensor.dim() > 2 else (0, 1)
    return tensor.detach().transpose(*axes).contiguous().transpose(*axes)


EVERY = [(name, {}) for name in KERNELS]
# What has other tensors.
MORE = [
    *(("cope", {"mask": "padding", "gates": "separate_key"}), ("cope", {"gates": "value"})),
    *(("cope", {"encoding": name}) for name in ("cope+rope", "cope+alibi", "cope+relative")),
    *(("pope", {"partial_rotary_factor": 0.5, "use_delta": False}), ("fox", {"mask": "packed"})),
    *(("plain", {"groups": 1}), ("relative", {"dropout": 0.1})),
]


@pytest.mark.parametrize("queries", [20, 1])
@pytest.mark.parametrize(("name", "variant"), [*EVERY, *MORE], ids=str)
def test_strides_are_those_of_the_fake_operators(name, variant, queries, device):
    """torch.compile plans memory with these."""
    shape = {"batch": 2 if "mask" in variant else 1, "heads": 2, "groups": 2, **variant}
    if name == "cope":
        shape["num_positions"] = 8
    call = KERNELS[name].call(case(name, "float32", 16, queries, 24, **shape), device)
    inputs = [transposed(one).requires_grad_(queries > 1) for one in call.inputs]
    with Calls() as calls:
        out = call.kernel(*inputs)
        if queries > 1:
            out.backward(transposed(torch.randn_like(out)))
    names = [str(operator) for operator, *_ in calls.found]
    assert len(names) == (2 if queries > 1 else 1), names
    for operator, arguments, result in calls.found:
        with FakeTensorMode() as mode:
            expected = operator(*tree_map_only(torch.Tensor, mode.from_tensor, arguments))
        found, wanted = ([layout(one) for one in tree_flatten(each)[0]] for each in (result, expected))
        assert found == wanted, operator


@pytest.mark.slow
# A warning of PyTorch about itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("encoding", ["relative", "cope", "pope"])
def test_compiles_with_inductor(encoding):
    torch.manual_seed(0)
    config = WhatWhereLlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        position_encoding=encoding,
    )
    model = WhatWhereLlamaForCausalLM._from_config(config, attn_implementation="triton")
    tokens = torch.randint(3, 64, (2, 16))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    expected = model(tokens, attention_mask=mask, labels=tokens).loss
    expected.backward()
    plain = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True)(tokens, attention_mask=mask, labels=tokens).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for one, gradient in zip(model.parameters(), plain):
        torch.testing.assert_close(one.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("queries", [20, 1])
@pytest.mark.parametrize(("name", "variant"), [*EVERY, *MORE[:6]], ids=str)
def test_empty_batches(name, variant, queries, device):
    if variant.get("mask") == "padding":
        variant = {**variant, "mask": "packed"}
    call = KERNELS[name].call(case(name, "float32", 16, queries, 24, **{"batch": 0, **variant}), device)
    inputs = [one.detach().requires_grad_() for one in call.inputs]
    with torch.no_grad():
        assert call.kernel(*inputs).shape == (0, 4, queries, 16)
    out = call.kernel(*inputs)
    assert out.shape == (0, 4, queries, 16)
    out.sum().backward()
    for one in inputs:
        assert one.grad.shape == one.shape
        assert not one.grad.any()


@pytest.mark.parametrize("name", KERNELS)
def test_second_derivatives_are_refused(name, device):
    call = KERNELS[name].call(case(name, "float32", 16, 5, 5), device)
    inputs = [one.detach().requires_grad_() for one in call.inputs]
    (grad,) = torch.autograd.grad(call.kernel(*inputs).sin().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative: use attn_implementation='eager'"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("name", "variant", "mask"),
    slow_but(
        [("cope", {"encoding": "cope+alibi"}, "packed"), ("pope", {}, "packed"), ("relative", {}, "packed")],
        [
            *((name, {}, "packed" if index % 2 else "causal") for index, name in enumerate(KERNELS)),
            *((name, variant, "packed") for name, variant in MORE[:6]),
            *(("relative", {}, "packed"), ("plain", {"groups": 2}, "packed")),
        ],
    ),
    ids=str,
)
def test_decoding_with_many_heads_for_a_key_head(name, variant, mask, device):
    """They are rows of several programs, the last of which is not full."""
    assert kernel_flash.decode_rows(3) == 16
    assert kernel_flash.decode_rows(128) == kernel_flash.decode_rows(71) == 32
    shape = {"batch": 1, "heads": 70, "groups": 1, **variant, "mask": mask, "dropout": 0.0}
    shape["groups"] = shape["batch"] = variant.get("groups", 1)
    if name == "cope":
        shape["num_positions"] = 8
    call = KERNELS[name].call(case(name, "float32", 16, 1, 40, **shape), device)
    with torch.no_grad():
        out = call.kernel(*call.inputs)
        expected = call.reference(*(one.double() for one in call.inputs), rows=torch.arange(1))
    assert (out - expected).norm() / expected.norm() < 2e-5
