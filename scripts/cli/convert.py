"""The parser of `whatwhere convert`."""

import argparse
import pathlib

from .options import command_parser, json_value, name_or_list

DESCRIPTION = """Give a pretrained model another position encoding.

The source is a Llama, Mistral, Phi-3, Qwen2, Qwen3, SmolLM3 or GPT-2, or a model of ours.

    whatwhere convert HuggingFaceTB/SmolLM2-135M --position-encoding pope --output models/pope
    whatwhere finetune models/pope --train-file mytext/*.txt --output runs/pope

`--stock` writes a stock Llama (with RoPE, also scaled) or GPT-2 (with learned positions), which needs no code of ours.
It also exports a trained model: `whatwhere convert runs/rope --stock --output models/rope`.

Weights of the source are kept, with the channels of queries and keys turned where RoPE becomes PoPE. New parameters are
learned by fine-tuning. `cope+rope` starts with the source's logits, if that has RoPE in all layers."""


def parser() -> argparse.ArgumentParser:
    result = command_parser(
        "convert", "SOURCE --position-encoding NAME --output DIR [OPTIONS]", DESCRIPTION, check=_check
    )
    result.add_argument("source", metavar="SOURCE", help="a folder or a Hub id")
    result.add_argument(
        "--position-encoding",
        type=name_or_list,
        metavar="NAME",
        help="the new encoding; or a list, one for each layer or a pattern: '[rope, rope, rope, pope]'; with --stock, "
        "default: that of SOURCE",
    )
    result.add_argument("--position-encoding-parameters", type=json_value, metavar="JSON", help="its parameters")
    result.add_argument("--rope-parameters", type=json_value, metavar="JSON", help="RoPE's parameters")
    result.add_argument("--gguf-file", metavar="NAME", help="a GGUF file in SOURCE; its weights are dequantised")
    result.add_argument(
        "--calibration-file",
        type=pathlib.Path,
        metavar="FILE",
        help="a text on which the queries and keys of RoPE are measured where it becomes PoPE; default: a short one of "
        "the package",
    )
    result.add_argument(
        "--exact",
        action="store_true",
        help="PoPE in place of RoPE has the same logits, with three channels for each pair of RoPE: heads are 1.5 "
        "times as wide",
    )
    result.add_argument("--stock", action="store_true", help="write a stock model of Transformers, without code")
    result.add_argument("--output", required=True, type=pathlib.Path, metavar="DIR", help="an empty or new folder")
    return result


def _check(options: argparse.Namespace) -> None:
    if options.position_encoding is None and not options.stock:
        raise argparse.ArgumentTypeError("the following arguments are required: --position-encoding")
