"""The attention layers of a model: found, watched in forward passes, and drawn by frequency."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from ..evaluation.figures import wrapped


def attention_layers(model: Any) -> list[Any]:
    """Returns the attention layers of one of our models, in order."""
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    return [module for module in layers if hasattr(module, "encodings")]


def watched(owner: Any, name: str, watch: Callable[..., None]) -> contextlib.AbstractContextManager:
    """Within it, `watch(result, *arguments)` is called after every call of the method `owner.name`."""
    method = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        result = method(*arguments)
        watch(result, *arguments)
        return result

    return mock.patch.object(owner, name, call)


def wavelengths_of(frequencies: torch.Tensor) -> list[float | None]:
    """Returns the wavelengths in tokens of frequencies (F,) in radians per token; None for the frequency 0."""
    return [2 * math.pi / frequency if frequency else None for frequency in frequencies.tolist()]


def draw_heatmap(
    axes: Any, values: torch.Tensor, wavelengths: Sequence[float | None], *, label: str, title: str, **options: Any
) -> None:
    """Draws values (F, columns) with at most 8 wavelengths in tokens as labels of the rows."""
    image = axes.imshow(values.numpy(), aspect="auto", cmap="viridis", interpolation="nearest", **options)
    axes.figure.colorbar(image, ax=axes, label=label)
    every = -(-len(wavelengths) // 8)
    ticks = range(0, len(wavelengths), every)
    shown = [wavelengths[tick] for tick in ticks]
    axes.set_yticks(ticks, ["∞" if length is None else f"{length:,.0f}" for length in shown])
    axes.set_ylabel("wavelength (tokens)")
    axes.set_title(wrapped(title, 3.6), fontsize="medium")
