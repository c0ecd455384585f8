"""PoPE against the paper, read literally."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

import whatwhere.position_pope
from oracles import pope_attention
from tiny import LargestTensor, causal_lm_class, key_ranges_of, position_context, tiny_config, tiny_model, tokens
from whatwhere.attention_choice import choose_attention
from whatwhere.attention_mask import dense_mask
from whatwhere.forward_arguments import CACHE
from whatwhere.position_modules import PositionEncodings, SharedPositionEncodings
from whatwhere.position_pope import PoPE, PoPEParameters, fold

# Parameters that take other code paths than the defaults: the contract tests run them too.
VARIANTS = {
    "partial": {"partial_rotary_factor": 0.5, "magnitude": "relu", "frequencies": [1.0, 1.0, 0.1, 0.0]},
}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"delta_init": "zero"}, "one of 'zeros', 'uniform'"),
    ({"theta": 0.5}, r"\['theta'\]=0.5 is not valid: it must be greater than 1"),
    ({"theta": float("inf")}, r"\['theta'\]=inf is not valid: it must be finite"),
    ({"frequencies": [1.0]}, r"\['frequencies'\]=\[1.0\] is not valid: it must have 8 numbers of at least 0"),
    ({"frequencies": [-1.0] * 8}, "it must have 8 numbers of at least 0, one for each polar channel"),
    ({"frequencies": [float("nan")] * 8}, "it must be finite in float32"),
    ({"frequencies": [True] * 8}, "it must be a list, each of type float or None"),
    ({"frequencies": [1.0] * 8, "theta": 50.0}, r"\['theta'\]=50.0 is not valid: it has no effect beside frequencies"),
    ({"partial_rotary_factor": 0.01}, "=0.01 is not valid: .* leave at least one of 8 channels"),
    ({"partial_rotary_factor": 1.5}, r"\['partial_rotary_factor'\]=1.5 is not valid: it must be in \(0, 1\]"),
]

PARAMETERS = [
    {},
    {"use_delta": False},
    {"magnitude": "relu"},
    {"magnitude": "identity"},
    {"theta": 50.0},
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 0.3, "magnitude": "identity"},
    {"scale": "1/sqrt(2d)", "partial_rotary_factor": 0.5},
    {"frequencies": [0.7, 0.7, 0.2, 0.0], "partial_rotary_factor": 0.5},
]


class Layer(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.encodings = PositionEncodings(config, 0)


@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
@pytest.mark.parametrize("length", [1, 9])
def test_against_the_paper(parameters, length):
    config = tiny_config("llama", "pope", position_encoding_parameters=parameters)
    layer = Layer(config).double()
    encoding = layer.encodings["pope"]
    head_dim = config.head_dim
    query = torch.randn(1, 4, length, head_dim, dtype=torch.float64, requires_grad=True)
    key = torch.randn(1, 2, length, head_dim, dtype=torch.float64, requires_grad=True)
    value = torch.randn(1, 2, length, head_dim, dtype=torch.float64, requires_grad=True)
    delta = None if encoding.delta is None else encoding.delta.weight
    if delta is not None:
        torch.nn.init.uniform_(delta, -6, -0.1)
    positions = torch.arange(length)[None] + 3
    context = SharedPositionEncodings(config)(query, position_context(positions))

    magnitudes = layer.encodings["pope"].before_cache(query, key, context)
    attend = choose_attention(layer, "eager", None)
    output, _ = attend(layer, *magnitudes, value, None, context, scaling=head_dim**-0.5, dropout=0.0)
    expected = pope_attention(query, key, value, delta, encoding.parameters_, positions[0])
    # Phases are float32 in the shipped path.
    torch.testing.assert_close(output.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)

    inputs = [query, key, value] + ([delta] if delta is not None else [])
    weight = torch.randn_like(expected)
    actual = torch.autograd.grad((output.transpose(1, 2) * weight).sum(), inputs)
    for one, other in zip(actual, torch.autograd.grad((expected * weight).sum(), inputs)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


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
    weights = [layer.self_attn.encodings["pope"].delta.weight for layer in model.model.layers]
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
    name = "transformer.h.1.attn.encodings.pope.delta.weight"
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
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["_weights_version"] == 3

    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("_weights_version") == 3
    file.write_text(json.dumps(config))
    for part in tmp_path.glob("*.safetensors"):
        weights = {key.replace(".encodings.", ".position_encoding."): one for key, one in load_file(part).items()}
        save_file(weights, part, metadata={"format": "pt"})
    for index in tmp_path.glob("*.index.json"):
        index.write_text(index.read_text().replace(".encodings.", ".position_encoding."))
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
    delta = causal_lm_class("gpt2")(config).transformer.h[0].attn.encodings["pope"].delta.weight
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
            cache = model(ids[:, :24])[CACHE]
            ids = ids[:, 24:]
        with LargestTensor() as mode:
            found = model(ids, cache=cache, use_cache=False, **options).logits
        assert mode.largest < length * length / 4
        model.set_attn_implementation("sdpa")
        expected = model(tokens(1, length), use_cache=False, **options).logits[:, -ids.shape[1] :]
    seen = slice(100, None) if hidden == "padded" else slice(None)
    torch.testing.assert_close(found[:, seen], expected[:, seen], rtol=2e-5, atol=2e-5)


def test_the_cache_holds_unrotated_magnitudes():
    model = tiny_model("llama", "pope")
    cache = model(tokens(1, 9), use_cache=True)[CACHE]
    assert cache.layers[0].keys.shape == (1, 2, 9, 8)
    assert (cache.layers[0].keys > 0).all()
    # Nothing in them depends on the position: the same tokens later give the same first-layer keys.
    ids = tokens(1, 4)
    keys = model(torch.cat((ids, ids), dim=1), use_cache=True)[CACHE].layers[0].keys
    torch.testing.assert_close(keys[:, :, :4], keys[:, :, 4:])


def decoding(config, key_positions, dtype):
    """A layer with random phase shifts, and the context of a row that is the last key."""
    encoding = PoPE(config, PoPEParameters(**config.position_encoding_parameters), 0).to(dtype)
    if encoding.delta is not None:
        torch.nn.init.uniform_(encoding.delta.weight, -6, -0.1)
    context = position_context(key_positions[:, -1:], key_positions)
    return encoding, SharedPositionEncodings(config)(torch.zeros(1), context)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=lambda heads: f"H{heads[0]}G{heads[1]}")
@pytest.mark.parametrize("parameters", [{}, {"use_delta": False}, {"partial_rotary_factor": 0.5}], ids=str)
def test_decoding_multiplies_as_turned_keys_do(parameters, heads, dtype, monkeypatch):
    # Several chunks of keys, and positions that differ in the batch.
    monkeypatch.setattr(whatwhere.position_pope, "CHUNK_NUMBERS", 500)
    fields = {"hidden_size": 8 * heads[0], "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = tiny_config("llama", "pope", position_encoding_parameters=parameters, **fields)
    query, key = torch.rand(2, heads[0], 1, 8, dtype=dtype), torch.rand(2, heads[1], 100, 8, dtype=dtype)
    units = torch.eye(100, dtype=dtype).expand(2, heads[1], 100, 100)
    # So small that half precision has the digits of all weights.
    scaling = 0.3
    settings = {"scaling": scaling, "dropout": 0.0, "implementation": "sdpa"}
    for key_positions in (torch.arange(7, 107)[None], torch.stack((torch.arange(100), torch.arange(-30, 70)))):
        encoding, context = decoding(config, key_positions, dtype)
        with torch.no_grad():
            weights, none = encoding.attend(query, key, units, None, context, **settings)
            turned_query, turned_key = (part.double() for part in encoding.after_cache(query, key, context))
        assert none is None
        assert weights.dtype == dtype
        expected = turned_query @ turned_key.repeat_interleave(heads[0] // heads[1], 1).transpose(2, 3)
        found = weights.double().log() / scaling
        tolerance = 1e-6 if dtype == torch.float64 else 8 * torch.finfo(dtype).eps
        # Softmax does not see a constant of the row.
        found, centred = (logits - logits.mean(-1, keepdim=True) for logits in (found, expected))
        torch.testing.assert_close(found, centred, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mask", [None, "key_ranges", "bool", "heads", "additive"])
def test_decoding_with_every_mask(mask):
    config = tiny_config("llama", "pope")
    query, key, value = torch.rand(2, 4, 1, 8), torch.rand(2, 2, 30, 8), torch.randn(2, 2, 30, 5)
    encoding, context = decoding(config, torch.arange(30)[None], torch.float32)
    key_ranges = key_ranges_of([[-1] * 7 + [0] * 23, [0] * 10 + [1] * 10 + [-1] * 4 + [1] * 6], 1)
    visible = {"key_ranges": dense_mask(key_ranges, 1), None: torch.ones(1, 1, 1, 30, dtype=torch.bool)}.get(
        mask, torch.rand(2, 4 if mask == "heads" else 1, 1, 30) < 0.6
    )
    given = {
        None: None,
        "key_ranges": key_ranges,
        "additive": torch.where(visible, 0.0, torch.finfo(torch.float32).min),
    }
    settings = {"scaling": 0.4, "dropout": 0.0}
    with torch.no_grad():
        turned_query, turned_key = encoding.after_cache(query, key, context)
        logits = turned_query @ turned_key.repeat_interleave(2, 1).transpose(2, 3) * 0.4
        weights = torch.softmax(logits.masked_fill(~visible, float("-inf")), -1)
        for implementation in ("sdpa", "blockwise"):
            out, _ = encoding.attend(
                query, key, value, given.get(mask, visible), context, implementation=implementation, **settings
            )
            torch.testing.assert_close(out, weights @ value.repeat_interleave(2, 1), rtol=1e-5, atol=1e-5)


def test_only_decoding_without_gradients_has_a_way_of_its_own():
    encoding, context = decoding(tiny_config("llama", "pope"), torch.arange(9)[None], torch.float32)
    query, key = torch.rand(1, 4, 1, 8), torch.rand(1, 2, 9, 8)
    settings = {"scaling": 0.4, "dropout": 0.0, "implementation": "sdpa"}
    assert encoding.attend(query, key, key, None, context, **settings) is None
    with torch.no_grad():
        assert encoding.attend(query, key, key, None, context, **settings) is not None
        assert encoding.attend(query, key, key, None, context, **{**settings, "dropout": 0.1}) is None
        assert encoding.attend(query, key, key, None, context, **{**settings, "implementation": "eager"}) is None
        assert encoding.attend(query.expand(-1, -1, 2, -1), key, key, None, context, **settings) is None


def test_decoding_writes_no_turned_keys():
    encoding, context = decoding(tiny_config("llama", "pope"), torch.arange(60000)[None], torch.float32)
    query, key = torch.rand(8, 4, 1, 8), torch.rand(8, 2, 60000, 8)
    settings = {"scaling": 0.4, "dropout": 0.0, "implementation": "sdpa"}
    with torch.no_grad(), LargestTensor() as mode:
        assert encoding.attend(query, key, key, None, context, **settings) is not None
    # Views of the keys have their storage.
    assert mode.largest <= key.numel()
