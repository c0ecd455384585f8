"""Write the Triton kernels as a project for Hugging Face's `kernel-builder`, which builds and uploads it.

    whatwhere kernel-hub attention --build

Others then call its functions, such as cope_attention, without this package. --build also writes what
kernel-builder would build: `kernels.get_local_kernel` loads it. A CPU also needs TRITON_INTERPRET=1.
"""

import argparse
import pathlib

from .options import command_parser

NAME = "whatwhere-attention"
BACKENDS = ("cuda", "rocm")
# On a CPU, Triton's interpreter runs the kernels: for tests.
BUILDS = ("cpu", *BACKENDS)


def parser() -> argparse.ArgumentParser:
    result = command_parser("kernel-hub", "OUTPUT [OPTIONS]", __doc__, check=_check)
    result.add_argument("output", type=pathlib.Path, metavar="OUTPUT", help="a new or empty folder")
    result.add_argument("--repo-id", default=f"you/{NAME}", metavar="ID", help=f"on the Hub; default you/{NAME}")
    result.add_argument("--build", action="store_true", help=f"also write build/torch-<{'|'.join(BUILDS)}>")
    return result


def _check(options: argparse.Namespace) -> None:
    output = options.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise argparse.ArgumentTypeError(f"output={str(output)!r} is not valid: it must be a new or empty folder")
