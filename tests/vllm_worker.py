"""Runs saved folders in vLLM, as `test_vllm.py` asks.

Reads cases as JSON, {name: {"folder", "prompts", "new_tokens", "mode", "options"}}, from the file that is its argument,
and writes {name: {"tokens", "logprobs"} or {"values"} or {"error"}} beside it. With WITHOUT_PACKAGE set, folders run
their own code.
"""

import gc
import json
import os
import pathlib
import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest

if os.environ.get("WITHOUT_PACKAGE"):
    sys.modules["whatwhere"] = None


def run(folder, prompts, new_tokens=8, mode="generate", lora=None, **options):
    """Returns the likeliest tokens after each prompt and their log-probabilities, or what a pooling model returns."""
    given = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    engine = LLM(folder, trust_remote_code=True, skip_tokenizer_init=True, **given)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    try:
        if mode == "classify":
            return {"values": [output.outputs.probs for output in engine.classify(inputs, use_tqdm=False)]}
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
