"""Python in a process of its own, which must succeed."""

import os
import subprocess
import sys

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


def python(*arguments, env=None, timeout=580, **options):
    """Runs Python with arguments, and returns what it prints; `env` adds to the environment, and None removes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={name: value for name, value in environment.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        **options,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
