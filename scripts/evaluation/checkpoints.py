"""Loads checkpoints, ours or stock, with clear errors; finds the length they support."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import inspect
import json
import os
import pathlib
import shlex
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import get_session
from safetensors import SafetensorError
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ...model_card import weights_fingerprint
from ...position_registry import POSITION_ENCODINGS
from ..processes import ALONE, Processes, join
from .results import read_json

# lm-eval's max_length (tokens) for models without a limit: longer than any question.
MAX_LENGTH = 1 << 17
# Fields of configurations that change nothing of what a model computes; the precision is an option here.
_IMMATERIAL = {"_name_or_path", "auto_map", "dtype", "origin", "transformers_version"}

# Of the library for HTTP, which is another one in each version of huggingface_hub.
NETWORK_ERROR: Any = HfHubHTTPError.__bases__[0]


def names_of(checkpoints: Sequence[str]) -> list[str]:
    """Returns the names of checkpoints in results: the last part of each path, or the whole paths if two are equal."""
    for checkpoint in checkpoints:
        if checkpoints.count(checkpoint) > 1:
            raise ValueError(f"checkpoint={checkpoint!r} is given twice.")
    short = [pathlib.PurePath(checkpoint).name for checkpoint in checkpoints]
    return short if len(set(short)) == len(short) else list(checkpoints)


def output_of(checkpoints: Sequence[str], name: str) -> pathlib.Path:
    """Returns the default of `--output`: the folder of a single checkpoint, else `name`."""
    alone = len(checkpoints) == 1 and os.path.isdir(checkpoints[0])
    return pathlib.Path(checkpoints[0] if alone else name)


def weights_of(checkpoint: str | pathlib.Path) -> str | None:
    """Returns the fingerprint of a checkpoint's weights, or None if they are not in a folder here.

    Files are read again only if their size or time of writing has changed.
    """
    folder = pathlib.Path(checkpoint).resolve()
    stats = [(file.name, file.stat()) for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")])]
    state = tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return _fingerprint(folder, state) if any(folder.glob("*.safetensors")) else None


@functools.lru_cache(maxsize=64)
def _fingerprint(folder: pathlib.Path, state: object) -> str:
    return weights_fingerprint(folder)


def choose_device(name: str | None = None) -> str:
    """Returns a device, by default the GPU if there is one; raises ValueError if it cannot be used."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=name)
    # PyTorch without CUDA raises AssertionError.
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={name!r} is not valid: {error}") from error
    return name


def check_finished(checkpoint: str, field: str = "checkpoint") -> None:
    """Raises ValueError if a folder is that of a run which has not written its model yet."""
    folder = pathlib.Path(checkpoint)
    if any((folder / name).exists() for name in ("config.json", "adapter_config.json", "results.json")):
        return
    for record, command in (("recipe.yaml", "train"), ("finetune.json", "finetune")):
        if (folder / record).is_file():
            raise ValueError(
                f"{field}={checkpoint!r} is a run that is not finished. Continue it with: "
                f"{shlex.join(['whatwhere', command, '--output', checkpoint, '--resume'])}"
            )


