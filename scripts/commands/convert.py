"""`whatwhere convert`: see `conversion/folder.py`."""

import argparse
import pathlib
import re
import shlex

from ..cards.folder import write_card
from ..conversion.folder import convert_folder
from ..errors import program
from ..parsers import command_parser, json_value, name_or_list

DESCRIPTION = """Give a pretrained model another position encoding.

The source is a Llama, Mistral, Phi-3, Qwen2, Qwen3, SmolLM3 or GPT-2, or a model of ours.

    whatwhere convert HuggingFaceTB/SmolLM2-135M --position-encoding pope --output models/pope
    whatwhere finetune models/pope --train-file mytext/*.txt --output runs/pope

Weights of the source are kept, with the channels of queries and keys turned where RoPE becomes PoPE. New parameters are
learned by fine-tuning. `cope+rope` starts with the source's logits, if that has RoPE in all layers."""


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
    result.add_argument("--gguf-file", metavar="NAME", help="a GGUF file in SOURCE; its weights are dequantised")
    result.add_argument("--output", required=True, type=pathlib.Path, metavar="DIR", help="an empty or new folder")
    return result


def main(arguments: list[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    encoding = options.position_encoding, options.position_encoding_parameters, options.rope_parameters
    model, new, dropped = convert_folder(options.source, options.output, *encoding, gguf_file=options.gguf_file)
    count = sum(parameter.numel() for name, parameter in model.named_parameters() if name in new)
    print(f"{options.output}: {model.num_parameters():,} parameters, of which {count:,} are new.")
    # The card loads it again, for its sample.
    del model
    write_card(options.output)
    for title, names in (("new", new), ("not used", dropped)):
        # One line for all layers.
        for name in dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names):
            print(f"  {title}: {name}")
    print(f"Next: {shlex.join(program())} finetune {options.output} --train-file FILES --output RUN")
