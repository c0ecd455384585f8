"""Position encodings that separate *what* from *where*, for Hugging Face Transformers."""

if __name__ != "whatwhere":
    raise ImportError(f"import this package as `whatwhere` (after `pip install -e .`), not as `{__name__}`")

from transformers import AutoConfig

from whatwhere.configuration import WhatWhereGPT2Config, WhatWhereLlamaConfig

from .modeling_whatwhere_gpt2 import (
    WhatWhereGPT2ForCausalLM,
    WhatWhereGPT2ForQuestionAnswering,
    WhatWhereGPT2ForSequenceClassification,
    WhatWhereGPT2ForTokenClassification,
    WhatWhereGPT2Model,
    WhatWhereGPT2PreTrainedModel,
)
from .modeling_whatwhere_llama import (
    WhatWhereLlamaForCausalLM,
    WhatWhereLlamaForQuestionAnswering,
    WhatWhereLlamaForSequenceClassification,
    WhatWhereLlamaForTokenClassification,
    WhatWhereLlamaModel,
    WhatWhereLlamaPreTrainedModel,
)
from .position_plan import list_position_encodings
from .position_registration import import_position_encodings, register_position_encoding

for _config in (WhatWhereGPT2Config, WhatWhereLlamaConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "WhatWhereGPT2Config",
    "WhatWhereGPT2ForCausalLM",
    "WhatWhereGPT2ForQuestionAnswering",
    "WhatWhereGPT2ForSequenceClassification",
    "WhatWhereGPT2ForTokenClassification",
    "WhatWhereGPT2Model",
    "WhatWhereGPT2PreTrainedModel",
    "WhatWhereLlamaConfig",
    "WhatWhereLlamaForCausalLM",
    "WhatWhereLlamaForQuestionAnswering",
    "WhatWhereLlamaForSequenceClassification",
    "WhatWhereLlamaForTokenClassification",
    "WhatWhereLlamaModel",
    "WhatWhereLlamaPreTrainedModel",
    "import_position_encodings",
    "list_position_encodings",
    "register_position_encoding",
]
