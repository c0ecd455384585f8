"""PoPE against the paper, read literally."""

import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import whatwhere.position_pope
from oracles import pope_attention
from test_attention_blockwise import LargestTensor
from tiny import causal_lm_class, tiny_config, tiny_model, tokens
from whatwhere.attention import eager_attention_forward
from whatwhere.position_registry import PositionEncodings, SharedPositionEncodings
from whatwhere.position_pope import PolarTables, PoPE, PoPEParameters, fold, pope_frequencies

PARAMETERS = [
    {},
    {"use_delta": False},
    {"magnitude": "relu"},
    {"magnitude": "identity"},
    {"theta": 50.0},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.3, "magnitude": "identity"},
    {"scale": "1/sqrt(2d)", "partial_rotary_factor": 0.5},
]


class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.position_encoding = PositionEncodings(config, 0)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("length", [1, 9])
def test_against_the_paper(parameters, length):
    config = tiny_config("llama", "pope", position_encoding_parameters=parameters)
    layer = Layer(config).double()
    encoding = layer.position_encoding["pope"]
    head_dim = config.head_dim
    query = torch.randn(1, 4, length, head_dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, length, head_dim, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, length, head_dim, dtype=torch.float64, requires_grad=True)
    delta = None if encoding.delta is None else encoding.delta.weight
    if delta is not None:
        torch.nn.init.uniform_(delta, -6, -0.1)
    positions = torch.arange(length)[None] + 3
    context = SharedPositionEncodings(config)(query, positions, None, 0, length)

    rotated = layer.position_encoding.rotate(query, key, context)
    rotated = layer.position_encoding.rotate_cached(*rotated, context)
    output, _ = eager_attention_forward(layer, *rotated, value, None, scaling=head_dim**-0.5, position_context=context)
    expected = pope_attention(query, key, value, delta, encoding.parameters_, positions[0])
    # Phases are float32 in the shipped path.
    torch.testing.assert_close(output.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)

    inputs = [query, key, value] + ([delta] if delta is not None else [])
    weight = torch.randn_like(expected)
    actual = torch.autograd.grad((output.transpose(1, 2) * weight).sum(), inputs)
    for one, other in zip(actual, torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def test_frequencies():
    frequencies = pope_frequencies(4, 10000.0)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_delta_is_folded():
    lowest = -2 * math.pi
    inside = torch.cat((torch.linspace(lowest, 0, 1001), torch.tensor([-1e-30, 0.0])))
    assert torch.equal(fold(inside), inside)
    outside = torch.tensor([0.5, lowest - 0.5, -lowest, -lowest + 0.5, 2 * lowest, 2 * lowest - 0.5, -7 * lowest - 1])
    expected = torch.tensor([-0.5, lowest + 0.5, lowest, lowest + 0.5, 0.0, -0.5, lowest + 1])
    torch.testing.assert_close(fold(outside), expected, rtol=0, atol=5e-6)
    delta = torch.tensor([-6.0, 0.0, lowest, 0.5, -7.0, 7.0, -13.0], requires_grad=True)
    fold(delta).sum().backward()
    assert delta.grad.tolist() == [1, 1, 1, -1, -1, 1, 1]
    # Away from the bounds, where the slope jumps.
    anywhere = torch.linspace(-30, 30, 100, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fold, anywhere)
    assert fold(torch.tensor(math.nan)).isnan()


def test_gradients_of_delta_add_up_over_micro_batches():
    model = tiny_model("llama", "pope")
    weights = [layer.self_attn.position_encoding["pope"].delta.weight for layer in model.model.layers]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.linspace(-9, 3, weight.numel()).view_as(weight))
    ids = tokens(4, 12)
    whole = torch.autograd.grad(model(ids, labels=ids).loss, weights)
    for part in ids.split(1):
        (model(part, labels=part).loss / 4).backward()
    for weight, expected in zip(weights, whole):
        assert (expected != 0).all()
        torch.testing.assert_close(weight.grad, expected, rtol=1e-4, atol=1e-7)


