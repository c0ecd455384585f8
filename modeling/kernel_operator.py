"""PyTorch operators for attention with hand-written gradients, which work with autograd and torch.compile.

Axes: B batch, H query heads, Q query rows, V channels of values.
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Remote code can put two copies of this file into one process; an operator's name must belong to one of them.
_NAMESPACE = "whatwhere_" + hashlib.sha256(__name__.encode()).hexdigest()[:16]


@torch.compiler.assume_constant_result  # torch.compile cannot trace it, but compiles again when the state changes.
def only_deterministic() -> bool:
    """Returns True if PyTorch is to refuse operations that are not deterministic."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def empty_results(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Returns an output (B, H, Q, V), and numbers (B, H, Q), for query, key and value."""
    query, _, value, *_ = tensors
    numbers = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
    return [query.new_empty(*query.shape[:3], value.shape[3]), numbers]


def in_transform() -> bool:
    """Returns True within a transform of `torch.func`, which supports no `autograd.Function` of the ordinary kind."""
    return torch._C._are_functorch_transforms_active()


def check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError if the shapes of query, key and value do not fit."""
    B, H, Q, D = query.shape
    G, K = key.shape[1], key.shape[2]
    if key.shape != (B, G, K, D) or value.shape[:3] != (B, G, K) or G == 0 or H % G or not 0 < Q <= K:
        raise ValueError(
            f"query={tuple(query.shape)!r}, key={tuple(key.shape)!r}, value={tuple(value.shape)!r} do not fit: they "
            "must be (B, H, Q, D), (B, G, K, D), (B, G, K, V) with H a multiple of G and Q from 1 to K."
        )


def _given(tensors: Sequence[torch.Tensor], present: Sequence[bool]) -> list[Any]:
    """Returns tensors, and None for those that are not present."""
    found = iter(tensors)
    return [next(found) if one else None for one in present]


def _one_by_one(operator: Any) -> Any:
    """Returns the rule of `torch.vmap` for an operator: one call for each member of the batch."""

    def rule(info: Any, dims: Any, *arguments: Any) -> Any:
        def member(index: int, one: Any, dim: Any) -> Any:
            if isinstance(one, (list, tuple)) and isinstance(dim, (list, tuple)):
                return [member(index, *pair) for pair in zip(one, dim, strict=True)]
            return one if dim is None else one.select(dim, index)

        calls = [operator(*map(functools.partial(member, index), arguments, dims)) for index in range(info.batch_size)]
        results = [torch.stack(parts) for parts in zip(*calls, strict=True)]
        return results, [0] * len(results)

    return rule


class Operator:
    """An attention as operators of PyTorch: forward, backward and decoding.

    Args:
        name: unique among the operators.
        settings: the schema of what they take besides tensors; the last is the probability of dropout.
        forward: a function (tensors, *settings) of query, key, value and others, some of them None. Returns the output,
            float numbers of the rows, and what else `backward` needs.
        backward: a function (gradients, tensors, results, *settings): gradients of the first two results, the second
            may be None; results of `forward`. Returns the gradients of the first tensors that are present.
        decode: a function (tensors, *settings) that returns the output for one query row without gradients, or None.
        empty: returns uninitialised results for tensors.
    """

    def __init__(
        self, name: str, settings: str, forward: Callable[..., Any], backward: Callable[..., Any],
        decode: Callable[..., torch.Tensor] | None = None, *,
        empty: Callable[[Sequence[Any]], list[torch.Tensor]] = empty_results,
    ) -> None:  # fmt: skip
        # Autograd does not support lists of tensors with None: operators take the tensors that are present. The first
        # `count` of them get gradients.
        given = f"Tensor[] tensors, bool[] present, int count, {settings}"

        @torch.library.custom_op(f"{_NAMESPACE}::{name}_forward", mutates_args=(), schema=f"({given}) -> Tensor[]")
        def run_forward(tensors, present, count, *settings):
            return list(forward(_given(tensors, present), *settings))

        @run_forward.register_fake
        def _(tensors, present, count, *settings):
            return empty(tensors)

        run_forward.register_vmap(_one_by_one(run_forward))
        results = "Tensor grad, Tensor? grad_numbers, Tensor[] results"

        @torch.library.custom_op(
            f"{_NAMESPACE}::{name}_backward", mutates_args=(), schema=f"({results}, {given}) -> Tensor[]"
        )
        def run_backward(grad, grad_numbers, results, tensors, present, count, *settings):
            return list(backward((grad, grad_numbers), _given(tensors, present), results, *settings))

        @run_backward.register_fake
        def _(grad, grad_numbers, results, tensors, present, count, *settings):
            return [one.new_empty(one.shape) for one in tensors[:count]]

        run_backward.register_vmap(_one_by_one(run_backward))

        def save(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
            tensors, *ctx.settings = inputs
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(*tensors, *output)

        def gradients(call: Callable, saved: Sequence[Any], settings: Sequence[Any], grads: Sequence[Any]) -> list:
            """Returns a gradient or None for each tensor; `call` is `run_backward`, or has its arguments."""
            size, (grad, grad_numbers, *_) = sum(settings[0]), grads
            found: Sequence[torch.Tensor] = []
            if grad is not None or grad_numbers is not None:
                grad = torch.zeros_like(saved[size]) if grad is None else grad
                found = call(grad, grad_numbers, saved[size:], saved[:size], *settings)
            return [*found, *[None] * (size - len(found))]

        def differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple:
            # Activation checkpointing allows reading `saved_tensors` only once.
            found = gradients(run_backward, list(ctx.saved_tensors), ctx.settings, grads)
            # PyTorch takes an empty list for a list of tensors.
            rest: list[Any] = [[] if isinstance(setting, list) and not setting else None for setting in ctx.settings]
            return found, *rest

        def refuse(ctx: Any, *grads: Any) -> None:
            raise NotImplementedError(
                f"{name} attention has no second derivative: use attn_implementation='eager' for gradients of gradients"
            )

        run_forward.register_autograd(differentiate, setup_context=save)
        run_backward.register_autograd(refuse)

        # Within transforms of `torch.func`, PyTorch supports this form only.
        class TransformedBackward(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(settings: tuple, results: int, *tensors: Any) -> tuple:
                grad, grad_numbers, *rest = tensors
                return tuple(run_backward(grad, grad_numbers, rest[:results], rest[results:], *settings))

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
                pass

            backward = staticmethod(refuse)

        def transformed_backward(grad: Any, grad_numbers: Any, results: Any, tensors: Any, *settings: Any) -> tuple:
            return TransformedBackward.apply(settings, len(results), grad, grad_numbers, *results, *tensors)

        class TransformedForward(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(settings: tuple, *tensors: torch.Tensor) -> tuple:
                return tuple(run_forward(list(tensors), *settings))

            @staticmethod
            def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
                ctx.settings, *tensors = inputs
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*tensors, *output)

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> tuple:
                return None, *gradients(transformed_backward, ctx.saved_tensors, ctx.settings, grads)

        self.transformed = TransformedForward.apply
        self.forward, self.backward, self.decode = run_forward, run_backward, None
        if decode is None:
            return

        @torch.library.custom_op(f"{_NAMESPACE}::{name}_decode", mutates_args=(), schema=f"({given}) -> Tensor")
        def run_decode(tensors, present, count, *settings):
            return decode(_given(tensors, present), *settings)

        @run_decode.register_fake
        def _(tensors, present, count, *settings):
            return empty_results(tensors)[0]

        self.decode = run_decode

    @staticmethod
    def arguments(differentiable: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the first arguments of the operators for tensors that get gradients, and others; some may be None."""
        tensors = [*differentiable, *others]
        present = [one is not None for one in tensors]
        return [one for one in tensors if one is not None], present, sum(present[: len(differentiable)])

    def __call__(self, differentiable: Sequence[Any], others: Sequence[Any], *settings: Any) -> list[torch.Tensor]:
        """Returns the output and the other results of `forward`, or only the output, of `decode`."""
        arguments = self.arguments(differentiable, others)
        if in_transform():
            tensors, *rest = arguments
            return list(self.transformed((*rest, *settings), *tensors))
        wanted = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in differentiable)
        if self.decode is not None and differentiable[0].shape[2] == 1 and not wanted and not settings[-1]:
            return [self.decode(*arguments, *settings)]
        return self.forward(*arguments, *settings)
