"""Engines that call a model in their own way: each cell of `engine_matrix` works or is refused."""

import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers.integrations.sdpa_attention import sdpa_attention_forward as stock_sdpa
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import whatwhere
from engine_matrix import ENGINES, for_engine
from paged_engine import Engine, attention_function
from processes import TORCHRUN, python
from tiny import FAMILIES, tiny_model, tokens
from whatwhere.attention_choice import supported_implementations


@pytest.fixture
def register(monkeypatch):
    """Puts functions into Transformers' table as SGLang and DeepSpeed do, for one test."""
    return lambda name, function: monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, function)


@pytest.mark.parametrize("family", FAMILIES)
@for_engine("sglang")
def test_an_engine_with_its_own_pages(encoding, expected, family, register, tmp_path):
    register("sglang", attention_function)
    model = tiny_model(family, encoding)
    if expected == "refused":
        with pytest.raises(ValueError, match=f"sglang.*position_encoding={encoding!r}.*Use".replace("+", "[+]")):
            model.set_attn_implementation("sglang")
        return
    model.save_pretrained(tmp_path)
    prompts = [tokens(1, length, seed=length) for length in (5, 9, 1, 7)]
    texts, logits = Engine(tmp_path).generate([prompt[0].tolist() for prompt in prompts], new_tokens=6)
    for prompt, text, found in zip(prompts, texts, logits):
        alone = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1)
        assert text == alone[0].tolist()
        torch.testing.assert_close(found, model(alone[:, :-1]).logits[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_an_engine_with_scaled_rotations(parameters, register, tmp_path):
    register("sglang", attention_function)
    model = tiny_model("llama", "rope", rope_parameters={"rope_theta": 10000.0, **parameters})
    model.save_pretrained(tmp_path)
    prompt = tokens(1, 20)
    (text,), _ = Engine(tmp_path).generate([prompt[0].tolist()], new_tokens=6)
    assert text == model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=-1)[0].tolist()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"key_value_shift": True, "position_encoding": "none"}, "key_value_shift=True"),
    ],
    ids=["dynamic", "key_value_shift"],
)
def test_keys_that_depend_on_the_batch_are_refused(fields, named, register):
    register("sglang", attention_function)
    model = tiny_model("llama", fields.pop("position_encoding", "rope"), **fields)
    with pytest.raises(ValueError, match=f"{named}.* does not work with attn_implementation='sglang'.*generate"):
        model.set_attn_implementation("sglang")


def test_an_engine_whose_cache_does_not_fit(register, tmp_path):
    register("sglang", attention_function)
    tiny_model("gpt2", "rope").save_pretrained(tmp_path)
    # Its projections are not split between processes as SGLang's layers are.
    with pytest.raises(ValueError, match=r"The cache of attn_implementation='sglang' is for 2 query heads; .* has 4"):
        Engine(tmp_path, processes=2).generate([[3, 4, 5]], new_tokens=1)
    engine = Engine(tmp_path)
    for layer in engine.layers.values():
        layer.head_dim = 4
    with pytest.raises(ValueError, match=r"is for 4 channels of a head; position_encoding='rope' of this model has 8"):
        engine.generate([[3, 4, 5]], new_tokens=1)


def test_hard_attention_is_refused(register):
    register("sglang", attention_function)
    with pytest.raises(ValueError, match="only; attention_weights='hard', position_encoding='rope' needs more"):
        tiny_model("llama", "rope", "sglang", attention_weights="hard")


def test_padding_without_a_mask_function(register):
    register("ours_alone", lambda *args, **kwargs: stock_sdpa(*args, **{**kwargs, "is_causal": True}))
    model = tiny_model("llama", "rope", "ours_alone")
    ids = tokens(2, 6)
    mask = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, model(ids).logits)
    mask[0, :2] = 0
    with pytest.raises(ValueError, match="'ours_alone' has no mask function"):
        model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"'ours_alone' has no mask function: .*static cache"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match=r"'ours_alone' .*'pope' needs more"):
        tiny_model("llama", "pope", "ours_alone")
    # With one, all masks work, and Transformers' own caches.
    register("ours_alone", stock_sdpa)
    AttentionMaskInterface.register("ours_alone", sdpa_mask)
    try:
        for encoding in ("rope", "pope"):
            model = tiny_model("llama", encoding, "ours_alone")
            expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
            model.set_attn_implementation("sdpa")
            assert expected.equal(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
    finally:
        del AttentionMaskInterface._global_mapping["ours_alone"]


def test_an_engines_own_tensor_parallelism():
    # A rank has some heads, and no device mesh says which.
    def half(model):
        for layer in model.model.layers:
            attention = layer.self_attn
            for name, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
                weight = getattr(attention, name).weight
                weight.data = weight.data[:rows]
            attention.o_proj.weight.data = attention.o_proj.weight.data[:, :16]
        return model

    assert half(tiny_model("llama", "rope"))(tokens(1, 5)).logits.isfinite().all()
    for encoding, fields in (("pope", {}), ("rope", {"qk_norm": True})):
        with pytest.raises(ValueError, match=f"position_encoding='{encoding}' has parameters for each head here"):
            half(tiny_model("llama", encoding, **fields))(tokens(1, 5))


@pytest.fixture
def sharded_tokens():
    """PyTorch's context parallelism, of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with context_parallel(init_device_mesh("cpu", (1,)), buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]):
            yield
    finally:
        dist.destroy_process_group()


@for_engine("context_parallel")
def test_context_parallelism(encoding, expected, request):
    model = tiny_model("llama", encoding)
    ids = tokens(2, 9)
    if expected == "refused":
        request.getfixturevalue("sharded_tokens")
        for implementation in set(supported_implementations(model.config)) - {"triton"}:
            model.set_attn_implementation(implementation)
            with pytest.raises(ValueError, match="Context parallelism.*" + re.escape(f"{encoding!r}") + ".*Use"):
                model(ids)
        return
    # Ring attention has no CPU operator. What else changes: masks are dropped, and positions are given.
    model.set_attn_implementation("sdpa")
    logits = model(ids).logits
    _attach_context_parallel_hooks(model)
    found = model(ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(9).expand(2, -1)).logits
    torch.testing.assert_close(found, logits)
    request.getfixturevalue("sharded_tokens")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"Context parallelism.*attn_implementation='eager'.*'sdpa'"):
        model(ids)


def test_ulysses():
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-engines")
    worker = pathlib.Path(__file__).parent / "ulysses_worker.py"
    found = re.findall(r"(agrees|refused): (.+)", python(*TORCHRUN, 2, worker))
    expected = {"works": "agrees", "refused": "refused"}
    cells = [(expected[ENGINES["ulysses"].cell(one)], one) for one in whatwhere.list_position_encodings()]
    assert found == [(result, f"{family} {one}") for family in FAMILIES for result, one in cells]


@pytest.mark.parametrize("encoding", ["rope", "pope", "alibi"])
def test_a_replaced_function_of_transformers(encoding, monkeypatch):
    """By Transformers' public way to register one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    calls = []

    def mine(*args, **kwargs):
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    model = tiny_model("llama", encoding, "sdpa")
    expected = model(tokens(1, 9)).logits
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", mine)
    if encoding != "rope":
        with pytest.raises(ValueError, match="An engine replaced attn_implementation='sdpa'"):
            model(tokens(1, 9))
    else:
        torch.testing.assert_close(model(tokens(1, 9)).logits, expected)
        assert len(calls) == 2
