"""Transformers' continuous batching: the tokens of every encoding are those of `generate`, prompt by prompt."""

import itertools
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from engine_matrix import for_engine
from tiny import FAMILIES, OLDER, VOCABULARY, only_newer, slow_but, tiny_model, tokens
from whatwhere.scripts.benchmark import serving
from whatwhere.scripts.benchmark.measure import CheckFailed

# `page_size` was `block_size` in older versions.
PAGE = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


def greedy(new_tokens, **settings):
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=[-1], pad_token_id=0, **settings)


def sizes(blocks=64, batch_tokens=24, **settings):
    # Without sizes the paged cache takes most of the machine's memory.
    return ContinuousBatchingConfig(**{PAGE: 4}, num_blocks=blocks, max_batch_tokens=batch_tokens, **settings)


def prompts_of(count, longest):
    """Prompts of 1 to `longest` tokens, of which every third begins as the first."""
    shared = tokens(1, 9)[0].tolist()
    prompts = [tokens(1, 1 + 7 * index % longest, seed=index + 1)[0].tolist() for index in range(count)]
    return [(shared + prompt)[:longest] if index % 3 == 0 else prompt for index, prompt in enumerate(prompts)]


def alone(model, prompt, new_tokens):
    found = model.generate(torch.tensor([prompt]), generation_config=greedy(new_tokens))
    return found[0, len(prompt) :].tolist()


def check(model, prompts, new_tokens=6, **settings):
    outputs = model.generate_batch(
        prompts, generation_config=greedy(new_tokens), continuous_batching_config=sizes(**settings)
    )
    assert len(outputs) == len(prompts)
    for prompt, output in zip(prompts, outputs.values()):
        assert output.error is None
        assert output.generated_tokens == alone(model, prompt, new_tokens)


@for_engine("continuous_batching")
def test_continuous_batching(encoding, expected):
    assert expected == "works"
    model = tiny_model("llama", encoding)
    if OLDER and encoding not in ("none", "absolute", "sinusoidal", "rope"):
        with pytest.raises(ValueError, match=re.escape(f"{encoding!r} needs transformers 5.23")):
            model.generate_batch([[3, 4, 5]])
        return
    # Prompts in parts, beside sequences that decode.
    check(model, prompts_of(5, longest=20), batch_tokens=12)


# Layers of several widths; states beside the keys; options of the block; other implementations.
MODELS = {
    "layers": (["rope", "cope"], {}),
    "plain layers": (["rope", "none"], {}),
    "separate keys": ("cope+rope", {"position_encoding_parameters": {"cope": {"gates": "separate_key"}, "rope": {}}}),
    "shift": ("none", {"key_value_shift": True}),
    "pro": ("fox", {"output_gate": True, "output_norm": True, "qk_norm": True, "key_value_shift": True}),
    "hard": ("cope", {"attention_weights": "hard"}),
    "eager": ("pope", {"implementation": "eager"}),
    "sdpa": ("alibi", {"implementation": "sdpa"}),
    "narrow": ("pope", {"position_encoding_parameters": {"partial_rotary_factor": 0.5}, "num_key_value_heads": 1}),
}


@only_newer
@pytest.mark.parametrize(
    ("family", "case"),
    slow_but(
        [("llama", "layers"), ("llama", "separate keys"), ("gpt2", "shift"), ("llama", "pro")],
        zip(itertools.cycle(FAMILIES), MODELS),
    ),
)
def test_layers_options_and_implementations(family, case):
    encoding, fields = MODELS[case]
    check(tiny_model(family, encoding, **fields), prompts_of(4, longest=20), batch_tokens=16)


