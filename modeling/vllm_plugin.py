"""The plugin by which vLLM serves models of this package with every position encoding.

vLLM finds it by the entry point group `vllm.general_plugins`, and calls `register` in each of its processes. It imports
no code of vLLM before one of our models is served.
"""

from transformers.utils import logging

logger = logging.get_logger(__name__)

# Versions of vLLM with which the plugin was tested.
TESTED = ("0.32.0",)


def register() -> None:
    """Registers the models with vLLM, by name: their classes are imported when a model is served."""
    from vllm import ModelRegistry

    for family in ("GPT2", "Llama"):
        for head in ("ForCausalLM", "ForSequenceClassification"):
            ModelRegistry.register_model(f"WhatWhere{family}{head}", f"whatwhere.vllm_models:{head}")
        ModelRegistry.register_model(f"WhatWhere{family}Model", "whatwhere.vllm_models:EmbeddingModel")
