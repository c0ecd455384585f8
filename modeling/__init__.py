"""Position encodings that separate *what* from *where*, for Hugging Face Transformers."""

if __name__ != "whatwhere":
    raise ImportError(f"import this package as `whatwhere` (after `pip install -e .`), not as `{__name__}`")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from whatwhere.configuration import WhatWhereGPT2Config, WhatWhereLlamaConfig

from .modeling_whatwhere_gpt2 import (
    WhatWhereGPT2ForCausalLM,
    WhatWhereGPT2ForSequenceClassification,
    WhatWhereGPT2Model,
    WhatWhereGPT2PreTrainedModel,
)
from .modeling_whatwhere_llama import (
    WhatWhereLlamaForCausalLM,
    WhatWhereLlamaForSequenceClassification,
    WhatWhereLlamaModel,
    WhatWhereLlamaPreTrainedModel,
)
from .position_encodings import list_position_encodings

for _config, _model, _causal_lm, _classifier in (
    (WhatWhereGPT2Config, WhatWhereGPT2Model, WhatWhereGPT2ForCausalLM, WhatWhereGPT2ForSequenceClassification),
    (WhatWhereLlamaConfig, WhatWhereLlamaModel, WhatWhereLlamaForCausalLM, WhatWhereLlamaForSequenceClassification),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _model, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal_lm, exist_ok=True)
    AutoModelForSequenceClassification.register(_config, _classifier, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "WhatWhereGPT2Config",
    "WhatWhereGPT2ForCausalLM",
    "WhatWhereGPT2ForSequenceClassification",
    "WhatWhereGPT2Model",
    "WhatWhereGPT2PreTrainedModel",
    "WhatWhereLlamaConfig",
    "WhatWhereLlamaForCausalLM",
    "WhatWhereLlamaForSequenceClassification",
    "WhatWhereLlamaModel",
    "WhatWhereLlamaPreTrainedModel",
    "list_position_encodings",
]
