"""Engines that call a model in their own way: each cell of `engine_matrix` works or is refused."""

import re

import pytest
from transformers import ContinuousBatchingConfig, GenerationConfig

from engine_matrix import for_engine
from tiny import tiny_model, tokens


@for_engine("continuous_batching")
def test_continuous_batching(encoding, expected):
    model = tiny_model("llama", encoding)
    if expected == "refused":
        for call in (model.generate_batch, model.init_continuous_batching):
            with pytest.raises(ValueError, match=re.escape(f"position_encoding={encoding!r}")):
                call([[3, 4, 5]])
        return
    prompts = [tokens(1, length, seed=length) for length in (5, 9, 7)]
    options = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Without sizes the paged cache takes most of the machine's memory. `page_size` was `block_size` in older versions.
    page = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"
    sizes = ContinuousBatchingConfig(**{page: 32}, num_blocks=8, max_batch_tokens=64)
    inputs = [prompt[0].tolist() for prompt in prompts]
    outputs = model.generate_batch(inputs, generation_config=options, continuous_batching_config=sizes)
    for prompt, output in zip(prompts, outputs.values()):
        alone = model.generate(prompt, generation_config=options)
        assert output.generated_tokens == alone[0, prompt.shape[1] :].tolist()
