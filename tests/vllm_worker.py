"""Runs saved folders in vLLM, as `test_vllm.py` asks.

Reads cases as JSON, {name: {"folder", "prompts", "new_tokens", "mode", "options"}}, from the file that is its argument,
and writes {name: {"tokens", "logprobs"} or {"values"} or {"error"}} beside it. With WITHOUT_PACKAGE set, folders run
their own code. A case may break something first, by a function of BREAKS.
"""

import contextlib
import gc
import json
import os
import pathlib
import sys
from unittest import mock

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

if os.environ.get("WITHOUT_PACKAGE"):
    sys.modules["whatwhere"] = None


def another_slot():
    """The cache is read where other tokens are."""
    from whatwhere import vllm_attention

    read = vllm_attention._read
    return mock.patch.object(vllm_attention, "_read", lambda cache, slots, widths: read(cache, slots.flip(-1), widths))


def another_scale():
    """vLLM's kernels scale logits in another way."""
    from whatwhere import vllm_models

    attention = vllm_models.Attention

    def wrong(heads, width, scale, *others, **options):
        return attention(heads, width, 3 * scale, *others, **options)

    return mock.patch.object(vllm_models, "Attention", wrong)


def another_version():
    return mock.patch("whatwhere.vllm_plugin.TESTED", ("0.1.0",))


@contextlib.contextmanager
def another_interface():
    """A version that was not tested has no field of this name."""
    error = AttributeError("'CommonAttentionMetadata' object has no attribute 'seq_lens'")
    with another_version(), mock.patch("whatwhere.vllm_attention.grouped", side_effect=error):
        yield


BREAKS = {one.__name__: one for one in (another_slot, another_scale, another_version, another_interface)}


def run(folder, prompts, breaks=None, **options):
    """Runs one case, with what it breaks."""
    with BREAKS[breaks]() if breaks else contextlib.nullcontext():
        return serve(folder, prompts, **options)


def serve(folder, prompts, new_tokens=8, mode="generate", lora=None, **options):
    """Returns the likeliest tokens after each prompt and their log-probabilities, or what a pooling model returns."""
    given = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    given |= {"skip_tokenizer_init": True, **options}
    engine = LLM(folder, trust_remote_code=True, **given)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    try:
        if mode == "classify":
            return {"values": [output.outputs.probs for output in engine.classify(inputs, use_tqdm=False)]}
        if mode == "embed":
            return {"values": [output.outputs.embedding for output in engine.embed(inputs, use_tqdm=False)]}
        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, logprobs=1)
        request = LoRARequest("adapter", 1, lora) if lora else None
        outputs = []
        # The second time, prompts are in the cache.
        for _ in range(2 if mode == "twice" else 1):
            outputs = engine.generate(inputs, greedy, use_tqdm=False, lora_request=request)
        found = [output.outputs[0] for output in outputs]
        logprobs = [[step[token].logprob for step, token in zip(one.logprobs, one.token_ids)] for one in found]
        return {"tokens": [list(one.token_ids) for one in found], "logprobs": logprobs}
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    cases, found = pathlib.Path(sys.argv[1]), {}
    for name, case in json.loads(cases.read_text()).items():
        try:
            found[name] = run(**case)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
    cases.with_suffix(".found").write_text(json.dumps(found))
