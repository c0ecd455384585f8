"""The name under which the modeling file finds its configuration; a saved checkpoint holds the real file here."""

from whatwhere.configuration.configuration_whatwhere_llama import WhatWhereLlamaConfig

__all__ = ["WhatWhereLlamaConfig"]
