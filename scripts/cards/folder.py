"""Writes the card of a model folder from the results files in it."""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers

from ...model_card import NO_RESULTS
from ..conversion.record import RECORD, card_metadata
from ..evaluation.checkpoints import checked_loading
from ..evaluation.curves import curves_figure
from ..evaluation.data_description import curves_title, loss_unit, measured_text
from ..evaluation.figures import save_png
from ..evaluation.length_report import figure_of
from ..evaluation.results import read_json, results_of
from ..processes import is_first_process
from ..writing import write_text
from .content import model_card


def write_card(folder: str | pathlib.Path, *, name: str | None = None) -> pathlib.Path:
    """Writes README.md into a folder, from the other files in it, and returns its path.

    The model's name is by default the folder's.
    """
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
    about = read_json(folder / "card.json") if (folder / "card.json").is_file() else None
    results, weights = results_of(folder)
    first = next((key for key in results if key.startswith("length")), None)
    compared = _compared(folder, f"{first}.json", results[first]) if about and first else []
    figure = first or ("curves" if about and "curves" in results else None)
    if about and figure:
        _draw(folder, figure, results, compared, config.position_encoding)
    path = folder / "README.md"
    has_tokenizer = about["tokenizer"] if about else (folder / "tokenizer_config.json").is_file()
    card = model_card(
        config,
        results,
        name=name or folder.resolve().name,
        weights=weights,
        has_tokenizer=has_tokenizer,
        figure=f"{figure}.png" if figure and (folder / f"{figure}.png").is_file() else None,
        compared=compared,
        recipe_file="recipe.yaml" if (folder / "recipe.yaml").is_file() else None,
        place=about["weights"] if about else None,
        is_adapter=is_adapter,
        conversion=None if "results" in results else _conversion(folder, config),
    )
    write_text(path, str(card))
    return path


@contextlib.contextmanager
def card_of_run(folder: str | pathlib.Path) -> Iterator[None]:
    """Writes the card of a run that is finished in this context, in the first process.

    A run that was finished before gets it if it has none with its results: its process ended before it was written.
    """
    folder = pathlib.Path(folder)
    results = folder / "results.json"
    was_finished = results.exists()
    yield
    if results.exists() and is_first_process() and (not was_finished or not _has_results(folder / "README.md")):
        try:
            write_card(folder)
        except OSError as error:
            raise OSError(
                f"The run is finished, but its card cannot be written ({error}). Then: whatwhere card {folder}"
            ) from error


def _has_results(card: pathlib.Path) -> bool:
    """Returns whether a card exists that is not the short one, which models write when they are saved."""
    return card.is_file() and NO_RESULTS not in card.read_text(encoding="utf-8")


def _conversion(folder: pathlib.Path, config: Any) -> dict[str, Any] | None:
    """Returns what `whatwhere convert` recorded in a folder for the template, and the metadata of its card; or None."""
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    # Fine-tuning records only the new parameters.
    if "source" not in record:
        return None
    with torch.device("meta"):
        parameters = transformers.AutoModelForCausalLM.from_config(config).named_parameters()
    new = sum(parameter.numel() for name, parameter in parameters if name in record["new_parameters"])
    return {"source": record["source"], "new": new, **card_metadata(str(folder))}


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
