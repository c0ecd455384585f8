"""Numbers in fewer bits, other caches and other forms of a model: each cell of `engine_matrix` works or is refused."""

import copy
import importlib
import re

import pytest
import torch
from transformers import BitsAndBytesConfig, CompileConfig, DynamicCache, QuantizedCache, StaticCache, TorchAoConfig
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

from engine_matrix import for_engine
from tiny import tiny_model, tokens
from whatwhere.scripts.data.tokenize import build_tokenizer

# A table of CoPE, rotated keys that are cached without the rotation, and a state of each token in the cache.
QUICK = ("cope", "pope", "fox")
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


def close(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def needs(*modules):
    """Skips a test where a package is missing that nothing else of the project needs."""
    for name in modules:
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def saved(model, folder, **options):
    """Saves a model, and loads it with options of `from_pretrained`."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, **options).eval()


@for_engine("quantized_cache", QUICK)
def test_quantized_cache(encoding, expected):
    model, ids = tiny_model("llama", encoding), tokens(2, 20)
    options = {"backend": "quanto", "nbits": 4, "axis_key": 0, "axis_value": 0}
    if expected == "refused":
        with pytest.raises(ValueError, match=re.escape(f"QuantizedCache cannot hold position_encoding={encoding!r}")):
            model.generate(ids, cache_implementation="quantized", cache_config=options, **GREEDY)
        return
    quantized, rounded = QuantizedCache(config=model.config, **options), DynamicCache(config=model.config)
    with torch.no_grad():
        prefill = model(ids[:, :16], cache=quantized).logits
        close(prefill, model(ids[:, :16]).logits)
        for index, layer in enumerate(quantized.layers):
            keys, values = layer._dequantize(layer._quantized_keys), layer._dequantize(layer._quantized_values)
            rounded.update(keys, values, index)
        # The error is that of the rounded keys and values, and no other.
        for step in range(16, 20):
            token = ids[:, step : step + 1]
            found = model(token, cache=quantized).logits
            close(found, model(token, cache=rounded).logits)
    assert (found[:, -1] - model(ids).logits[:, -1]).abs().max() > 1e-3


def test_a_quantized_cache_refuses_shifted_keys():
    model, ids = tiny_model("llama", "alibi", key_value_shift=True), tokens(2, 20)
    with pytest.raises(ValueError, match=re.escape("exact numbers for ['shift']")):
        model(ids, cache=QuantizedCache("quanto", model.config))


@for_engine("assisted_generation")
def test_assisted_generation(encoding, expected):
    assert expected == "works"
    model, ids = tiny_model("llama", encoding), tokens(1, 7)
    twice = torch.cat((ids, ids), dim=1)
    assistant = tiny_model("llama", encoding, num_hidden_layers=1)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **GREEDY), model.generate(ids, **GREEDY))
    assert torch.equal(model.generate(twice, prompt_lookup_num_tokens=3, **GREEDY), model.generate(twice, **GREEDY))


class NoStream:
    """What an offloaded cache does with streams of a GPU, for CPUs."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, stream):
        pass


@for_engine("offloaded_cache", QUICK)
def test_offloaded_cache(encoding, expected, monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        # Everything but the copies between devices.
        monkeypatch.setattr(torch, "Stream", NoStream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
    model, ids = tiny_model("llama", encoding).to(device), tokens(2, 7).to(device)
    plain = model.generate(ids, **GREEDY)
    for cache in ("offloaded", "offloaded_static"):
        assert torch.equal(model.generate(ids, cache_implementation=cache, disable_compile=True, **GREEDY), plain)


def exported(module, ids, strict):
    """The program of any number of tokens."""
    length = torch.export.Dim("length", max=15)
    shapes = {"input_ids": {1: length}, "cache_position": {0: length}}
    positions = torch.arange(ids.shape[1])
    program = module.export(input_ids=ids, cache_position=positions, dynamic_shapes=shapes, strict=strict)
    return program.module()


@for_engine("export", QUICK)
def test_export(encoding, expected):
    # For a bias, blockwise attention does not fit all lengths.
    model, ids = tiny_model("llama", encoding, "eager"), tokens(1, 9)
    model.generation_config.cache_implementation = "static"
    module = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=16)
    # Strict, the default, takes three times as long. Without it PyTorch finds a stride here that depends on lengths.
    strict = encoding == "stick_breaking"
    with torch.no_grad():
        if expected == "refused":
            with pytest.raises(
                ValueError, match=f"StaticCache cannot hold {re.escape(f'position_encoding={encoding!r}')}"
            ):
                exported(module, ids, strict)
            widen_cache(module.model)
        program = exported(module, ids, strict)
        pieces = [program(input_ids=ids[:, :4], cache_position=torch.arange(4))]
        for step in range(4, 9):
            pieces += [program(input_ids=ids[:, step : step + 1], cache_position=torch.tensor([step]))]
        close(torch.cat(pieces, dim=1), model(ids).logits)


def widen_cache(module):
    """Gives an exportable module a cache that a forward pass has sized: docs/engines.md."""
    length = module.static_cache.layers[0].max_cache_len
    module.static_cache = StaticCache(config=module.model.config, max_cache_len=length)
    module.model(torch.tensor([[0]]), cache=module.static_cache)
    for index, layer in enumerate(module.static_cache.layers):
        module.register_buffer(f"key_cache_{index}", layer.keys, persistent=False)
        module.register_buffer(f"value_cache_{index}", layer.values, persistent=False)
        module.register_buffer(f"cumulative_length_{index}", layer.cumulative_length, persistent=False)


@for_engine("compiled_decoding", QUICK)
def test_compiled_decoding(encoding, expected):
    assert expected == "works"
    model, ids = tiny_model("llama", encoding, max_position_embeddings=64), tokens(2, 7)
    lengths = {"max_new_tokens": 51, "min_new_tokens": 51, "do_sample": False}
    graphs = []

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph.forward

    settings = CompileConfig(backend=backend, fullgraph=True)
    # `generate` compiles by itself on GPUs.
    settings._compile_all_devices = True
    torch._dynamo.reset()
    compiled = model.generate(ids, cache_implementation="static", compile_config=settings, **lengths)
    assert len(graphs) == 1
    assert torch.equal(compiled, model.generate(ids, **lengths))


@pytest.mark.parametrize("encoding", ["absolute", "relative"])
def test_a_compiled_model_refuses_longer_sequences(encoding):
    model = tiny_model("llama", encoding, num_hidden_layers=1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        close(compiled(tokens(1, 48)).logits, model(tokens(1, 48)).logits)
        with pytest.raises(RuntimeError, match=f"longer than position_encoding='{encoding}' supports \\(48 tokens"):
            compiled(tokens(1, 49))


@for_engine("torchao", QUICK, bits=[8, 4])
def test_torchao(encoding, expected, bits, tmp_path):
    assert expected == "works"
    needs("torchao")
    quantization = importlib.import_module("torchao.quantization")
    if bits == 8:
        settings = quantization.Int8WeightOnlyConfig()
    else:
        # `Int4WeightOnlyConfig`, the same numbers, has kernels for GPUs only.
        group = quantization.PerGroup(32)
        settings = quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)
    model, ids = tiny_model("llama", encoding, hidden_size=64, intermediate_size=64), tokens(2, 12)
    quantized = saved(model, tmp_path, quantization_config=TorchAoConfig(settings), dtype=torch.float32)
    with torch.no_grad():
        plain = model(ids).logits
        found = 0
        for one, other in zip(model.parameters(), quantized.parameters(), strict=True):
            if type(other) is not torch.nn.Parameter:
                found += 1
                one.copy_(other.dequantize())
        assert found >= 14
        close(quantized(ids).logits, model(ids).logits)
        assert not torch.equal(plain, model(ids).logits)
    assert torch.equal(quantized.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_lm_eval_with_torchao(tmp_path):
    """lm-eval loads a checkpoint that was saved with its quantised weights."""
    needs("torchao")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    settings = TorchAoConfig(importlib.import_module("torchao.quantization").Int8WeightOnlyConfig())
    model = tiny_model("llama", "cope", vocab_size=258, bos_token_id=256, eos_token_id=256, pad_token_id=257)
    quantized = saved(model, tmp_path / "whole", quantization_config=settings, dtype=torch.float32)
    quantized.save_pretrained(tmp_path / "quantized")
    tokenizer = build_tokenizer("bytes")
    tokenizer.save_pretrained(tmp_path / "quantized")
    scorer = HFLM(pretrained=str(tmp_path / "quantized"), device="cpu", dtype="float32", trust_remote_code=True)
    ((score, _),) = scorer.loglikelihood([Instance("loglikelihood", {}, ("The cat", " sat"), 0)], disable_tqdm=True)
    ids = tokenizer("The cat sat", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected, plain = (
            one(ids).logits[0, 6:-1].log_softmax(-1).gather(1, ids[0, 7:, None]).sum().item()
            for one in (quantized, model)
        )
    assert score == pytest.approx(expected, abs=1e-3)
    assert abs(expected - plain) > 1e-2


@for_engine("bitsandbytes", QUICK)
def test_bitsandbytes(encoding, expected, tmp_path):
    assert expected == "works"
    needs("bitsandbytes")
    import bitsandbytes

    model, ids = tiny_model("llama", encoding, hidden_size=64, intermediate_size=64), tokens(2, 12)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    quantized = saved(model, tmp_path, quantization_config=settings, dtype=torch.float32)
    rounded, found = copy.deepcopy(model), 0
    with torch.no_grad():
        for name, module in quantized.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                found += 1
                weight = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
                rounded.get_submodule(name).weight.copy_(weight)
        assert found == 14
        # The products of a CPU have a bfloat16's digits.
        wanted = rounded(ids).logits
        assert (quantized(ids).logits - wanted).std() < 0.05 * wanted.std()
        assert (model(ids).logits - wanted).std() > 0.2 * wanted.std()


@for_engine("offloaded_weights", QUICK)
def test_offloaded_weights(encoding, expected, tmp_path):
    assert expected == "works"
    model, ids = tiny_model("llama", encoding, num_hidden_layers=4), tokens(2, 12)
    memory = {"cpu": sum(parameter.numel() for parameter in model.parameters()) * 4 // 2}
    folder = tmp_path / "offloaded"
    loaded = saved(model, tmp_path, device_map="auto", max_memory=memory, offload_folder=folder)
    assert {"cpu", "disk"} == set(loaded.hf_device_map.values())
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(loaded.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
