"""Changes of a trained model's position encoding at test time, for comparison in length tests.

A variant changes the configuration, not the weights. With s = max(1, window / trained length):

* `interpolation`: RoPE's positions are divided by s (position interpolation, Chen et al. 2023, 2306.15595);
* `yarn`: RoPE's low frequencies are divided by s, high frequencies are kept, a ramp connects both, and the logits are
  scaled (YaRN, Peng et al. 2023, 2309.00071);
* `relative-capped`: relative positions beyond the table use its last entry (CoPE paper, 5.4, Figure 3);
* `relative-none`: relative positions beyond the table have no embedding (the plain relative positions of that figure).

The first two apply to models with one unscaled RoPE for all layers; Transformers computes them (`rope_parameters` with
`rope_type` "linear" and "yarn"). The others apply to `relative`, alone, in a sum or in a plan by layer, with a table as
long as the trained length.
"""

from typing import Any

from ...position_base import suggest
from ...position_plan import is_nested

ROPE_TYPES = {"interpolation": "linear", "yarn": "yarn"}
BEYOND = {"relative-capped": "last", "relative-none": "none"}
VARIANTS = (*ROPE_TYPES, *BEYOND)


def changes(variant: str, config: Any, *, trained_length: int, length: int) -> dict[str, Any] | None:
    """Returns the fields of a configuration that a variant changes for windows of `length` tokens.

    None if the variant does not apply to this configuration, or changes nothing.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variants={variant!r} is not valid. {suggest(variant, VARIANTS)}")
    if variant in ROPE_TYPES:
        rope = getattr(config, "rope_parameters", None) or {}
        if "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
            return None
        scaled = {**rope, "rope_type": ROPE_TYPES[variant], "factor": max(1.0, length / trained_length)}
        if variant == "yarn":
            scaled["original_max_position_embeddings"] = trained_length
        return {"rope_parameters": scaled}
    pattern = getattr(config, "position_encoding", "")
    names = [pattern] if isinstance(pattern, str) else pattern
    if not any("relative" in name.split("+") for name in names):
        return None
    given = config.position_encoding_parameters
    relative = given["relative"] if is_nested(pattern) else given
    if relative["num_positions"] != trained_length or relative["beyond"] == BEYOND[variant]:
        return None
    relative = {**relative, "beyond": BEYOND[variant]}
    return {"position_encoding_parameters": {**given, "relative": relative} if is_nested(pattern) else relative}