@functools.cache
def _check_hub(checkpoint: str, field: str) -> None:
    """Raises ValueError for a name that is no folder, if it is no Hub id either or the Hub does not answer.

    Transformers asks for every file, and several times, before it says that it has no connection.
    """
    parts = checkpoint.split("/")
    is_path = checkpoint.startswith((".", "/", "~")) or os.path.isabs(checkpoint) or len(parts) > 2
    if not is_path and isinstance(try_to_load_from_cache(checkpoint, "config.json"), str):
        return
    meant = _nearest_folder(checkpoint)
    if is_path or (len(parts) == 2 and os.path.isdir(parts[0])):
        raise ValueError(
            f"{field}={checkpoint!r} is not valid: there is no such folder. Allowed: one, or a Hub id.{meant}"
        )
    if constants.HF_HUB_OFFLINE:
        return
    try:
        # An answer of any status.
        get_session().head(hf_hub_url(checkpoint, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (NETWORK_ERROR, OSError) as error:
        raise ValueError(
            f"{field}={checkpoint!r} cannot be loaded: there is no such folder, and the Hub does not answer "
            f"({type(error).__name__}).{meant}"
        ) from error


def _nearest_folder(checkpoint: str) -> str:
    """Returns a sentence with the folder whose path is the most similar, or nothing."""
    found = pathlib.Path()
    for part in pathlib.Path(checkpoint).parts:
        if not (found / part).is_dir():
            names = [path.name for path in found.iterdir() if path.is_dir()] if os.access(found, os.R_OK) else []
            if not (near := difflib.get_close_matches(part, names, n=1)):
                return ""
            part = near[0]
        found /= part
    return f" Did you mean {str(found)!r}?"


def own_code(checkpoint: str, field: str = "checkpoint") -> ValueError:
    """Returns the error for a checkpoint whose position encoding only its own code has."""
    return ValueError(
        f"{field}={checkpoint!r} needs code that is in the checkpoint. Read it; then import the file of its position "
        "encoding, `whatwhere --import FILE COMMAND`, or let all of its code run, with --trust-remote-code, where the "
        "command has this option."
    )


@contextlib.contextmanager
def checked_loading(checkpoint: str, field: str = "checkpoint") -> Iterator[None]:
    """Turns the errors of loading a checkpoint into ValueErrors that name it and the field that it comes from."""
    if os.path.isfile(checkpoint):
        raise ValueError(f"{field}={checkpoint!r} is not valid: it is a file. Allowed: a folder or a Hub id.")
    if not os.path.exists(checkpoint):
        _check_hub(checkpoint, field)
    try:
        yield
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError, struct.error) as error:
        folder = pathlib.Path(checkpoint)
        check_finished(checkpoint, field)
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            raise ValueError(
                f"{field}={checkpoint!r} cannot be loaded (it is an adapter: `whatwhere finetune` saves a full model "
                "with --lora --merge)."
            ) from error
        if "`trust_remote_code=True`" in str(error):
            raise own_code(checkpoint, field) from error
        where, meant = "", ""
        if not folder.exists():
            where, meant = (
                " (there is no such folder here, so it was looked up on the Hub)",
                _nearest_folder(checkpoint),
            )
        raise ValueError(f"{field}={checkpoint!r} cannot be loaded{where}: {error}{meant}") from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """How checkpoints are loaded, and by which processes; errors are ValueErrors that name the checkpoint."""

    device: str = "cpu"
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    processes: Processes = ALONE

    def config(self, checkpoint: str, **changes: Any) -> Any:
        """Returns a checkpoint's configuration with `changes` applied."""
        with checked_loading(checkpoint):
            return transformers.AutoConfig.from_pretrained(
                checkpoint, trust_remote_code=self.trust_remote_code, **changes
            )

    def model(self, checkpoint: str, config: Any) -> Any:
        """Loads a checkpoint with a configuration onto the device."""
        options = {"attn_implementation": self.attn_implementation, "trust_remote_code": self.trust_remote_code}
        options |= {"config": config, "dtype": getattr(torch, self.dtype)}
        with checked_loading(checkpoint):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, **options)
            return model.to(self.device).eval()

    def model_sha256(self, checkpoint: str, config: Any) -> str:
        """Returns the SHA-256 of a checkpoint's configuration, and of the code that is loaded with it, if any."""
        fields = {key: value for key, value in config.to_dict().items() if key not in _IMMATERIAL}
        digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
        # Encodings from files of the user.
        for name in getattr(config, "encoding_names", ()):
            if (cls := POSITION_ENCODINGS.get(name)) is not None and cls.code is not None:
                digest.update(cls.code[1].encode())
        own = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if self.trust_remote_code and own:
            with checked_loading(checkpoint):
                # Transformers copies the code into a folder of its own, also from the Hub.
                code = pathlib.Path(inspect.getfile(get_class_from_dynamic_module(own, checkpoint))).parent
            for file in sorted(code.glob("*.py")):
                digest.update(file.read_bytes())
        return digest.hexdigest()

    def tokenizer(self, checkpoint: str, config: Any) -> Any:
        """Returns a checkpoint's tokenizer; raises ValueError if its text can have tokens that the model has not."""
        with checked_loading(checkpoint):
            tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=self.trust_remote_code)
        check_vocabulary(checkpoint, tokenizer, config)
        return tokenizer


def check_vocabulary(name: str, tokenizer: Any, config: Any, field: str = "checkpoint") -> None:
    """Raises ValueError if a tokenizer has tokens of text that the model has not.

    Added special tokens, such as one for padding, are not tokens of text, except for those at its beginning and end.
    """
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = set(tokenizer.get_vocab().values()) - special
    needed = 1 + max([*ids, tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0])
    size = config.get_text_config().vocab_size
    if needed > size:
        raise ValueError(
            f"{field}={name!r} is not valid: its tokenizer has {needed} tokens, the model has {size} (vocab_size). "
            f"Give a tokenizer that fits, or save the model after `resize_token_embeddings({needed})`."
        )


def trained_length_of(checkpoint: str, config: Any) -> int:
    """Returns the length a model was trained at, from its `results.json`, else from its configuration."""
    results = pathlib.Path(checkpoint) / "results.json"
    length = read_json(results).get("length") if results.is_file() else None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn":
        # `max_position_embeddings` is the scaled length.
        length = length or rope.get("original_max_position_embeddings")
    length = length or getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"checkpoint={checkpoint!r} does not state its trained length: give --trained-length.")
    return length


def longest_length(model: nn.Module) -> int | None:
    """Returns the longest sequence that a model supports, or None if its position encoding sets no limit."""
    config: Any = model.config
    if hasattr(config, "position_encoding"):
        shared: Any = model.base_model.shared_encodings  # type: ignore[union-attr]
        return min(shared.max_lengths.values(), default=None)
    # A stock model is limited by its table of position embeddings, if it has one.
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and (leaf == "wpe" or "position" in leaf):
            return module.num_embeddings - getattr(module, "offset", 0)
    return None


def loading_of(options: argparse.Namespace) -> Loading:
    """Joins the other processes; returns the values of `add_loading`. ValueError if the device cannot be used."""
    given = {name: getattr(options, name) for name in ("dtype", "attn_implementation", "trust_remote_code")}
    return Loading(processes=join(options.device), device=choose_device(options.device), **given)