def watch(monkeypatch, cls, name):
    """Returns a list that gets what the method returns, each time that it is called."""
    found, method = [], getattr(cls, name)

    def watched(self, *args, **kwargs):
        found.append(method(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(cls, name, watched)
    return found


@only_newer
# A bias or none, positions in the keys, in the tables or nowhere, states in the cache, no softmax.
@pytest.mark.parametrize(
    "encoding",
    slow_but(
        ["cope+rope", "token_gated_cope"],
        ["cope+rope", "token_gated_cope", "absolute", "rope", "pope", "relative", "stick_breaking", "fox+rope"],
    ),
)
def test_requests_that_join_and_leave(encoding, monkeypatch):
    """32 prompts; pages for a few of them, so that some are stopped and start again, and some share their pages."""
    stopped = watch(monkeypatch, OffloadingManager, "offload_requests")
    shared = watch(monkeypatch, PagedAttentionCache, "search_prefix_match")
    model = tiny_model("llama", encoding)
    prompts = prompts_of(32, longest=30)
    wanted = {f"request {index}": (prompt, 3 + 5 * index % 14) for index, prompt in enumerate(prompts)}
    manager = model.init_continuous_batching(
        generation_config=greedy(8), continuous_batching_config=sizes(blocks=28, batch_tokens=40)
    )
    manager.start()
    try:
        waiting, results = list(wanted), {}
        while len(results) < len(wanted):
            # Four more whenever one has ended.
            for name in waiting[: 4 if results or not manager.input_queue.qsize() else 0]:
                prompt, new_tokens = wanted[name]
                manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens)
            waiting = waiting[4:]
            result = manager.get_result(timeout=20)
            assert result is not None, "no request ended for 20 seconds"
            if result.is_finished():
                results[result.request_id] = result
    finally:
        manager.stop(block=True, timeout=20)
    for name, (prompt, new_tokens) in wanted.items():
        assert results[name].error is None
        assert results[name].generated_tokens == alone(model, prompt, new_tokens), name
    assert any(stopped)
    assert any(shared)


@only_newer
def test_copies_of_a_request():
    """A copy of a prompt with one token has nothing to compute."""
    model = tiny_model("llama", "cope")
    settings = GenerationConfig(
        max_new_tokens=5, do_sample=True, top_k=1, num_return_sequences=2, eos_token_id=[-1], pad_token_id=0
    )
    outputs = model.generate_batch([[9], [3, 4, 5]], generation_config=settings, continuous_batching_config=sizes())
    for output in outputs.values():
        assert output.error is None
        assert output.generated_tokens == alone(model, output.prompt_ids, 5)


@only_newer
def test_a_manager_that_is_kept():
    model = tiny_model("llama", "cope")
    prompts = prompts_of(3, longest=9)
    found = [
        [
            output.generated_tokens
            for output in model.generate_batch(
                prompts,
                generation_config=greedy(4),
                continuous_batching_config=sizes(),
                persistent_manager=True,
            ).values()
        ]
        for _ in range(2)
    ]
    assert found == [[alone(model, prompt, 4) for prompt in prompts]] * 2
    manager = model._cached_continuous_batching_manager
    assert manager.model._model is model
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")
    # The model itself is unchanged.
    assert model.config._attn_implementation == "auto"
    assert model.config.head_dim == 8


@pytest.mark.parametrize("encoding", ["absolute", pytest.param("relative", marks=only_newer)])
def test_prompts_longer_than_the_encoding(encoding):
    model = tiny_model("llama", encoding)
    message = rf"A prompt of 44 tokens and max_new_tokens=6 .*position_encoding='{encoding}' supports \(48 tokens\)"
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[3] * 44, [3]], generation_config=greedy(6), continuous_batching_config=sizes())
    check(model, [[3] * 43, [3]])
    # Without a number of new tokens, an answer ends where the encoding does.
    settings = greedy(6)
    settings.max_new_tokens = None
    outputs = model.generate_batch([[3] * 44, [3]], generation_config=settings, continuous_batching_config=sizes())
    assert [len(output.generated_tokens) for output in outputs.values()] == [5, 48]
    # The other requests of a server go on.
    manager = model.init_continuous_batching(generation_config=greedy(6), continuous_batching_config=sizes())
    manager.start()
    try:
        manager.add_request([5] * 9)
        with pytest.raises(ValueError, match=message):
            manager.add_request([3] * 44)
        result = manager.get_result(timeout=20)
    finally:
        manager.stop(block=True, timeout=20)
    assert result.generated_tokens == alone(model, [5] * 9, 6)


