"""Serving: new tokens per second by continuous batching, and by `generate` with one prompt after the other."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from .measure import CheckFailed, Shape
from .models import MODELS, STOCK, Models

# Tokens in a page.
PAGE = 16


class Serving(NamedTuple):
    """New tokens per second by `generate` and by `generate_batch`, and of how many prompts the tokens agree."""

    alone: float
    together: float
    agreeing: int


def prompts_of(number: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Returns prompts of random tokens; their lengths are spread from an eighth of `longest` to `longest`."""
    generator = torch.Generator().manual_seed(0)
    shortest = max(1, longest // 8)
    lengths = [shortest + (longest - shortest) * (5 * index % number) // max(1, number - 1) for index in range(number)]
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def serve(model: Any, prompts: list[list[int]], new_tokens: int) -> Serving:
    """Measures a model, each way once after a first one with two prompts.

    Raises:
        CheckFailed: a request failed, or in float32 the tokens of a prompt differ. (In half precision, tokens that are
            almost as likely as each other may differ.)
    """
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    # All answers have the same length.
    model.generation_config.eos_token_id = None
    # Room for all prompts. Without sizes, the pages take most of the memory.
    blocks = sum(-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts)
    settings = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=2048)

    def together(some: list[list[int]]) -> list[list[int]]:
        found = model.generate_batch(some, generation_config=options, continuous_batching_config=settings)
        failed = [output.error for output in found.values() if output.error is not None]
        if failed or len(found) < len(some):
            raise CheckFailed(f"generate_batch gave {len(found)} of {len(some)} results; errors: {failed[:1]}")
        return [output.generated_tokens for output in found.values()]

    def alone(some: list[list[int]]) -> list[list[int]]:
        inputs = [torch.tensor([prompt], device=model.device) for prompt in some]
        return [model.generate(ids, generation_config=options)[0, ids.shape[1] :].tolist() for ids in inputs]

    seconds, tokens = [], []
    for way in (alone, together):
        way(prompts[:2])
        start = time.perf_counter()
        tokens.append(way(prompts))
        seconds.append(time.perf_counter() - start)
    agreeing = sum(one == other for one, other in zip(*tokens))
    if model.dtype == torch.float32 and agreeing < len(prompts):
        raise CheckFailed(f"generate_batch and generate agree on {agreeing} of {len(prompts)} prompts")
    rates = [len(prompts) * new_tokens / taken for taken in seconds]
    return Serving(rates[0], rates[1], agreeing)


def benchmark_serving(quick: bool, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yields a line for each model; raises CheckFailed, see `serve`."""
    models = Models(Shape(1, heads=4, length=2048, head_dim=64, layers=4), dtype, device)
    prompts = prompts_of(8 if quick else 32, 256, models.fields["vocab_size"])
    for name in (STOCK, *MODELS):
        found = serve(models.model(name).eval(), prompts, 32)
        rates = f"generate {found.alone:8,.0f} tokens/s, generate_batch {found.together:8,.0f} tokens/s"
        yield f"{name:<16} {rates}, {found.together / found.alone:.2f} x, {found.agreeing} of {len(prompts)} agree"
