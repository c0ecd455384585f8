"""Checks the Triton kernels on this machine's GPU, then runs the benchmark: `make gpu-check`.

    whatwhere gpu-check --minutes 8 --output FOLDER    # run it again to continue
    whatwhere gpu-check --no-benchmark
    whatwhere gpu-check --case 'cope bfloat16 D=64 1x2/2x16384/16384 causal'    # one case of the check alone
    TRITON_INTERPRET=1 whatwhere gpu-check --device cpu    # tiny shapes, by Triton's interpreter

What decides comes first: one case of each kernel and head dim (`first`), then the benchmark of attention at 4,096 and
16,384 tokens, up to 60 % of --minutes. The check goes on up to 80 %: `long` (up to 65,536 tokens), `tiles` (all tile
sizes), `model` (small models against eager ones), `wide` (where shared memory is short) and `shapes` (lengths, masks,
contents). The rest of the benchmark follows.

The exit code is 1 if a check failed or nothing was checked, and 2 if there is no GPU. Speeds do not affect it.
docs/kernels.md says how the kernels are checked, and what is in FOLDER.
"""

import argparse
import pathlib

from .options import command_parser


def parser() -> argparse.ArgumentParser:
    result = command_parser("gpu-check", "[OPTIONS]", __doc__, check=_check)
    result.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    result.add_argument("--minutes", type=float, default=8.0, help="time for check and benchmark (default 8)")
    result.add_argument("--case", help="one case, by its whole name, in this process; no files")
    result.add_argument("--no-benchmark", action="store_true", help="check only")
    result.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("runs/gpu_check"), help="a folder; default runs/gpu_check"
    )
    return result


def _check(options: argparse.Namespace) -> None:
    if not options.minutes > 0:
        raise argparse.ArgumentTypeError(f"--minutes={options.minutes!r} is not valid: it must be greater than 0")
