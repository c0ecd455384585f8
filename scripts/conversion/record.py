"""What a folder states about the origin of its weights."""

import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import logging

from ...model_card import ORIGIN_KEYS
from ..evaluation.results import read_json

logger = logging.get_logger(__name__)

# The file in a converted folder that names the source, and lists the parameters that are new.
RECORD = "conversion.json"


def prompt_of(folder: Path) -> str | None:
    """Returns the prompt that the results of a run, or a conversion of one, state; None without one."""
    if (folder / "results.json").is_file():
        return read_json(folder / "results.json").get("data", {}).get("prompt")
    return read_json(folder / RECORD).get("prompt") if (folder / RECORD).is_file() else None


def conversion_of(folder: Path) -> dict[str, Any]:
    """Returns the record of a converted model that was not trained since; empty for another folder."""
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    # Fine-tuning records only the new parameters.
    return record if "source" in record else {}


def card_metadata(source: str) -> dict[str, Any]:
    """Returns what a checkpoint's card states of `ORIGIN_KEYS`: base model, licence and languages."""
    local = os.path.isdir(source)
    path = os.path.join(source, "README.md") if local else source
    known: dict[str, Any] = {}
    if not local or os.path.isfile(path):
        try:
            known = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
        except (OSError, ValueError, HfHubHTTPError, yaml.YAMLError) as error:
            logger.warning(f"The card of {source!r} cannot be read, so its licence is not known: {error}")
    return {key: known[key] for key in ORIGIN_KEYS if isinstance(known.get(key), (str, list))}
