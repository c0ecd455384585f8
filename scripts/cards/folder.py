"""Writes the card of a model folder from the results files in it."""

import contextlib
import difflib
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from ...model_card import (
    LICENCE_KEYS,
    NO_RESULTS,
    complete_data,
    given_metadata,
    is_of_trainer,
    is_template,
    origin_of,
    read_card,
)
from ..conversion.record import conversion_of
from ..errors import Refused
from ..evaluation.checkpoints import checked_loading, own_code
from ..evaluation.curves import curves_figure
from ..evaluation.data_description import curves_title, loss_unit, measured_text
from ..evaluation.figures import save_png
from ..evaluation.length_report import figure_of
from ..evaluation.results import read_json, results_of
from ..processes import is_first_process
from ..writing import write_json, write_text
from .content import Facts, model_card
from .sample import generation, take_sample

# Some identifiers of the Hub, to suggest them.
_LICENCES = (
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "gpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0", "mpl-2.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "unlicense", "openrail", "llama2"),
    *("llama3", "gemma", "other", "unknown"),
)


def write_card(folder: str | pathlib.Path, *, name: str | None = None, licence: str | None = None) -> pathlib.Path:
    """Writes README.md into a folder, from the other files in it, and returns its path.

    A card of the Trainer or TRL keeps its text, and gets the metadata that it lacks. A card with text of a user is
    refused. With the first card of weights, `sample.json` is written.

    Args:
        name: of the model, by default the folder's.
        licence: of the weights, an identifier of the Hub; by default the one given before, or the base model's.
    """
    check_licence(licence)
    folder = pathlib.Path(folder)
    adapter = folder / "adapter_config.json"
    is_adapter = adapter.is_file() and not (folder / "config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise ValueError(f"folder={str(folder)!r} is not a model folder: it has no config.json.")
    base = read_json(adapter)["base_model_name_or_path"] if is_adapter else str(folder)
    if os.path.isabs(base) and not os.path.isdir(base):
        raise ValueError(
            f"folder={str(folder)!r} is an adapter of a model in {base!r}, and there is no such folder. Write its path "
            "into adapter_config.json (base_model_name_or_path); `whatwhere finetune` saves a full model with --lora "
            "--merge."
        )
    with checked_loading(base, "folder"):
        config = transformers.AutoConfig.from_pretrained(base)
    if not hasattr(config, "position_encoding"):
        raise ValueError(
            f"folder={str(folder)!r} is not valid: its model_type {config.model_type!r} is not one of this package."
        )
    if not hasattr(config, "encoding_names"):
        raise own_code(str(folder), "folder")
    if not is_adapter:
        # Of the card that is replaced, where the configuration does not state it.
        config.origin = origin_of(folder, config.origin)
    path, (old, mark) = folder / "README.md", replaced_card(folder)
    if old is not None and mark is None and is_of_trainer(old):
        if name is not None:
            raise Refused(
                f"name={name!r} has no effect: {str(path)!r} is a card of the Trainer or TRL, and keeps its text."
            )
        complete_data(old, config)
        if licence is not None:
            old.data["license"] = licence
        old.save(path)
        return path
    about = read_json(folder / "card.json") if (folder / "card.json").is_file() else None
    results, weights = results_of(folder)
    first = next((key for key in results if key.startswith("length")), None)
    compared = _compared(folder, f"{first}.json", results[first]) if about and first else []
    if about:
        figure = first or ("curves" if "curves" in results else None)
    else:
        figure = next((key for key in results if key.startswith("length") and (folder / f"{key}.png").is_file()), None)
    if about and figure:
        _draw(folder, figure, results, compared, config.position_encoding)
    has_tokenizer = about["tokenizer"] if about else (folder / "tokenizer_config.json").is_file()
    facts = Facts(
        config=config,
        results=results,
        has_tokenizer=has_tokenizer,
        has_chat_template=_has_chat_template(folder),
        figure=f"{figure}.png" if figure and (folder / f"{figure}.png").is_file() else None,
        compared=compared,
        recipe_file="recipe.yaml" if (folder / "recipe.yaml").is_file() else None,
        place=about["weights"] if about else None,
        is_adapter=is_adapter,
        conversion={} if "results" in results else _conversion(folder, config),
    )
    if has_tokenizer and not about and "sample" not in results:
        sample = take_sample(folder, config, facts.data, *generation(facts.data, facts.conversion))
        if sample is not None:
            results["sample"] = {**sample, "weights_sha256": weights}
            write_json(folder / "sample.json", results["sample"])
    given = with_new_licence(given_metadata(old, mark), licence)
    card = model_card(facts, name=name or folder.resolve().name, weights=weights, given=given)
    write_text(path, str(card))
    return path


def _has_chat_template(folder: pathlib.Path) -> bool:
    tokenizer = folder / "tokenizer_config.json"
    inside = tokenizer.is_file() and bool(read_json(tokenizer).get("chat_template"))
    return inside or (folder / "chat_template.jinja").is_file()


def replaced_card(folder: pathlib.Path) -> tuple[Any, Any]:
    """Returns `read_card` of a folder; raises Refused for a card that cannot be read, or with text of a user."""
    try:
        card, mark = read_card(folder)
    except ValueError as error:
        raise Refused(f"{error} Correct it, or move it away for a new card.") from error
    if card is not None and mark is None and not is_template(card) and not is_of_trainer(card):
        raise Refused(
            f"{str(folder / 'README.md')!r} was written or edited by hand, and is kept: move it away for a new card. "
            "A new card only keeps changes of the metadata."
        )
    return card, mark


def check_licence(licence: str | None) -> None:
    """Raises Refused for a licence that is not an identifier of the Hub."""
    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        near = difflib.get_close_matches(licence.lower(), _LICENCES, n=1)
        meant = f"Did you mean {near[0]!r}?" if near else "Examples: 'apache-2.0', 'mit', 'cc-by-4.0'."
        raise Refused(f"licence={licence!r} is not valid: it must be an identifier of the Hub. {meant}")


def with_new_licence(given: dict[str, Any], licence: str | None) -> dict[str, Any]:
    """Returns metadata that a user has given, with a new licence if there is one."""
    if licence is None:
        return given
    return {key: value for key, value in given.items() if key not in LICENCE_KEYS} | {"license": licence}


@contextlib.contextmanager
def card_of_run(folder: str | pathlib.Path) -> Iterator[None]:
    """Writes the card of a run that is finished in this context, in the first process; one by hand is kept.

    A run that was finished before gets it if it has none with its results: its process ended before it was written.
    """
    folder = pathlib.Path(folder)
    results = folder / "results.json"
    was_finished = results.exists()
    yield
    if results.exists() and is_first_process():
        try:
            if not was_finished or not _has_results(folder):
                write_card(folder)
        except Refused as error:
            print(f"The run is finished, but no card is written: {error}", file=sys.stderr)
        except OSError as error:
            raise OSError(
                f"The run is finished, but its card cannot be written ({error}). Then: whatwhere card {folder}"
            ) from error


def _has_results(folder: pathlib.Path) -> bool:
    """Returns whether a folder has a generated card that is not the short one, which models write when saved."""
    found, mark = replaced_card(folder)
    return mark is not None and NO_RESULTS not in found.text


def _conversion(folder: pathlib.Path, config: Any) -> dict[str, Any]:
    """Returns what `whatwhere convert` recorded in a folder; empty without a record."""
    if not (record := conversion_of(folder)):
        return {}
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    new = sum(one.numel() for name, one in model.named_parameters() if name in record["new_parameters"])
    return {**record, "parameters": model.num_parameters(), "new": new}


def _compared(folder: pathlib.Path, name: str, own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the entries of other cards that were measured on the same tokens, named by their folders."""
    texts = {entry["tokens_sha256"] for entry in own["checkpoints"]}
    found = []
    for path in sorted(folder.parent.glob(f"*/{name}")):
        if path.parent != folder and (path.parent / "card.json").is_file():
            entries = [entry for entry in read_json(path)["checkpoints"] if entry["variant"] is None]
            found += [{**entry, "name": path.parent.name} for entry in entries if entry["tokens_sha256"] in texts]
    return found


def _draw(
    folder: pathlib.Path,
    name: str,
    results: Mapping[str, Any],
    compared: Sequence[Mapping[str, Any]],
    encoding: Any,
) -> None:
    """Draws the figure of a card into its folder, replacing all PNG files there, reproducibly."""
    for path in folder.glob("*.png"):
        path.unlink()
    content = results[name]
    if name == "curves":
        training = results["results"]
        about = {"title": curves_title(training), "unit": loss_unit(training)}
        save_png(curves_figure({"": content}, [encoding], **about), folder / f"{name}.png", dpi=100)
        return
    own = [{**entry, "name": folder.name} for entry in content["checkpoints"]]
    title = measured_text(content["data"], own)
    save_png(figure_of([*own, *map(dict, compared)], title=title), folder / f"{name}.png")
