"""The learned phase shifts delta of a PoPE model (2509.10534, Eq. 5), by layer, head and frequency.

Axes: F frequencies, L layers, H heads.
"""

import math
import pathlib
from typing import Any

import torch

from ...position_pope import pope_frequencies
from ..evaluation.figures import new_figure, save_figure
from .layers import attention_layers, draw_heatmap, wavelengths_of


def read(model: Any) -> dict[str, Any]:
    """Returns the entry of `deltas.json`: deltas (L, H, F) in radians, folded into [-2 pi, 0] as in the model.

    `at_bounds` is the share of deltas exactly at a bound; `outside` is that of the weights outside [-2 pi, 0], which
    the model reflects at the bounds, and a clamp would hold there. Raises ValueError if the model has no deltas.
    """
    name = getattr(model.config, "position_encoding", None)
    if name != "pope":
        raise ValueError(f"position_encoding={name!r} has no learned phase shifts. Allowed: 'pope'.")
    layers = attention_layers(model)
    parts = [layer.encodings["pope"] for layer in layers]
    parameters = parts[0].parameters_
    if not parameters.use_delta:
        raise ValueError(
            "position_encoding_parameters['use_delta']=False: this model has no learned phase shifts. Allowed: True."
        )
    with torch.inference_mode():
        deltas = torch.stack([part.delta() for part in parts]).double().cpu()
        weights = torch.stack([part.delta.weight for part in parts]).double().cpu()
    frequencies = pope_frequencies(model.config, parameters).double()
    # The model's bounds, in float32.
    lowest = torch.tensor(-2 * math.pi, dtype=torch.float32).double()
    return {
        "delta_init": parameters.delta_init,
        "layers": [layer.layer_idx for layer in layers],
        "frequencies": frequencies.tolist(),
        "wavelengths": wavelengths_of(frequencies),
        "deltas": deltas.tolist(),
        "mean": deltas.mean().item(),
        "smallest": deltas.min().item(),
        "largest": deltas.max().item(),
        "at_bounds": ((deltas == 0) | (deltas == lowest)).double().mean().item(),
        "outside": ((weights > 0) | (weights < lowest)).double().mean().item(),
    }


def draw(entry: dict[str, Any], stem: str | pathlib.Path) -> list[pathlib.Path]:
    """Draws a heatmap of frequencies by layers and heads; returns the paths of the PNG and the SVG."""
    deltas = torch.tensor(entry["deltas"], dtype=torch.float64)
    layers, heads, frequencies = deltas.shape
    figure = new_figure(8, 4.4)
    axes = figure.add_subplot()
    # The colour scale is set by the extremes, since small values would be invisible on the scale of the bounds.
    values = deltas.permute(2, 0, 1).reshape(frequencies, layers * heads)
    title = f"{entry['name']}: learned phase shifts"
    draw_heatmap(axes, values, entry["wavelengths"], label="delta (radians)", title=title)
    for layer in range(1, layers):
        axes.axvline(layer * heads - 0.5, color="white", linewidth=1)
    axes.set_xticks([layer * heads + (heads - 1) / 2 for layer in range(layers)], [str(i) for i in entry["layers"]])
    axes.set_xlabel(f"layer, {heads} {'head' if heads == 1 else 'heads'} each")
    return save_figure(figure, stem, palette=False)
