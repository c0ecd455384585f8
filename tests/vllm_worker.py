"""Runs saved folders in vLLM, as `test_vllm.py` asks: their own code, without the package.

Reads cases as JSON, {name: {"folder", "prompts", "new_tokens", "options"}}, from the file that is its argument, and
writes {name: {"tokens": ...} or {"error": ...}} beside it.
"""

import gc
import json
import pathlib
import sys

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

sys.modules["whatwhere"] = None


def run(folder, prompts, new_tokens=8, **options):
    """Returns the likeliest tokens after each prompt."""
    given = {"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    engine = LLM(folder, trust_remote_code=True, skip_tokenizer_init=True, **given)
    try:
        greedy = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]
    finally:
        engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    cases, found = pathlib.Path(sys.argv[1]), {}
    for name, case in json.loads(cases.read_text()).items():
        try:
            found[name] = {"tokens": run(**case)}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
    cases.with_suffix(".found").write_text(json.dumps(found))
