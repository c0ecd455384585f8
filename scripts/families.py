"""The families of models."""

from typing import Any

from whatwhere import WhatWhereGPT2ForCausalLM, WhatWhereLlamaForCausalLM

# The class of each family; it reads stock checkpoints too.
FAMILIES: dict[str, Any] = {"gpt2": WhatWhereGPT2ForCausalLM, "llama": WhatWhereLlamaForCausalLM}


def model_class(config: Any) -> Any:
    """Returns the class of a configuration of one of these families, a stock one or ours; None for other models."""
    return FAMILIES.get(config.model_type.removeprefix("whatwhere_"))