@pytest.mark.parametrize("encoding", ["rope", pytest.param("cope", marks=only_newer)])
def test_prompts_without_tokens(encoding):
    model = tiny_model("llama", encoding)
    with pytest.raises(ValueError, match=r"^inputs\[1\] has no tokens"):
        model.generate_batch([[3, 4], []], generation_config=greedy(2), continuous_batching_config=sizes())
    # What a server calls.
    manager = model.init_continuous_batching(generation_config=greedy(2), continuous_batching_config=sizes())
    with pytest.raises(ValueError, match=r"^The prompt has no tokens"):
        manager.add_request([])


def test_what_depends_on_the_longest_sequence_is_refused():
    rotation = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for encoding in ("rope", "cope+rope"):
        model = tiny_model("llama", encoding, rope_parameters=rotation)
        message = f"rope_type='dynamic' (position_encoding={encoding!r}): keys would depend on the longest sequence"
        with pytest.raises(ValueError, match=re.escape(message)):
            model.generate_batch([[3, 4, 5]])


@only_newer
def test_settings_that_need_fixed_shapes_are_refused():
    model = tiny_model("llama", "cope")
    settings = sizes(varlen_compile_config=CompileConfig())
    with pytest.raises(ValueError, match=r"position_encoding='cope' runs groups of sequences: use_cuda_graph must be"):
        model.init_continuous_batching(generation_config=greedy(4), continuous_batching_config=settings)


@only_newer
def test_throughput_of_serving():
    model = tiny_model("llama", "cope")
    prompts = serving.prompts_of(4, longest=12, vocabulary=VOCABULARY)
    assert sorted(map(len, prompts)) == [1, 4, 8, 12]
    measured = serving.serve(model, prompts, new_tokens=3)
    assert measured.agreeing == {name: 4 for name in measured.rates if name != "generate"}
    assert measured.rates["generate"] > 0
    assert measured.rates["generate_batch"] > 0
    # Other tokens are an error.
    model.generate_batch = lambda prompts, **kwargs: {
        index: SimpleNamespace(error=None, generated_tokens=[]) for index, _ in enumerate(prompts)
    }
    with pytest.raises(CheckFailed, match="generate_batch and generate agree on 0 of 4 prompts"):
        serving.serve(model, prompts, new_tokens=3)


def test_throughput_of_what_is_installed(monkeypatch):
    """Other ways are absent, with a line that says why."""
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(serving.transformers, "__version__", "5.19.0")
    monkeypatch.setattr(serving, "prompts_of", lambda *_: [[5, 6], [7]])
    monkeypatch.setattr(serving, "MODELS", {})
    monkeypatch.setattr(serving, "NEW_TOKENS", 2)
    lines = list(serving.benchmark_serving(True, torch.float32, torch.device("cpu"), None, time.perf_counter))
    assert lines[:2] == [
        "without generate_batch, which needs transformers 5.23 or newer; installed: 5.19.0",
        "without vLLM, which is not installed",
    ]
    assert len(lines) == 3
    assert re.fullmatch(r"llama-stock +generate +\d+ tokens/s", lines[2])


def test_a_folder_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    models = {}
    for encoding in ("rope", "cope"):
        folder = tmp_path / f"saved_{encoding}"
        tiny_model("llama", encoding).save_pretrained(folder)
        copy = get_class_from_dynamic_module("modeling_whatwhere_llama.WhatWhereLlamaForCausalLM", str(folder))
        models[encoding] = copy.from_pretrained(folder)
    if not OLDER:
        # The installed package has the code for both.
        check(models["cope"], prompts_of(3, longest=9))
    monkeypatch.setitem(sys.modules, "whatwhere.continuous_batching", None)
    check(models["rope"], prompts_of(3, longest=9))
    with pytest.raises(ValueError, match=r"position_encoding='cope' needs more code than this folder has: install"):
        models["cope"].generate_batch([[3, 4, 5]])
