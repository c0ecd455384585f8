"""The plugin by which vLLM serves models of this package with every position encoding.

vLLM finds it by the entry point group `vllm.general_plugins`, and calls `register` in each of its processes. It imports
no code of vLLM before one of our models is served.
"""

import contextlib
import os
from collections.abc import Iterator

# Files of position encodings that each process of vLLM imports, separated as in PATH.
IMPORTED = "WHATWHERE_IMPORT"
# Versions of vLLM with which the plugin was tested.
TESTED = ("0.32.0",)


def register() -> None:
    """Registers the models with vLLM, by name: their classes are imported when a model is served.

    Also imports the files of position encodings that the variable WHATWHERE_IMPORT names.
    """
    from vllm import ModelRegistry

    files = os.environ.get(IMPORTED)
    if files:
        from .position_registration import import_position_encodings

        for file in files.split(os.pathsep):
            import_position_encodings(file)
    for family in ("GPT2", "Llama"):
        for head in ("ForCausalLM", "ForSequenceClassification"):
            ModelRegistry.register_model(f"WhatWhere{family}{head}", f"whatwhere.vllm_models:{head}")
        ModelRegistry.register_model(f"WhatWhere{family}Model", "whatwhere.vllm_models:EmbeddingModel")


@contextlib.contextmanager
def interface() -> Iterator[None]:
    """Names both versions in the error if a version of vLLM that was not tested has another interface.

    Raises:
        ImportError: instead of an error of Python in code that uses this interface.
    """
    import vllm

    try:
        yield
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        if vllm.__version__.split("+")[0] in TESTED:
            raise
        raise ImportError(
            f"vLLM {vllm.__version__} has another interface than vLLM {' and '.join(TESTED)}, with which this package "
            f"was tested ({type(error).__name__}: {error}). Install one of these versions."
        ) from error
