"""Configurations of the two families."""

if __name__ != "whatwhere.configuration":
    raise ImportError(
        f"import this package as `whatwhere.configuration` (after `pip install -e .`), not as `{__name__}`"
    )

from .configuration_whatwhere_gpt2 import WhatWhereGPT2Config
from .configuration_whatwhere_llama import WhatWhereLlamaConfig

__all__ = ["WhatWhereGPT2Config", "WhatWhereLlamaConfig"]
