"""Serving: new tokens per second in vLLM, by continuous batching, and by `generate` with one prompt after the other."""

import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from whatwhere.pretrained_model import minor_version

from .measure import CheckFailed, Shape
from .models import MODELS, STOCK, Models

# Tokens in a page.
PAGE = 16
NEW_TOKENS = 32
# One process, without threads bound to cores; what the user has set stays.
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

# Takes prompts, and returns the new tokens of each.
Way = Callable[[list[list[int]]], list[list[int]]]
Clock = Callable[[], float]


class Serving(NamedTuple):
    """New tokens per second in each way, and of how many prompts the tokens are those of `generate`, in the others."""

    rates: dict[str, float]
    agreeing: dict[str, int]


def prompts_of(number: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Returns prompts of random tokens; their lengths are spread from an eighth of `longest` to `longest`."""
    generator = torch.Generator().manual_seed(0)
    shortest = max(1, longest // 8)
    lengths = [shortest + (longest - shortest) * (5 * index % number) // max(1, number - 1) for index in range(number)]
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def missing_ways() -> dict[str, str]:
    """Returns the ways that cannot be measured here, with the reasons."""
    missing = {}
    if minor_version(transformers.__version__) < (5, 23):
        missing["generate_batch"] = f"needs transformers 5.23 or newer; installed: {transformers.__version__}"
    if importlib.util.find_spec("vllm") is None:
        missing["vLLM"] = "is not installed"
    return missing


def generate(model: Any, new_tokens: int) -> Way:
    """Returns `generate` with one prompt after the other."""
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        inputs = [torch.tensor([prompt], device=model.device) for prompt in prompts]
        return [model.generate(ids, generation_config=options)[0, ids.shape[1] :].tolist() for ids in inputs]

    return run


def generate_batch(model: Any, prompts: list[list[int]], new_tokens: int) -> Way:
    """Returns `generate_batch`, with room for all prompts."""
    options = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    # Without sizes, the pages take most of the memory.
    blocks = sum(-(-(len(prompt) + new_tokens) // PAGE) for prompt in prompts)
    settings = ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=2048)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        found = model.generate_batch(prompts, generation_config=options, continuous_batching_config=settings)
        failed = [output.error for output in found.values() if output.error is not None]
        if failed or len(found) < len(prompts):
            raise CheckFailed(f"generate_batch gave {len(found)} of {len(prompts)} results; errors: {failed[:1]}")
        return [output.generated_tokens for output in found.values()]

    return run


def timed(way: Way, prompts: list[list[int]], repeats: int, now: Clock) -> tuple[float, list[list[int]]]:
    """Returns the seconds of the fastest of `repeats` runs, after one to warm up, and the tokens of the last one."""
    tokens, seconds = way(prompts), []
    for _ in range(repeats):
        start = now()
        tokens = way(prompts)
        seconds.append(now() - start)
    return min(seconds), tokens


def timed_in_vllm(
    folder: str, dtype: str, threads: int, prompts: list[list[int]], new_tokens: int, repeats: int, now: Clock
) -> tuple[float, list[list[int]]]:
    """Returns what `timed` does, for a saved model in vLLM, which compiles what it can."""
    # Nothing that was compiled before is used, or kept.
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(folder, "compiled")
    for name, value in VLLM_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    torch.set_num_threads(threads)
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    engine = LLM(
        folder,
        trust_remote_code=True,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=max(map(len, prompts)) + new_tokens,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        # All runs have the same prompts.
        enable_prefix_caching=False,
    )

    def way(prompts: list[list[int]]) -> list[list[int]]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(found.outputs[0].token_ids) for found in engine.generate(inputs, greedy, use_tqdm=False)]

    return timed(way, prompts, repeats, now)


def vllm(model: Any, *arguments: Any) -> tuple[float, list[list[int]]]:
    """Runs `timed_in_vllm` in a process of its own, because vLLM changes the classes of models that it compiles."""
    processes = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, processes:
        model.save_pretrained(folder)
        dtype = str(model.dtype).removeprefix("torch.")
        return processes.submit(timed_in_vllm, folder, dtype, torch.get_num_threads(), *arguments).result()


def serve(
    model: Any, prompts: list[list[int]], new_tokens: int, repeats: int = 1, now: Clock = time.perf_counter
) -> Serving:
    """Measures a model in each way that is not missing; see `timed`.

    Raises:
        CheckFailed: a request failed, or in float32 the tokens of a prompt differ. (In half precision, tokens that are
            almost as likely as each other may differ.)
    """
    missing = missing_ways()
    # All answers have the same length.
    model.generation_config.eos_token_id = None
    found = {"generate": timed(generate(model, new_tokens), prompts, repeats, now)}
    if "generate_batch" not in missing:
        found["generate_batch"] = timed(generate_batch(model, prompts, new_tokens), prompts, repeats, now)
    if "vLLM" not in missing:
        found["vLLM"] = vllm(model, prompts, new_tokens, repeats, now)
    _, expected = found["generate"]
    agreeing = {
        name: sum(one == other for one, other in zip(expected, tokens))
        for name, (_, tokens) in found.items()
        if name != "generate"
    }
    for name, number in agreeing.items():
        if model.dtype == torch.float32 and number < len(prompts):
            raise CheckFailed(f"{name} and generate agree on {number} of {len(prompts)} prompts")
    return Serving({name: len(prompts) * new_tokens / seconds for name, (seconds, _) in found.items()}, agreeing)


def benchmark_serving(
    quick: bool, dtype: torch.dtype, device: torch.device, repeats: int | None, now: Clock
) -> Iterator[str]:
    """Yields a line for each way that is missing, and one for each model; raises CheckFailed, see `serve`."""
    for name, reason in missing_ways().items():
        yield f"without {name}, which {reason}"
    models = Models(Shape(1, heads=4, length=2048, head_dim=64, layers=4), dtype, device)
    prompts = prompts_of(8 if quick else 32, 256, models.fields["vocab_size"])
    for name in (STOCK, *MODELS):
        found = serve(models.model(name).eval(), prompts, NEW_TOKENS, repeats or (1 if quick else 3), now)
        rates = ", ".join(f"{way} {rate:8,.0f} tokens/s" for way, rate in found.rates.items())
        agreeing = ", ".join(f"{number} of {len(prompts)} agree ({way})" for way, number in found.agreeing.items())
        yield f"{name:<16} {rates}" + (f", {agreeing}" if agreeing else "")
