"""`whatwhere push`: its help is in `cli/push.py`."""

import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from whatwhere_cli.push import parser

from ...model_card import (
    NO_RESULTS,
    given_metadata,
    is_of_trainer,
    is_template,
    read_card,
    sign,
    with_given,
    with_name,
)
from ..cards.folder import check_licence, with_new_licence, write_card
from ..errors import Refused
from ..evaluation.checkpoints import NETWORK_ERROR
from ..writing import write_json, write_text
from .card import without_folders

# What is pushed: files by their endings, some of them only by their names. Pickles are not.
_ENDINGS = {".json", ".md", ".png", ".svg", ".py", ".model", ".jinja", ".yaml"}
_NAMES = ("metrics.jsonl", "merges.txt", "vocab.txt")
_WEIGHTS = re.compile(r"(adapter_)?model.*\.safetensors")
_NOT_PUSHED = ("trainer_state.json",)
# In the repository, these are deleted if the run does not have them: old weights would be loaded.
_REPLACED = ["*.safetensors", "*.json", "*.jinja", "*.py"]


def staged(run: pathlib.Path, folder: pathlib.Path, repo: str, licence: str | None = None) -> None:
    """Fills a folder with what is pushed; weights are links.

    The folder of the run is one that `_check` accepts.
    """
    card: Any
    card, mark = read_card(run)
    # An edited card stays, and one with results that were copied with the weights.
    is_short = mark and NO_RESULTS in card.text and (run / "results.json").is_file()
    if card is None or is_short or is_template(card) or is_of_trainer(card):
        write_card(run, licence=licence)
    for path in sorted(run.iterdir()):
        target = folder / path.name
        if path.name == "additional_chat_templates":
            shutil.copytree(path, target)
        elif not _is_pushed(path):
            continue
        elif path.suffix == ".json" and not _is_of_model(path.name) and path.name != "sample.json":
            write_json(target, without_folders(json.loads(path.read_text(encoding="utf-8"))))
        elif path.name in ("recipe.yaml", "metrics.jsonl"):
            write_text(target, str(without_folders(path.read_text(encoding="utf-8"))))
        elif path.name != "README.md":
            target.symlink_to(path.resolve())
    written: Any
    written, mark = read_card(run)
    if mark:
        given, text = with_new_licence(given_metadata(written, mark), licence), written.text[: mark.start()]
        if licence is not None:
            # For later pushes.
            sign(written.data, text, mark["weights"], given).save(run / "README.md")
        # The code and the sample stay as they are, but for the name.
        head, code, rest = with_name(text, repo).partition("\n```python\n")
        sample, heading, rest = rest.rpartition("\n## Model\n")
        text = without_folders(head) + code + sample + heading + without_folders(rest)
        written = sign(written.data, text, mark["weights"], given)
    elif licence is not None:
        written.text = with_given(written.data, written.text, {"license": licence})
        written.save(run / "README.md")
    written.save(folder / "README.md")


def _check(run: pathlib.Path) -> None:
    """Raises ValueError for a folder that has no model, or an adapter of a model that others do not have."""
    adapter = run / "adapter_config.json"
    is_adapter = adapter.is_file() and not (run / "config.json").is_file()
    if not is_adapter and not (run / "config.json").is_file():
        raise Refused(f"run={str(run)!r} is not valid: it has no config.json or adapter_config.json.")
    if not any(_WEIGHTS.fullmatch(path.name) for path in run.iterdir()):
        raise Refused(f"run={str(run)!r} is not valid: it has no weights (*.safetensors).")
    base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "" if is_adapter else ""
    if os.path.isabs(base) or os.path.isdir(base):
        raise Refused(
            f"run={str(run)!r} is an adapter of a model in the folder {base!r}, which others do not have: push that "
            "model, and write its name on the Hub into adapter_config.json (base_model_name_or_path), or fine-tune "
            "with --lora --merge."
        )


def _is_pushed(path: pathlib.Path) -> bool:
    named = path.name in _NAMES or path.suffix in _ENDINGS or bool(_WEIGHTS.fullmatch(path.name))
    return path.is_file() and named and path.name not in _NOT_PUSHED and not path.name.startswith(".")


def _is_of_model(name: str) -> bool:
    """Returns True for files that Transformers and PEFT read."""
    own = ("config", "tokenizer", "special_tokens_map", "added_tokens", "vocab", "model", "chat_template")
    return name.removesuffix(".json").endswith(own) or name.startswith("model.safetensors")


def push(run: pathlib.Path, repo: str, *, private: bool = False, licence: str | None = None) -> str:
    """Pushes the model of a folder, and returns the address of the repository.

    Raises:
        ValueError: the folder or the name of the repository is not valid.
        OSError: nobody is logged in, or the Hub cannot be reached or refuses.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise Refused(f"repo={repo!r} is not valid: it must be like 'you/your-model'.") from error
    if "/" not in repo:
        raise Refused(f"repo={repo!r} is not valid: it must be like 'you/your-model'.")
    check_licence(licence)
    hub = HfApi()
    _check(run)
    read_card(run)
    try:
        # Before anything is written.
        hub.whoami()
        with tempfile.TemporaryDirectory() as folder:
            staged(run, pathlib.Path(folder), repo, licence)
            address = hub.create_repo(repo, private=private, exist_ok=True)
            message = f"Upload {run.resolve().name}"
            hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=_REPLACED)
    except LocalTokenNotFoundError as error:
        raise OSError("Nobody is logged in to the Hub. Run `hf auth login`, or set HF_TOKEN.") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = "the token is not valid" if status == 401 else error.server_message or str(error).splitlines()[0]
        raise OSError(f"The Hub refused repo={repo!r} (status {status}): {reason}") from error
    except (NETWORK_ERROR, ConnectionError) as error:
        raise OSError(f"The Hub cannot be reached ({type(error).__name__}). Nothing was lost; try again.") from error
    return str(address)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    options = parser().parse_args(arguments)
    address = push(options.run, options.repo, private=options.private, licence=options.licence)
    print(f"{options.run} is at {address}")
