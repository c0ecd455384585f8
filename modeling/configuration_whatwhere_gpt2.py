"""The name under which the modeling file finds its configuration; a saved checkpoint holds the real file here."""

from whatwhere.configuration.configuration_whatwhere_gpt2 import WhatWhereGPT2Config

__all__ = ["WhatWhereGPT2Config"]
