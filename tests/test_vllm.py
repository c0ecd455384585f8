"""vLLM itself, on a CPU, with saved folders; `make test-vllm` makes its environment. `paged_engine` is the stand-in."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch

from engine_matrix import ENGINES
from tiny import FAMILIES, tiny_model, tokens
from whatwhere import list_position_encodings

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` runs these tests", allow_module_level=True)

LENGTH = 48
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 1, 17)]
GENERATED = [encoding for encoding in list_position_encodings() if ENGINES["vllm"].cell(encoding) != "refused"]
REFUSED = [encoding for encoding in list_position_encodings() if encoding not in GENERATED]
# Beside each encoding: fields of configurations, and options of vLLM.
SETTINGS = {
    "layers": ("llama", ["rope", "none"], {}, {}),
    "options": ("llama", "rope", {"qk_norm": True, "output_norm": True, "output_gate": True}, {}),
    "yarn": (
        "llama",
        "rope",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        {},
    ),
    "heads": ("llama", "rope", {"num_key_value_heads": 1, "head_dim": 64, "attention_bias": True}, {}),
    "tied": ("llama", "absolute", {"tie_word_embeddings": True}, {}),
    "as many positions as tokens": ("gpt2", "absolute", {"max_position_embeddings": 61}, {}),
    "scales": ("gpt2", "rope", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}, {}),
    "post": ("gpt2", "none", {"norm_position": "post", "norm_type": "rmsnorm", "tie_word_embeddings": False}, {}),
    "compiled": ("llama", "absolute", {}, {"enforce_eager": False}),
    "compiled gpt2": ("gpt2", "rope", {}, {"enforce_eager": False}),
}


def build(family, encoding, fields):
    # A head as narrow as vLLM can hold.
    return tiny_model(family, encoding, **{"hidden_size": 128, "eos_token_id": None, **fields})


class Runs:
    """All cases, in one process, because vLLM takes many times as long to be imported as to run one."""

    def __init__(self, folder):
        self.cases, self.expected = {}, {}
        for family in FAMILIES:
            for encoding in list_position_encodings():
                self.add(folder, f"{family} {encoding}", family, encoding, {}, {})
        for name, case in SETTINGS.items():
            self.add(folder, name, *case)
        too_long = {"max_model_len": 2 * LENGTH}
        self.add(folder, "too long", "gpt2", "absolute", {}, too_long)
        path = folder / "cases.json"
        path.write_text(json.dumps(self.cases))
        # One process, of which vLLM binds no thread to a core, and 1 GiB for keys and values.
        names = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        names |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        names |= {"HF_HOME": str(folder / "home"), "VLLM_CACHE_ROOT": str(folder / "cache")}
        names |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "PYTHONPATH": ""}
        worker = pathlib.Path(__file__).parent / "vllm_worker.py"
        done = subprocess.run(
            [sys.executable, worker, path], env={**os.environ, **names}, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        self.found = json.loads(path.with_suffix(".found").read_text())

    def add(self, folder, name, family, encoding, fields, options):
        model = build(family, encoding, fields)
        model.save_pretrained(folder / name)
        self.cases[name] = {"folder": str(folder / name), "prompts": PROMPTS, **options}
        if encoding in REFUSED:
            return
        texts = [model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False) for ids in PROMPTS]
        self.expected[name] = [text[0, len(ids) :].tolist() for text, ids in zip(texts, PROMPTS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", GENERATED)
def test_vllm_generates_what_generate_does(runs, family, encoding):
    name = f"{family} {encoding}"
    assert runs.found[name] == {"tokens": runs.expected[name]}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(runs, name):
    assert runs.found[name] == {"tokens": runs.expected[name]}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", REFUSED)
def test_vllm_refuses_what_it_cannot_run(runs, family, encoding):
    error = runs.found[f"{family} {encoding}"]["error"]
    assert error.startswith("ValueError")
    assert "vllm" in error
    assert f"position_encoding={encoding!r}" in error


def test_a_length_beyond_the_table_is_refused(runs):
    message = f"max_model_len={2 * LENGTH} is longer than position_encoding='absolute' supports ({LENGTH} tokens)"
    assert message in runs.found["too long"]["error"]
