"""What can be changed at test time in the position encoding of a trained model: the comparison curves of length tests.

A variant changes the configuration and no weight. What it changes may depend on the length of the window: with factor
s = window / trained length, and at least 1,

* `interpolation`: RoPE's positions are divided by s (position interpolation, Chen et al. 2023, 2306.15595);
* `yarn`: RoPE's slow frequencies are divided by s, its fast ones are not, those between in part, and the logits are
  scaled (YaRN, Peng et al. 2023, 2309.00071);
* `relative-capped`: relative positions beyond the table take its last entry (CoPE paper, 5.4, Figure 3);
* `relative-none`: relative positions beyond the table have no embedding (the same figure's plain relative positions).

RoPE's are computed by Transformers (`rope_parameters` with `rope_type` "linear" and "yarn").
"""

from collections.abc import Callable
from typing import Any

from ...position_base import suggest


class DoesNotApply(ValueError):
    """A variant means nothing for a checkpoint; the message says why, and goes on after "..., because "."""


def changes(variant: str, config: Any, *, trained_length: int, length: int) -> dict[str, Any]:
    """Returns the fields of a configuration that a variant changes for windows of a length.

    Raises:
        ValueError: there is no such variant.
        DoesNotApply: it means nothing for this configuration.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variants={variant!r} is not valid. {suggest(variant, VARIANTS)}")
    return VARIANTS[variant](config, trained_length, length)


def _scaled_rope(rope_type: str) -> Callable[[Any, int, int], dict[str, Any]]:
    def changed(config: Any, trained_length: int, length: int) -> dict[str, Any]:
        rope = getattr(config, "rope_parameters", None)
        if not rope:
            raise DoesNotApply("it has no rotary positions")
        if "rope_theta" not in rope:
            raise DoesNotApply("its layers differ in their rotary positions")
        if rope.get("rope_type", "default") != "default":
            raise DoesNotApply(f"its rotary positions are scaled already (rope_type={rope['rope_type']!r})")
        scaled = {**rope, "rope_type": rope_type, "factor": max(1.0, length / trained_length)}
        if rope_type == "yarn":
            scaled["original_max_position_embeddings"] = trained_length
        return {"rope_parameters": scaled}

    return changed


def _relative_beyond(beyond: str) -> Callable[[Any, int, int], dict[str, Any]]:
    def changed(config: Any, trained_length: int, length: int) -> dict[str, Any]:
        names = str(getattr(config, "position_encoding", None)).split("+")
        if "relative" not in names:
            raise DoesNotApply("it has no relative positions")
        given = config.position_encoding_parameters
        relative = given if len(names) == 1 else given["relative"]
        if relative["num_positions"] != trained_length:
            raise DoesNotApply(
                f"its table has {relative['num_positions']} positions and it was trained at {trained_length} tokens"
            )
        if relative["beyond"] == beyond:
            raise DoesNotApply(f"it is so already (beyond={beyond!r})")
        relative = {**relative, "beyond": beyond}
        parameters = relative if len(names) == 1 else {**given, "relative": relative}
        return {"position_encoding_parameters": parameters}

    return changed


# Each takes the configuration, the trained length and the length of a window.
VARIANTS: dict[str, Callable[[Any, int, int], dict[str, Any]]] = {
    "interpolation": _scaled_rope("linear"),
    "yarn": _scaled_rope("yarn"),
    "relative-capped": _relative_beyond("last"),
    "relative-none": _relative_beyond("none"),
}