def test_delta_returns_after_a_step_too_far():
    delta = torch.nn.Parameter(torch.tensor([-0.01]))
    optimiser = torch.optim.SGD([delta], lr=1.0)
    for target in [0.5] + [-1.0] * 40:
        optimiser.zero_grad()
        (0.1 * (fold(delta) - target).square()).sum().backward()
        if target > 0:
            delta.grad.mul_(10)
        optimiser.step()
    # It may stay outside, where it means the same.
    torch.testing.assert_close(fold(delta.detach()), torch.tensor([-1.0]), rtol=0, atol=0.02)


@pytest.mark.parametrize("shard_size", ["1GB", "4KB"], ids=["one-file", "shards"])
def test_delta_of_older_files_is_clamped_when_loaded(tmp_path, shard_size):
    model = tiny_model("gpt2", "pope")
    name = "transformer.h.1.attn.position_encoding.pope.delta.weight"
    weight = model.get_parameter(name)
    with torch.no_grad():
        weight.copy_(torch.linspace(-9, 3, weight.numel()).view_as(weight))
    ids = tokens(1, 9)
    logits = model(ids).logits
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    new = type(model).from_pretrained(tmp_path)
    assert torch.equal(new.get_parameter(name), weight)
    assert torch.equal(new(ids).logits, logits)
    # Weights of a model in memory are those of this version.
    copy = type(model).from_pretrained(None, config=tiny_config("gpt2", "pope"), state_dict=model.state_dict())
    assert torch.equal(copy.get_parameter(name), weight)

    # A configuration that is saved by itself is of this version, too.
    model.config.__class__(**{"position_encoding": "pope"}).save_pretrained(tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["_weights_version"] == 2

    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("_weights_version") == 2
    file.write_text(json.dumps(config))
    # The version is that of the file, whatever configuration is passed.
    passed = type(model).from_pretrained(tmp_path, config=tiny_config("gpt2", "pope"))
    assert torch.equal(passed.get_parameter(name), weight.clamp(-2 * math.pi, 0))
    old, _ = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert torch.equal(old.get_parameter(name), weight.clamp(-2 * math.pi, 0))
    assert old.get_parameter(name).requires_grad
    # Trained further and saved, it is no older file.
    with torch.no_grad():
        old.get_parameter(name).copy_(weight)
    old.save_pretrained(tmp_path / "again")
    assert torch.equal(type(model).from_pretrained(tmp_path / "again").get_parameter(name), weight)


@pytest.mark.parametrize(("init", "low", "high"), [("zeros", 0.0, 0.0), ("uniform", -2 * math.pi, 0.0)])
def test_initial_delta(init, low, high):
    config = tiny_config("gpt2", "pope", position_encoding_parameters={"delta_init": init})
    delta = causal_lm_class("gpt2")(config).transformer.h[0].attn.position_encoding["pope"].delta.weight
    assert delta.shape == (4, 8)
    assert delta.min() >= low
    assert delta.max() <= high
    if init == "uniform":
        assert 1.2 < delta.std() < 2.4


@pytest.mark.parametrize("hidden", ["padded", "packed", "chunk", "nothing"])
def test_no_mask_of_quadratic_size(hidden):
    length = 1024
    model = tiny_model("llama", "pope", num_hidden_layers=1, max_position_embeddings=length)
    assert model.config._attn_implementation == "auto"
    ids, options, cache = tokens(1, length), {}, None
    if hidden != "chunk":
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :100] = 0 if hidden == "padded" else 1
    if hidden == "packed":
        options = {"position_ids": torch.arange(length)[None] % 700}
    with torch.no_grad():
        if hidden == "chunk":
            cache = model(ids[:, :24]).past_key_values
            ids = ids[:, 24:]
        with LargestTensor() as mode:
            found = model(ids, past_key_values=cache, use_cache=False, **options).logits
        assert mode.largest < length * length / 4
        model.set_attn_implementation("sdpa")
        expected = model(tokens(1, length), use_cache=False, **options).logits[:, -ids.shape[1] :]
    seen = slice(100, None) if hidden == "padded" else slice(None)
    torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=2e-5, atol=2e-5)


