"""`whatwhere convert`: see `conversion.py`."""

import argparse
import os
import pathlib
import re

from huggingface_hub import ModelCard
from transformers import AutoConfig

from ...model_card import weights_fingerprint
from ...position_registry import check_name
from ..conversion import RECORD, card_metadata, convert_checkpoint, fit_tokenizer
from ..data.tokenize import load_tokenizer, why_not_loaded
from ..evaluation.checkpoints import check_vocabulary, checked_loading
from ..parsers import command_parser, json_value, name_or_list
from ..writing import check_writable, write_json

DESCRIPTION = """Give a pretrained model another position encoding: Llama, Qwen2, Qwen3, GPT-2, or one of ours.

    whatwhere convert HuggingFaceTB/SmolLM2-135M --position-encoding pope --output models/pope
    whatwhere finetune models/pope --train-file mytext/*.txt --output runs/pope

Weights of the source are kept, with the channels of queries and keys reordered where RoPE becomes PoPE. New parameters
are learned by fine-tuning. `cope+rope` starts with the source's logits, if that has RoPE."""


def parser() -> argparse.ArgumentParser:
    result = command_parser("convert", "SOURCE --position-encoding NAME --output DIR [OPTIONS]", DESCRIPTION)
    result.add_argument("source", metavar="SOURCE", help="a folder or a Hub id")
    result.add_argument(
        "--position-encoding",
        required=True,
        type=name_or_list,
        metavar="NAME",
        help="the new encoding; or a list, one for each layer or a pattern: '[rope, rope, rope, pope]'",
    )
    result.add_argument("--position-encoding-parameters", type=json_value, metavar="JSON", help="its parameters")
    result.add_argument("--rope-parameters", type=json_value, metavar="JSON", help="RoPE's parameters")
    result.add_argument("--output", required=True, type=pathlib.Path, metavar="DIR", help="an empty or new folder")
    return result


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise ValueError(f"output={str(options.output)!r} is not valid: it must be an empty or new folder.")
    check_writable(options.output)
    # Before a large source is loaded.
    names = options.position_encoding
    for name in names if isinstance(names, list) else [names]:
        check_name(name)
    with checked_loading(options.source):
        AutoConfig.from_pretrained(options.source)
    try:
        tokenizer = load_tokenizer(options.source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint={options.source!r} is not valid: {why_not_loaded(options.source, error)}."
        ) from error
    model, new, dropped = convert_checkpoint(
        options.source, options.position_encoding, options.position_encoding_parameters, options.rope_parameters
    )
    check_vocabulary(options.source, tokenizer, model.config)
    if options.rope_parameters is not None:
        fit_tokenizer(tokenizer, model)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    _complete_metadata(options.output, options.source)
    local = weights_fingerprint(pathlib.Path(options.source)) if os.path.isdir(options.source) else None
    source = pathlib.Path(options.source).resolve().name if local else options.source
    record = {"source": source, "source_weights_sha256": local, "new_parameters": new, "dropped_parameters": dropped}
    write_json(options.output / RECORD, record)
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in new)
    print(f"{options.output}: {model.num_parameters():,} parameters, of which {count:,} are new.")
    for title, names in (("new", new), ("not used", dropped)):
        # One line for all layers.
        for name in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names):
            print(f"  {title}: {name}")
    print(f"Next: whatwhere finetune {options.output} --train-file FILES --output RUN")


def _complete_metadata(folder: pathlib.Path, source: str) -> None:
    """Adds the source to the model card in a folder, and its licence if the source's card states one."""
    card = ModelCard.load(folder / "README.md")
    known = card_metadata(source)
    # The Hub takes ids only; the source of a folder is known if it was made from one.
    if not os.path.isdir(source):
        known["base_model"] = source
    for key, value in known.items():
        card.data[key] = value
    card.save(folder / "README.md")
