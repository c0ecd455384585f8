"""Reads checkpoints that this version did not write: older ones, and configurations of stock models.

It stays in the package: a saved folder has a configuration and weights of its own version.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging

from .position_rope import ALL_KEYS, unused_keys

logger = logging.get_logger(__name__)

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
# Keywords of `from_pretrained` that locate files.
_LOCATION = ("cache_dir", "local_files_only", "token", "revision", "subfolder")

# Names of weights before version 3.
_MOVED = ("output_gate", "output_norm", "query_norm", "key_norm", "key_shift", "value_shift")
_RENAMED = {
    **{rf"attn\.position_encoding\.fox\.{part}\.": f"attn.options.{part}." for part in _MOVED},
    r"attn\.position_encoding\.": "attn.encodings.",
    r"position_encoding\.": "shared_encodings.",
}


def older_weights(config_class: Any, name_or_path: Any, kwargs: dict[str, Any]) -> Callable[[Any], None] | None:
    """Adds older names of a checkpoint's weights to "key_mapping" in `kwargs`, the keywords of `from_pretrained`.

    Returns a function that changes the weights of the loaded model to those that compute the same, or None.
    """
    if name_or_path is None or kwargs.get("state_dict") is not None:
        return None
    location = {key: kwargs[key] for key in _LOCATION if key in kwargs}
    try:
        # The version belongs to the weights, so it is read from their folder and not from a passed config.
        saved, _ = PreTrainedConfig.get_config_dict(name_or_path, **location)
    except OSError:
        return None
    version = saved.get("_weights_version", 1)
    if saved.get("model_type") != config_class.model_type or version >= 3:
        return None
    kwargs["key_mapping"] = {**_RENAMED, **kwargs.get("key_mapping", {})}
    return _upgrade if version < 2 else None


@torch.no_grad()
def _upgrade(model: Any) -> None:
    for module in model.modules():
        upgrade = getattr(module, "upgrade", None)
        if callable(upgrade):
            upgrade()


def _move_pro_block(config_dict: dict[str, Any]) -> None:
    """Moves the parts of FoX's Pro block, which were parameters of the encoding before version 3, to their fields."""
    name, saved = config_dict.get("position_encoding"), config_dict.get("position_encoding_parameters") or {}
    parameters = dict(saved if name == "fox" else saved.get("fox", {}))
    if "pro" not in parameters:
        return
    pro = parameters.pop("pro")
    for field in ("output_gate", "output_norm", "qk_norm", "key_value_shift"):
        given = parameters.pop(field, None)
        config_dict[field] = pro if given is None else given
    config_dict["position_encoding_parameters"] = parameters if name == "fox" else {**saved, "fox": parameters}


def convert_config(config_dict: dict[str, Any], *, stock: bool) -> None:
    """Changes the dictionary of a configuration file, in place, to one that this version could have written.

    Drops, with a warning, what files may hold and a new configuration may not: negative token ids, a
    `problem_type` that is none, keys of `rope_parameters` that the type does not use, and `partial_rotary_factor` where
    the stock model ignores it. The `rope_parameters` of a `stock` model may have keys that are not known here.
    """
    for field in ("rope_parameters", "rope_scaling"):
        if not isinstance(given := config_dict.get(field), dict):
            continue
        unused = [key for key in unused_keys(given) if stock or key in ALL_KEYS]
        # Transformers writes both names of the type, and reads the newer one.
        dropped = {*unused, "type"} if "rope_type" in given else set(unused)
        config_dict[field] = {key: value for key, value in given.items() if key not in dropped}
        for key in unused:
            logger.warning(f"{field}[{key!r}] of the checkpoint has no effect with its rope_type: dropped.")
    rope = config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {}
    ignored = stock and rope.get("rope_type", rope.get("type", "default")) == "default"
    if ignored and (factor := rope.pop("partial_rotary_factor", 1.0)) != 1.0:
        logger.warning(f"partial_rotary_factor={factor!r} has no effect in the stock model: dropped.")
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config_dict.get(field)
        ids = value if isinstance(value, list) else [value]
        kept = [one for one in ids if not (isinstance(one, int) and one < 0)]
        if len(kept) < len(ids):
            config_dict[field] = kept or None
            logger.warning(f"{field}={value!r} of the checkpoint: a negative number is no token id and is dropped.")
    problem = config_dict.get("problem_type")
    if problem is not None and problem not in PROBLEM_TYPES:
        del config_dict["problem_type"]
        allowed = ", ".join(map(repr, PROBLEM_TYPES))
        logger.warning(f"problem_type={problem!r} of the checkpoint is not valid and is dropped. Allowed: {allowed}.")
    if not stock and config_dict.get("_weights_version", 1) < 3:
        _move_pro_block(config_dict)
