"""`python -m whatwhere`, `accelerate launch -m whatwhere`, `torchrun -m whatwhere`: the command `whatwhere`."""

import sys

from whatwhere_cli import main

if __name__ == "__main__":
    sys.exit(main())
