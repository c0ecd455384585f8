"""`python -m whatwhere`, `accelerate launch -m whatwhere`, `torchrun -m whatwhere`: the command of `scripts/cli.py`."""

import sys

from whatwhere.scripts.cli import main

if __name__ == "__main__":
    sys.exit(main())
