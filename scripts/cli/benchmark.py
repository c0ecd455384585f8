"""Speed and memory of attention and of models. Only providers that pass a check of their results are timed.

    whatwhere benchmark --quick                              # on a laptop: a minute; without --quick about ten
    whatwhere benchmark --lengths 1024,4096 --threads 2
    whatwhere benchmark --device cuda --minutes 5            # `whatwhere gpu-check` checks the kernels first
    whatwhere benchmark --device cuda --providers cope-triton-half,pope-triton --lengths 4096

Parts: `attention` and `model`, with ratios to RoPE + SDPA (on a GPU its fastest backend) and to the stock Llama;
`data`, which measures `whatwhere prepare` and reading (15 minutes and 5 GB in a temporary folder, with --quick two
minutes; the other options have no effect); `serving`, which compares vLLM, where it is installed, and `generate_batch`
with `generate`.

All rows are appended to --output (CSV); a row without a time has the reason. The exit code is 1 if a check failed.
docs/kernels.md lists the providers, and says how they are checked and timed.
"""

import argparse
import functools
import pathlib

from .options import command_parser

DTYPES = ("float32", "bfloat16", "float16", "float64")
# On a GPU: the hidden size (which determines the number of heads), the tokens of a batch, and lengths.
DEVICE_WIDTH, DEVICE_TOKENS = 2048, 16384


def parse_lengths(text: str) -> list[int]:
    """Returns the lengths in a comma-separated list; an `argparse` type."""
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: comma-separated positive integers, such as 1024,4096")
    return [int(part) for part in parts]


def parser() -> argparse.ArgumentParser:
    result = command_parser("benchmark", "[OPTIONS]", __doc__, check=_check)
    names = functools.partial(str.split, sep=",")
    result.add_argument("--parts", type=names, default="attention,model", help="comma-separated; default %(default)s")
    result.add_argument("--providers", type=names, help="only these (and the baseline)")
    result.add_argument("--directions", type=names, help="of attention; on a CPU two by default")
    result.add_argument(
        "--lengths", type=parse_lengths, help="default 1024,4096; with --quick 256; on a GPU 512 to 65536"
    )
    result.add_argument("--model-lengths", type=parse_lengths, help="default: as --lengths; on a GPU the first two")
    result.add_argument("--batch", type=int, help=f"default 2; on a GPU {DEVICE_TOKENS} / length, at least 1")
    result.add_argument("--heads", type=int, help=f"default 4; on a GPU {DEVICE_WIDTH} / head dim")
    result.add_argument("--head-dim", type=parse_lengths, dest="head_dims", help="default 64; on a GPU 64,128")
    result.add_argument("--layers", type=int, default=4, help="layers of the models")
    result.add_argument("--dtype", choices=DTYPES, help="default float32; on a GPU bfloat16")
    result.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    result.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's")
    result.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: CPU time, for a shared machine")
    result.add_argument("--repeats", type=int, help="default 5 (serving: 3); with --quick 2 (1); on a GPU 3 to 50")
    result.add_argument("--minutes", type=float, help="start no measurement after this time")
    result.add_argument(
        "--tiles", type=pathlib.Path, help="measure tile sizes, and write them here for WHATWHERE_TILES"
    )
    result.add_argument("--resume", action="store_true", help="do not repeat what --output has from the same state")
    result.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/benchmark.csv"))
    result.add_argument("--quick", action="store_true", help="one short length, two repeats")
    return result


def _check(options: argparse.Namespace) -> None:
    for name in ("batch", "heads", "layers", "repeats", "threads", "minutes"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise argparse.ArgumentTypeError(f"--{name}={value!r} is not valid: it must be greater than 0")
    if options.device == "cuda" and options.clock == "cpu":
        raise argparse.ArgumentTypeError("--clock='cpu' is for --device cpu; allowed here: 'wall'")
