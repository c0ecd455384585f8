"""Loading of checkpoints, ours or stock, with one clear sentence when that fails; what lengths they serve."""

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from safetensors import SafetensorError
from torch import nn


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Returns what checkpoints are called in results: the last part of each path, or the whole ones if two end alike.

    Raises:
        ValueError: one is given twice.
    """
    for checkpoint in checkpoints:
        if checkpoints.count(checkpoint) > 1:
            raise ValueError(f"checkpoint={checkpoint!r} is given twice.")
    short = [pathlib.PurePath(checkpoint).name for checkpoint in checkpoints]
    return short if len(set(short)) == len(short) else list(checkpoints)


def choose_device(name: str | None = None) -> str:
    """Returns a device, by default the GPU if there is one; raises ValueError if it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    # PyTorch without CUDA raises AssertionError.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={name!r} is not valid: {error}") from error
    return name


@strict
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """How checkpoints are loaded.

    Attributes:
        device: as in `choose_device`.
        dtype: of the model's weights and activations.
        attn_implementation: None for the model's own choice.
        trust_remote_code: run the code in the checkpoint's folder.
    """

    device: str = "cpu"
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def config(self, checkpoint: str, **changes: Any) -> Any:
        """Returns a checkpoint's configuration with some fields changed; raises ValueError with the reason."""
        folder, trust = pathlib.Path(checkpoint), self.trust_remote_code
        if folder.exists() and not (folder / "config.json").is_file():
            raise ValueError(f"checkpoint={checkpoint!r} is not a model folder: it has no config.json.")
        try:
            return transformers.AutoConfig.from_pretrained(checkpoint, trust_remote_code=trust, **changes)
        except (OSError, ValueError) as error:
            where = "" if folder.exists() else "there is no such folder, and as a Hub id: "
            raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {where}{error}") from error

    def model(self, checkpoint: str, config: Any) -> Any:
        """Returns a checkpoint's model with a configuration, on the device; raises ValueError with the reason."""
        options = {"attn_implementation": self.attn_implementation, "trust_remote_code": self.trust_remote_code}
        options |= {"config": config, "dtype": getattr(torch, self.dtype)}
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options)
            return model.to(self.device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"checkpoint={checkpoint!r} cannot be loaded: {error}") from error

    def tokenizer(self, checkpoint: str) -> Any:
        """Returns a checkpoint's tokenizer; raises ValueError with the reason."""
        return load_tokenizer(checkpoint, trust_remote_code=self.trust_remote_code)


def load_tokenizer(checkpoint: str, *, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a folder or Hub id; raises ValueError with the reason if it cannot be loaded."""
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of checkpoint={checkpoint!r} cannot be loaded: {error}") from error


def trained_length_of(checkpoint: str, config: Any) -> int:
    """Returns the length a model was trained at: what its `results.json` says, else its configuration.

    Raises:
        ValueError: neither says it.
    """
    results = pathlib.Path(checkpoint) / "results.json"
    length = json.loads(results.read_text(encoding="utf-8")).get("length") if results.is_file() else None
    length = length or getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"checkpoint={checkpoint!r} does not say the length it was trained at: give --trained-length.")
    return length


def longest_length(model: nn.Module) -> int | None:
    """Returns the longest sequence that a model supports, or None if its position encoding sets no limit.

    Our models say so themselves. A stock model is limited if it looks positions up in a table of embeddings.
    """
    config: Any = model.config
    if hasattr(config, "position_encoding"):
        # The list of encodings beside this model's class: the package's, or the checkpoint's own copy.
        siblings = type(model).__module__.rpartition(".")[0]
        return importlib.import_module(f"{siblings}.position_registry").max_length(config)
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None
