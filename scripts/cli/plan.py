"""The parser of `whatwhere plan`."""

import argparse

from .options import command_parser

DESCRIPTION = """Print what a recipe needs: parameters, memory of a device, FLOPs and time. Loads no text or weights.

    whatwhere plan openwebtext --devices 8 --set training.micro_batch_size=8 --device-memory 80 --device H100
    whatwhere plan llama_7b --devices 64 --device-memory 80 --device H100

A training step is traced without allocating its tensors. Memory is that of the tensors; time is that of the steps."""


def parser() -> argparse.ArgumentParser:
    result = command_parser("plan", "RECIPE [OPTIONS]", DESCRIPTION)
    result.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    result.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="replace a key of the recipe")
    result.add_argument("--devices", type=int, default=1, metavar="N", help="the number of GPUs; default 1")
    result.add_argument("--device-memory", type=float, metavar="GB", help="memory of a GPU: says if the run fits")
    result.add_argument("--device", metavar="NAME", help="the GPU, such as H100, to estimate the time")
    result.add_argument("--device-tflops", type=float, metavar="N", help="peak bf16 TFLOP/s, instead of --device")
    result.add_argument(
        "--utilisation", type=float, default=0.4, metavar="X", help="fraction of the peak that is reached; default 0.4"
    )
    return result