def test_the_cache_holds_unrotated_magnitudes():
    model = tiny_model("llama", "pope")
    cache = model(tokens(1, 9), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (1, 2, 9, 8)
    assert (cache.layers[0].keys > 0).all()
    # Nothing in them depends on the position: the same tokens later give the same first-layer keys.
    ids = tokens(1, 4)
    keys = model(torch.cat((ids, ids), dim=1), use_cache=True).past_key_values.layers[0].keys
    torch.testing.assert_close(keys[:, :, :4], keys[:, :, 4:])


def test_shifting_all_positions_changes_nothing():
    model = tiny_model("llama", "pope")
    ids = tokens(1, 12)
    with torch.no_grad():
        logits = model(ids).logits
        shifted = model(ids, position_ids=torch.arange(12)[None] + 1000).logits
    torch.testing.assert_close(shifted, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=lambda heads: f"H{heads[0]}G{heads[1]}")
@pytest.mark.parametrize("parameters", [{}, {"use_delta": False}, {"partial_rotary_factor": 0.5}], ids=str)
def test_decoding_multiplies_as_turned_keys_do(parameters, heads, dtype, monkeypatch):
    # Several chunks of keys, and positions that differ in the batch.
    monkeypatch.setattr(whatwhere.position_pope, "CHUNK_NUMBERS", 500)
    fields = {"hidden_size": 8 * heads[0], "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = tiny_config("llama", "pope", position_encoding_parameters=parameters, **fields)
    config._attn_implementation = "sdpa"
    encoding = PoPE(config, PoPEParameters(**parameters), 0).eval().to(dtype)
    if encoding.delta is not None:
        torch.nn.init.uniform_(encoding.delta.weight, -6, -0.1)
    query, key = torch.rand(2, heads[0], 1, 8, dtype=dtype), torch.rand(2, heads[1], 100, 8, dtype=dtype)
    for key_positions in (torch.arange(7, 107)[None], torch.stack((torch.arange(100), torch.arange(-30, 70)))):
        context = {"query_positions": key_positions[:, -1:], "key_positions": key_positions}
        context["pope"] = PolarTables(config, encoding.parameters_)(query, context)
        with torch.no_grad():
            found_query, found_key = encoding.rotate_cached(query, key, context)
            turned = [part.double() for part in encoding.train().rotate_cached(query, key, context)]
            encoding.eval()
        assert found_key.shape == (2, heads[1], 100, heads[0] // heads[1])
        assert found_query.dtype == found_key.dtype == dtype
        groups = heads[0] // heads[1]
        products = [
            one.double() @ other.double().repeat_interleave(groups, 1).transpose(2, 3)
            for one, other in ((found_query, found_key), turned)
        ]
        tolerance = 1e-6 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(*products, rtol=tolerance, atol=tolerance)


def test_decoding_writes_no_turned_keys():
    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.found = max(self.found, out.untyped_storage().nbytes() // out.element_size())
            return out

    config = tiny_config("llama", "pope")
    config._attn_implementation = "sdpa"
    encoding = PoPE(config, PoPEParameters(), 0).eval()
    positions = torch.arange(60000)[None]
    context = {"query_positions": positions[:, -1:], "key_positions": positions}
    context["pope"] = PolarTables(config, encoding.parameters_)(positions, context)
    query, key = torch.rand(1, 4, 1, 8), torch.rand(8, 2, 60000, 8)
    with torch.no_grad(), Largest() as mode:
        encoding.rotate_cached(query.expand(8, -1, -1, -1), key, context)
    # Views of the keys have their storage.
    assert mode.found <= key.numel()
