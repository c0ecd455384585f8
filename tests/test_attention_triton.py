"""Triton attention in the models: the kernels' mask, what is refused, when "auto" takes them, the models' contract.

Kernels run in Triton's interpreter, which conftest.py asks for. Their own tests are test_kernel_*.py.
"""

import types

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask, sdpa_mask

import whatwhere
import whatwhere.attention as attention
import whatwhere.attention_sdpa as attention_sdpa
import whatwhere.attention_triton as attention_triton
from tiny import (
    FAMILIES,
    LargestTensor,
    check_operator,
    in_steps,
    key_ranges_of,
    position_context,
    slow_but,
    tiny_config,
    tiny_model,
    tokens,
)
from whatwhere.attention_choice import flash_names, supported_implementations
from whatwhere.attention_mask import dense_mask, is_key_ranges, key_ranges_mask
from whatwhere.position_base import PositionContext
from whatwhere.position_cope import CoPE

pytest.importorskip("triton", reason="the kernels need Triton")

from whatwhere import kernel_launch, kernel_plain
from whatwhere.forward_arguments import CACHE
from whatwhere.kernel_plain import plain_attention

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

WITH_KERNELS = (
    "alibi",
    "cope",
    "cope+alibi",
    "cope+relative",
    "cope+rope",
    "fox",
    "fox+rope",
    "pope",
    "relative",
    "token_gated_cope",
    "token_gated_cope+rope",
)
# Tables scaled down to saturate within the tiny sequences; CoPE with other gates, and not in every layer.
SETTINGS = {
    "cope": ("cope", {"num_positions": 6}),
    "cope:shared": ("cope", {"num_positions": 6, "share_across_layers": True, "scale_positions": True}),
    "cope+rope": ("cope+rope", {"cope": {"num_positions": 6}}),
    "pope:partial": ("pope", {"partial_rotary_factor": 0.5, "magnitude": "relu", "use_delta": False}),
    "separate": ("cope", {"num_positions": 6, "gates": "separate_key"}),
    "value": ("cope", {"num_positions": 6, "gates": "value"}),
    "every2": ("cope", {"num_positions": 6, "every_n_layers": 2, "share_across_layers": True}),
    "rotated": ("cope+rope", {"cope": {"num_positions": 6, "gates": "separate_key", "every_n_layers": 2}}),
    "plan": (["cope", "pope"], {"cope": {"num_positions": 6, "gates": "separate_key"}}),
    "cope+alibi": ("cope+alibi", {"cope": {"num_positions": 6}}),
    "cope+relative": (
        "cope+relative",
        {"cope": {"num_positions": 6}, "relative": {"num_positions": 8, "beyond": "none"}},
    ),
    "cope+relative:every2": (
        "cope+relative",
        {
            "cope": {"num_positions": 6, "every_n_layers": 2, "gates": "separate_key"},
            "relative": {"num_positions": 8, "beyond": "last"},
        },
    ),
    "relative": ("relative", {"num_positions": 6, "beyond": "none"}),
    "relative:last": ("relative", {"num_positions": 6, "beyond": "last"}),
    "token_gated_cope": ("token_gated_cope", {"num_positions": 6}),
    "token_gated_cope+rope": ("token_gated_cope+rope", {"token_gated_cope": {"num_positions": 6}}),
}
# The kinds of kernels: CoPE's, PoPE's, and plain attention with each bias.
SOME = slow_but(["cope+rope", "pope"], ["cope+rope", "pope", "fox", "relative"])
COMPILED = ("alibi", "cope+relative", "cope+rope", "fox", "pope", "relative", "token_gated_cope")
TWO_LAYERS = ("cope:shared", "every2", "rotated", "plan", "cope+relative:every2")
COPE_AND_POPE = ("cope", "cope:shared", "cope+rope", "pope", "pope:partial")


def build(encoding, implementation="triton", family="llama", **fields):
    """A model of one layer with two heads that share a key head: the interpreter takes a while for each program."""
    name, parameters = SETTINGS.get(encoding, (encoding, {}))
    own = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2 if encoding in TWO_LAYERS else 1,
        "position_encoding_parameters": parameters,
    }
    return tiny_model(family, name, implementation, **{**own, **fields})


def close(actual, expected, tolerance=5e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def results(model, mask=None, **inputs):
    """The logits where the mask shows, and the gradient of every parameter."""
    model.zero_grad()
    logits = model(attention_mask=mask, **inputs).logits
    logits = logits if mask is None or mask.ndim == 4 else logits[mask.bool()]
    logits.square().mean().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def all_close(found, expected, tolerance=5e-5):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        close(one, other, tolerance)


def padding(*sides, length=21):
    """A mask (2, T): its first row has padding at the left, at the right, a hole, or several of these."""
    mask = torch.ones(2, length, dtype=torch.long)
    for side in sides:
        mask[0, {"left": slice(5), "right": slice(-4, None), "hole": slice(8, 12)}[side]] = 0
    return mask


def documents(position_ids):
    """A mask function for packed documents, as Transformers makes it."""
    document = (position_ids == 0).cumsum(-1)
    return lambda batch, head, row, slot: (document[batch, row] == document[batch, slot]) & (row >= slot)


PACKED = torch.cat((torch.arange(9), torch.arange(1), torch.arange(11)))[None].expand(2, -1)
# Arguments as Transformers passes them to a mask function.
GEOMETRIES = {
    "causal": {"q_length": 21, "kv_length": 21},
    "left": {"q_length": 21, "kv_length": 21, "attention_mask": padding("left").bool()},
    "right": {"q_length": 21, "kv_length": 21, "attention_mask": padding("right").bool()},
    "both": {"q_length": 21, "kv_length": 21, "attention_mask": padding("left", "right").bool()},
    "hole": {"q_length": 21, "kv_length": 21, "attention_mask": padding("hole").bool()},
    "packed": {"q_length": 21, "kv_length": 21, "mask_function": documents(PACKED)},
    "chunk": {"q_length": 4, "kv_length": 21, "q_offset": 17},
    "chunk-left": {"q_length": 4, "kv_length": 21, "q_offset": 17, "attention_mask": padding("left").bool()},
    "chunk-both": {"q_length": 9, "kv_length": 21, "q_offset": 12, "attention_mask": padding("left", "right").bool()},
    "step-hole": {"q_length": 1, "kv_length": 21, "q_offset": 20, "attention_mask": padding("hole").bool()},
    "static-prefill": {"q_length": 21, "kv_length": 32, "q_offset": torch.tensor(0)},
    "static-exact": {"q_length": 21, "kv_length": 21, "q_offset": torch.tensor(0)},
    "static-left": {
        "q_length": 4,
        "kv_length": 32,
        "q_offset": torch.tensor([17]),
        "attention_mask": padding("left").bool(),
    },
    "static-step": {
        "q_length": 1,
        "kv_length": 32,
        "q_offset": torch.tensor(20),
        "attention_mask": padding("left", "right").bool(),
    },
    "offset-keys": {"q_length": 4, "kv_length": 9, "q_offset": 17, "kv_offset": 12},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_ranges_are_the_mask_of_transformers(geometry):
    """Row by row what `sdpa_mask` shows, but for padding, which sees nothing here."""
    rows, slots = geometry["q_length"], geometry["kv_length"]
    key_ranges = key_ranges_mask(batch_size=2, **geometry)
    expected = sdpa_mask(batch_size=2, allow_is_causal_skip=False, **geometry)
    if key_ranges is None:
        assert torch.equal(expected, torch.ones(rows, slots, dtype=torch.bool).tril(slots - rows).expand_as(expected))
        return
    assert is_key_ranges(key_ranges)
    assert key_ranges.shape == (2, 1, rows + slots, 2)
    assert key_ranges.is_contiguous()
    first = int(geometry.get("q_offset", 0)) - geometry.get("kv_offset", 0)
    if "attention_mask" in geometry:
        own = torch.nn.functional.pad(geometry["attention_mask"], (0, slots))[:, first : first + rows]
        expected = expected & own[:, None, :, None]
    assert torch.equal(dense_mask(key_ranges, rows), expected)
    # No tile is visited for nothing: the first slot and the last are seen, unless nothing is.
    low, high = key_ranges[:, 0, :rows].unbind(-1)
    seen = expected[:, 0].any(-1)
    assert torch.equal(low[seen].long(), expected[:, 0].int().argmax(-1)[seen])
    assert torch.equal(high[seen].long(), slots - expected[:, 0].flip(-1).int().argmax(-1)[seen])
    assert torch.equal(low[~seen], high[~seen])


def test_plain_causal_attention_needs_no_mask():
    assert key_ranges_mask(2, 7, 7) is None
    assert key_ranges_mask(2, 3, 7, q_offset=4) is None
    assert key_ranges_mask(2, 3, 7, q_offset=0) is not None


class OnGpu(torch.Tensor):
    """A mask that seems to be on a GPU, and counts how often its values are read."""

    device = torch.device("cuda")
    reads = 0

    def all(self, *arguments):
        OnGpu.reads += 1
        return super().all(*arguments)


def test_a_mask_of_ones_on_a_gpu(monkeypatch):
    """Of a prompt it is none, as in Transformers; that takes one look. Steps of decoding do not wait for the device."""
    monkeypatch.setattr(OnGpu, "reads", 0)
    ones = torch.ones(2, 7, dtype=torch.bool).as_subclass(OnGpu)
    assert key_ranges_mask(2, 7, 7, attention_mask=ones) is None
    assert OnGpu.reads == 1
    padded = ones.clone()
    padded[0, 0] = False
    assert is_key_ranges(key_ranges_mask(2, 7, 7, attention_mask=padded))
    assert OnGpu.reads == 2
    for rows in (1, 3):
        assert is_key_ranges(key_ranges_mask(2, rows, 7, q_offset=7 - rows, attention_mask=ones))
    # What is captured in a CUDA graph cannot be read.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_key_ranges(key_ranges_mask(2, 7, 7, attention_mask=ones))
    assert OnGpu.reads == 2


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_ranges_do_not_wait_for_the_device(geometry):
    # Nothing can be read from tensors on the meta device: what has to be would be an error.
    moved = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in geometry.items()}
    if "mask_function" in moved:
        moved["mask_function"] = lambda batch, head, row, slot: (batch == row) | (row >= slot)
    key_ranges = key_ranges_mask(batch_size=2, device="meta", **moved)
    assert key_ranges is None or key_ranges.shape == (2, 1, geometry["q_length"] + geometry["kv_length"], 2)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_masks_through_transformers_and_a_cache(static):
    """`create_causal_mask` with the caches that `generate` makes, and the positions of cached keys."""
    masks = {}
    for name in ("triton", "sdpa"):
        config = tiny_config("llama", "pope")
        config._attn_implementation = name
        cache = StaticCache(config=config, max_cache_len=16) if static else DynamicCache(config=config)
        mask = padding("left", length=12)
        masks[name] = []
        for start, end in ((0, 8), (8, 11), (11, 12)):
            masks[name].append(
                create_causal_mask(
                    config=config,
                    inputs_embeds=torch.zeros(2, end - start, 32),
                    attention_mask=mask[:, :end],
                    **{CACHE: cache},
                )
            )
            for layer in range(2):
                cache.update(*torch.zeros(2, 2, 2, end - start, 8), layer)
    for key_ranges, expected, rows, past in zip(masks["triton"], masks["sdpa"], (8, 3, 1), (0, 8, 11)):
        own = mask[:, past : past + rows].bool()[:, None, :, None]
        assert torch.equal(dense_mask(key_ranges, rows), expected & own)
        positions = (mask.cumsum(-1) - 1)[:, past : past + rows]
        contexts = [
            PositionContext(positions, given, torch.tensor(past), expected.shape[-1])
            for given in (key_ranges, mask[:, : past + rows])
        ]
        assert torch.equal(*(context.key_positions for context in contexts))
        assert torch.equal(*(context.key_mask for context in contexts))
        assert torch.equal(contexts[0].key_mask[:, : past + rows], mask[:, : past + rows].bool())


def test_mask_functions_of_the_user_make_a_4d_mask():
    mask = key_ranges_mask(
        batch_size=1,
        q_length=3,
        kv_length=3,
        mask_function=lambda batch, head, row, slot: row >= slot - 1,
        use_vmap=True,
    )
    assert mask.dtype == torch.bool
    assert mask[0, 0, 0, 1]


def test_names_of_the_implementations():
    for encoding in whatwhere.list_position_encodings():
        supported = supported_implementations(tiny_config("llama", encoding))
        assert ("triton" in supported) == ("auto" in supported) == (encoding in WITH_KERNELS)
        assert (supported[0] == "auto") == (encoding in WITH_KERNELS)
        if encoding not in WITH_KERNELS:
            with pytest.raises(ValueError, match=r'attn_implementation="triton".*Allowed: '):
                tiny_model("llama", encoding, "triton")


@pytest.mark.parametrize(
    ("encoding", "names"),
    [
        (["cope", "pope"], ["auto", "triton", "blockwise", "eager"]),
        (["cope", "rope"], ["auto", "triton", "blockwise", "eager"]),
        (["pope", "none"], ["auto", "triton", "sdpa", "flex_attention", "eager"]),
        (["pope", "alibi"], ["auto", "triton", "sdpa", "flex_attention", "blockwise", "eager"]),
        (["cope+rope", "fox"], ["auto", "triton", "blockwise", "eager"]),
        (["alibi", "rope"], ["auto", "triton", "sdpa", "flex_attention", "blockwise", "eager"]),
        (["rope", "none"], ["sdpa", "flex_attention", *flash_names(), "eager"]),
        (["cope", "cope"], ["auto", "triton", "blockwise", "eager"]),
    ],
    ids=str,
)
def test_names_of_the_implementations_of_plans(encoding, names):
    """The kernels need one for every layer, `auto` for one; what another layer cannot use is out."""
    assert supported_implementations(tiny_config("llama", encoding)) == names
    assert tiny_model("llama", encoding).config._attn_implementation == names[0]


def test_refused_when_the_model_is_built(monkeypatch):
    with pytest.raises(ValueError, match=r'attn_implementation="triton".*head_dim=288; allowed: at most 256'):
        build("pope", hidden_size=288 * 2)
    assert build("pope", "auto", hidden_size=288 * 2).config._attn_implementation == "auto"
    model = build("cope", None)
    monkeypatch.setattr(attention_triton, "import_error", lambda: "No module named 'triton'")
    attention_triton._runs_on.cache_clear()
    try:
        message = r"needs Triton.*No module named 'triton'.*Allowed here: 'auto', 'blockwise', 'eager'"
        with pytest.raises(ValueError, match=message):
            build("cope")
        with pytest.raises(ValueError, match=message):
            model.set_attn_implementation("triton")
        assert model.config._attn_implementation == "auto"
        assert not attention_triton.runs_on(torch.device("cuda"))
        model(tokens(1, 5))
    finally:
        attention_triton._runs_on.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_when_the_model_is_called(family, monkeypatch):
    model = build("cope", family=family)
    ids = tokens(1, 6)
    with pytest.raises(ValueError, match=r"'triton'.*dtype=torch.float64; allowed: torch.float32"):
        build("cope", family=family).double()(ids)
    for mask in (torch.ones(1, 1, 6, 6, dtype=torch.bool).tril(), torch.zeros(1, 2, 6, 6)):
        with pytest.raises(ValueError, match=r"'triton'.*attention_mask.*\(1, [12], 6, 6\).*allowed"):
            model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"'triton'.*output_attentions=True; allowed: False.*eager"):
        model(ids, output_attentions=True)
    monkeypatch.setattr(attention_triton, "runs_on", lambda device: False)
    with pytest.raises(ValueError, match=r"'triton'.*device='cpu'; allowed: a GPU.*TRITON_INTERPRET=1"):
        model(ids)


@pytest.mark.parametrize("shape", [(1, 1, 11, 2), (2, 1, 12, 2), (1, 1, 12, 3), (1, 2, 12, 2)])
def test_ranges_of_the_wrong_shape(shape):
    with pytest.raises(ValueError, match="attention_mask has the shape"):
        build("cope")(tokens(1, 6), attention_mask=torch.ones(shape, dtype=torch.int32))
    with pytest.raises(ValueError, match="attention_mask has the shape"):
        build("cope", "eager")(tokens(1, 6), attention_mask=torch.ones(1, 1, 12, 2, dtype=torch.int32))


@pytest.fixture
def on_gpu(monkeypatch):
    """The CPU in the role of a GPU; returns the list of kernel calls."""
    calls, kernel_attention = [], attention_triton.kernel_attention

    def counted(*arguments):
        calls.append(arguments)
        return kernel_attention(*arguments)

    monkeypatch.setattr(attention, "_may_have_kernels", attention_triton.runs_on)
    monkeypatch.setattr(attention_triton, "runs_by_default", attention_triton.runs_on)
    monkeypatch.setattr(attention_triton, "kernel_attention", counted)
    return calls


@pytest.mark.parametrize("encoding", COPE_AND_POPE)
def test_auto_without_a_gpu_is_the_pytorch_path(encoding, monkeypatch):
    monkeypatch.setattr(attention_triton, "kernel_attention", None)
    ids = tokens(2, 21)
    model = build(encoding, None)
    for mask in (padding("left"), None):
        model.set_attn_implementation("auto")
        found = results(model, mask, input_ids=ids)
        model.set_attn_implementation({"cope": "blockwise", "pope": "sdpa"}[encoding[:4]])
        expected = results(model, mask, input_ids=ids)
        if encoding.startswith("cope") or mask is None:
            assert all(torch.equal(one, other) for one, other in zip(found, expected))
        else:
            all_close(found, expected)


@pytest.mark.parametrize("encoding", slow_but(["pope"], ["pope", "cope+relative", "token_gated_cope"]))
def test_auto_on_a_gpu_takes_the_kernels(encoding, on_gpu):
    ids, mask = tokens(2, 21), padding("left")
    model = build(encoding, None)
    found = results(model, mask, input_ids=ids)
    assert len(on_gpu) == 1
    model.set_attn_implementation("triton")
    for one, other in zip(found, results(model, mask, input_ids=ids)):
        assert torch.equal(one, other)


@pytest.fixture
def gpu_backends(monkeypatch, on_gpu):
    """Sets what PyTorch's attention can on the GPU whose role the CPU has; returns what it was asked."""
    asked, kept = [], attention_sdpa.sdpa_kernel

    def set_to(backend):
        def answer(*arguments):
            asked.append(arguments)
            return backend

        for module in (attention_sdpa, attention_triton):
            monkeypatch.setattr(module, "gpu_backend", answer)

    # A CPU has no cuDNN.
    monkeypatch.setattr(attention_sdpa, "sdpa_kernel", lambda backends, **given: kept([SDPBackend.MATH]))
    return types.SimpleNamespace(set=set_to, asked=asked)


@pytest.mark.parametrize(("backend", "shared"), [("cudnn", True), ("flash", False)])
def test_auto_rotates_pope_and_calls_pytorch(on_gpu, gpu_backends, backend, shared, monkeypatch):
    """In training and for a prompt; as `sdpa` and `triton`, with every gradient. Values are padded for flash only."""
    gpu_backends.set(backend)
    widths, right = [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, *arguments, **options):
        widths.append((key.shape[-1], value.shape[-1]))
        return right(query, key, value, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model, ids = tiny_model("llama", "pope", "auto", num_key_value_heads=2 if shared else 4), tokens(2, 21)
    for part in (model.train(), model.eval()):
        found = results(part, None, input_ids=ids)
        assert not on_gpu
        assert {(2 * D, D if backend == "cudnn" else 2 * D) for D in (8,)} == set(widths)
        for implementation in ("sdpa", "triton"):
            part.set_attn_implementation(implementation)
            all_close(found, results(part, None, input_ids=ids))
        part.set_attn_implementation("auto")
        on_gpu.clear(), widths.clear()
    device, dtype, heads, groups, width, value_width, dropout = gpu_backends.asked[0]
    assert (device.type, dtype, dropout) == ("cpu", torch.float32, 0.0)
    assert (heads, groups, width, value_width) == (4, 2 if shared else 4, 16, 8)


def test_one_look_at_a_mask_of_ones(on_gpu, gpu_backends, monkeypatch):
    """Whatever the number of layers; all rotate, as without a mask."""
    gpu_backends.set("cudnn")
    monkeypatch.setattr(OnGpu, "reads", 0)
    model = tiny_model("llama", "pope", "auto", num_hidden_layers=3)
    model(tokens(2, 21), attention_mask=torch.ones(2, 21, dtype=torch.bool).as_subclass(OnGpu))
    assert (OnGpu.reads, len(on_gpu)) == (1, 0)


def test_where_the_kernel_of_pope_stays(on_gpu, gpu_backends, monkeypatch):
    """Decoding, rows after a cache, padding and documents, what PyTorch has no fast attention for, `triton`."""
    gpu_backends.set("cudnn")
    model, ids = build("pope", "auto"), tokens(2, 21)
    layers = model.config.num_hidden_layers

    def kernels(**options):
        on_gpu.clear()
        with torch.no_grad():
            model(ids, **options)
        return len(on_gpu)

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end, expected in ((0, 9, 0), (9, 20, layers), (20, 21, layers)):
            on_gpu.clear()
            model(ids[:, start:end], use_cache=True, **{CACHE: cache})
            assert len(on_gpu) == expected
    assert kernels(attention_mask=padding("left")) == layers
    assert kernels(attention_mask=torch.ones(2, 21, dtype=torch.bool).as_subclass(OnGpu)) == 0
    assert kernels(position_ids=torch.arange(21)[None] % 11, use_cache=False) == layers
    assert kernels() == 0
    gpu_backends.set("")
    assert kernels() == layers
    gpu_backends.set("flash")
    monkeypatch.setattr(attention_triton, "WAYS", {"pope": {"prompt": "triton", "training": "sdpa"}})
    assert kernels() == layers
    model.train()
    assert kernels() == 0
    model.set_attn_implementation("triton")
    assert kernels() == layers


def test_what_pytorch_has_on_a_gpu(monkeypatch):
    """cuDNN with values as they are, else flash attention, which needs padded ones; asked with the widths of a call."""
    seen, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **given: empty(*shape, **given))
    able = {"cudnn": False, "flash": False}

    def can(backend):
        def ask(params):
            seen.append((backend, params.query.shape[-1], params.value.shape[-1], params.enable_gqa, params.dropout))
            assert params.is_causal
            assert params.query.requires_grad
            return able[backend]

        return ask

    for backend in able:
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{backend}_attention", can(backend))
    shape, gpu = (4, 2, 32, 16, 0.1), torch.device("cuda")
    found = []
    for cudnn, flash in ((True, True), (False, True), (False, False)):
        able |= {"cudnn": cudnn, "flash": flash}
        found.append(attention_sdpa.gpu_backend(gpu, torch.bfloat16, *shape))
    assert found == ["cudnn", "flash", ""]
    assert set(seen) == {("cudnn", 32, 16, True, 0.1), ("flash", 32, 32, True, 0.1)}
    able |= {"cudnn": True}
    assert attention_sdpa.gpu_backend(gpu, torch.float32, *shape) == ""
    assert attention_sdpa.gpu_backend(torch.device("cpu"), torch.bfloat16, *shape) == ""


# Families in turn; the other pairs are slow.
@pytest.mark.parametrize(
    ("encoding", "family"),
    [("cope", "llama"), ("cope+rope", "gpt2"), ("pope", "llama"), ("relative", "gpt2")],
)
def test_auto_on_a_gpu_goes_to_pytorch_where_kernels_can_not(family, encoding, on_gpu):
    model = build(encoding, None, family)
    ids, mask = tokens(2, 21), padding("left", "right")
    tree = torch.ones(21, 21, dtype=torch.bool).tril()
    tree[8:, 4] = False
    found = results(model, tree.expand(2, 1, -1, -1), input_ids=ids)
    model.set_attn_implementation("eager")
    all_close(found, results(model, tree.expand(2, 1, -1, -1), input_ids=ids))
    model.double().set_attn_implementation("auto")
    model(ids, attention_mask=mask)
    assert not on_gpu
    model.float()(ids, attention_mask=mask)
    assert len(on_gpu) == 1


@pytest.mark.parametrize("encoding", slow_but(["relative"], ["relative", "cope+relative"]))
def test_relative_positions_where_operations_must_be_deterministic(encoding, on_gpu):
    """`triton` refuses to train, `auto` takes PyTorch's operations; both decode and evaluate by the kernel."""
    ids, model = tokens(2, 21), build(encoding, None)
    torch.use_deterministic_algorithms(True)
    try:
        found = results(model, None, input_ids=ids)
        assert not on_gpu
        with torch.no_grad():
            model(ids)
        assert len(on_gpu) == 1
        model.set_attn_implementation("triton")
        with torch.no_grad():
            model(ids)
        with pytest.raises(ValueError, match=r"algorithms\(True\) in training with 'relative'; allowed"):
            model(ids)
        model.set_attn_implementation("eager")
        all_close(found, results(model, None, input_ids=ids))
    finally:
        torch.use_deterministic_algorithms(False)


def test_auto_is_never_the_interpreter(monkeypatch):
    monkeypatch.setattr(attention_triton, "runs_on", lambda device: True)
    assert not attention_triton.runs_by_default(torch.device("cpu"))
    for interpreted in (False, True):
        monkeypatch.setattr(attention_triton, "interpreted", lambda interpreted=interpreted: interpreted)
        assert attention_triton.runs_by_default(torch.device("cuda")) is not interpreted


@pytest.mark.parametrize("encoding", ["pope", "cope", ["pope", "none"]], ids=str)
def test_masks_of_auto_for_pytorch(encoding, monkeypatch):
    """What `auto` hands on: key ranges; and to PyTorch's attention a mask where its own causal one would be wrong."""
    model, seen = tiny_model("llama", encoding, "auto", num_key_value_heads=4), []
    attend = attention.attend

    def watched(layer, query, key, value, mask, *rest, implementation, **options):
        seen.append((implementation, query.shape[2], key.shape[2], mask))
        return attend(layer, query, key, value, mask, *rest, implementation=implementation, **options)

    monkeypatch.setattr(attention, "attend", watched)
    ids, mask = tokens(2, 21), padding("left")
    fast = "blockwise" if encoding == "cope" else "sdpa"
    cases = (
        # rows, past, mask; the type of the mask for PyTorch's attention.
        (21, 0, None, None),
        (1, 20, None, None),
        (9, 12, None, torch.int32),
        (21, 0, mask, torch.int32),
        (3, 18, mask, torch.int32),
        (1, 20, mask, torch.int32),
    )
    with torch.no_grad():
        for rows, past, given, dtype in cases:
            cache = DynamicCache(config=model.config)
            if past:
                model(ids[:, :past], attention_mask=None if given is None else given[:, :past], cache=cache)
            seen.clear()
            model(ids[:, past:], attention_mask=given, cache=cache)
            assert len(seen) == 2
            for found, *shape, made in seen:
                assert (found, shape) == (fast, [rows, past + rows])
                if fast == "sdpa":
                    assert (None if made is None else made.dtype) == dtype
                elif made is not None:
                    assert is_key_ranges(made)


@pytest.mark.parametrize("encoding", ["pope", ["pope", "none"], ["rope", "alibi"]], ids=str)
@pytest.mark.parametrize("kind", ["left", "right", "both", "hole", "packed", "static"])
def test_rows_at_a_time_are_eager_attention(encoding, kind, monkeypatch):
    """With few rows at a time: some see nothing, some have one document, and keys are further than the rows."""
    monkeypatch.setattr(attention_sdpa, "CPU_ROWS", 4)
    model, ids = tiny_model("gpt2", encoding, "auto"), tokens(2, 21)
    masks = {"both": padding("left", "right"), "packed": None, "static": padding("left")}
    inputs = {"mask": masks[kind] if kind in masks else padding(kind), "input_ids": ids}
    if kind == "packed":
        inputs["position_ids"] = PACKED
    if kind == "static":
        inputs["cache"] = StaticCache(model.config, max_cache_len=40)
    found = results(model, **inputs)
    model.set_attn_implementation("eager")
    if kind == "static":
        inputs["cache"] = StaticCache(model.config, max_cache_len=40)
    all_close(found, results(model, **inputs))


def test_rows_at_a_time_need_no_quadratic_mask():
    query, key, value = torch.rand(1, 2, 1024, 8), torch.rand(1, 2, 1024, 8), torch.rand(1, 2, 1024, 4)
    module = types.SimpleNamespace(encodings=types.SimpleNamespace(hooks={"bias": []}))
    key_ranges = key_ranges_of([-1] * 100 + [0] * 924, 1024)
    with torch.no_grad(), LargestTensor() as largest:
        attention_sdpa.sdpa_attention_forward(module, query, key, value, key_ranges, None, scaling=0.3, dropout=0.0)
    assert largest.largest <= 4 * attention_sdpa.CPU_ROWS * 1024
    assert attention_sdpa.CPU_ROWS <= 256


@pytest.mark.parametrize(
    ("encoding", "family", "kind"),
    slow_but(
        [
            ("cope:shared", "llama", "packed"),
            ("cope+rope", "gpt2", "hole"),
            ("pope", "gpt2", "padding"),
            ("pope:partial", "llama", "causal"),
            ("token_gated_cope+rope", "llama", "packed"),
            ("cope+relative:every2", "llama", "padding"),
            ("value", "llama", "packed"),
            ("rotated", "llama", "packed"),
            ("plan", "gpt2", "padding"),
        ],
        [
            *(("cope", "llama", "causal"), ("cope:shared", "llama", "packed"), ("cope:shared", "gpt2", "padding")),
            *(("cope+rope", "gpt2", "hole"), ("cope+rope", "llama", "causal"), ("pope", "gpt2", "padding")),
            *(("pope", "llama", "packed"), ("pope:partial", "llama", "causal"), ("separate", "gpt2", "padding")),
            *(("value", "llama", "packed"), ("every2", "gpt2", "hole"), ("rotated", "llama", "packed")),
            *(("plan", "gpt2", "padding"), ("cope+alibi", "llama", "hole"), ("cope+relative", "llama", "packed")),
            *(("cope+relative:every2", "llama", "padding"), ("relative", "llama", "causal")),
            *(("relative:last", "gpt2", "padding"), ("token_gated_cope", "llama", "hole")),
            *(("token_gated_cope+rope", "llama", "packed"), ("fox", "gpt2", "padding")),
            *(("fox+rope", "llama", "packed"), ("alibi", "gpt2", "hole")),
        ],
    ),
)
def test_equals_eager(encoding, family, kind):
    masks = {"padding": padding("left", "right"), "hole": padding("hole")}
    inputs = {"mask": masks.get(kind), "input_ids": tokens(2, 21)}
    if kind == "packed":
        inputs["position_ids"] = PACKED
    model = build(encoding, family=family)
    found = results(model, **inputs)
    model.set_attn_implementation("eager")
    all_close(found, results(model, **inputs))


@pytest.mark.parametrize(
    "encoding", slow_but(["cope+rope", "pope"], ["cope+rope", "pope", "relative", "fox+rope", "rotated"])
)
def test_a_shift_of_all_positions_changes_nothing(encoding):
    model = build(encoding)
    ids, positions = tokens(1, 9), torch.arange(9)[None]
    with torch.no_grad():
        shifted = model(ids[:, :8], position_ids=positions[:, :8] + 37, use_cache=True)
        step = model(ids[:, 8:], position_ids=positions[:, 8:] + 37, cache=shifted[CACHE])
        close(torch.cat((shifted.logits, step.logits), 1), model(ids, position_ids=positions).logits, 1e-4)


@pytest.mark.parametrize("encoding", slow_but(["rotated"], ["rotated", "value"]))
def test_other_gates_when_decoding(encoding):
    """Gate keys from the cache; a layer without CoPE, whose cached keys are narrower; half precision in autocast."""
    model = build(encoding, "eager")
    ids, mask = tokens(2, 12), padding("left", length=12)
    positions, shown = (mask.cumsum(-1) - 1).clamp(min=0), mask.bool()
    own = {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        full = model(ids, use_cache=False, **own).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            eager = model(ids, **own).logits.float()
        model.set_attn_implementation("triton")
        cache = DynamicCache(config=model.config)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(ids, **own).logits.float()
        close(in_steps(model, ids, (11, 1), cache, mask, positions)[shown], full[shown])
    assert [layer.keys.shape[-1] for layer in cache.layers] == ([16, 8] if encoding == "rotated" else [8])
    assert (mixed - full)[shown].abs().max() < 3 * (eager - full)[shown].abs().max() + 1e-3


def test_layers_without_the_encoding_have_kernels(on_gpu, monkeypatch):
    calls = []
    monkeypatch.setattr(kernel_plain, "plain_attention", lambda *a, **k: calls.append("plain") or a[0])
    monkeypatch.setattr(CoPE, "kernel", lambda *a, **k: calls.append("cope") or a[1])
    for implementation in ("auto", "triton"):
        build("every2", implementation)(tokens(1, 5))
    assert calls == ["cope", "plain"] * 2
    assert len(on_gpu) == 4


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_plain_attention(limited, decay):
    """Against PyTorch's own, with every gradient; one row, without and with gradients; as operators."""
    query = torch.randn(2, 4, 17, 16, requires_grad=True)
    key, value = (torch.randn(2, 2, 21, 16, requires_grad=True) for _ in range(2))
    inputs, key_ranges, mask = (query, key, value), None, torch.ones(17, 21, dtype=torch.bool).tril(4)
    if limited:
        key_ranges = key_ranges_mask(2, 17, 21, q_offset=4, attention_mask=padding("left", "hole").bool())
        mask = dense_mask(key_ranges, 17)
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    numbers = None
    if decay:
        # Far from 0, as after thousands of tokens.
        keys = 1e5 - torch.rand(2, 4, 21, dtype=torch.float64).cumsum(-1)
        keys.requires_grad_()
        inputs, numbers = (*inputs, keys), (keys.detach()[:, :, 4:], keys)
        bias = bias + (keys[:, :, 4:, None].detach() - keys[:, :, None]).float()
    truth = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=0.3, enable_gqa=True
    ).nan_to_num()
    out = plain_attention(*inputs[:3], decay=numbers, key_ranges=key_ranges, scaling=0.3)
    grad = torch.randn_like(out)
    if limited:
        grad = grad * (mask.any(-1)[..., None])
    all_close([out, *torch.autograd.grad(out, inputs, grad)], [truth, *torch.autograd.grad(truth, inputs, grad)], 1e-5)
    last = None if key_ranges is None else key_ranges[:, :, 16:]
    step = (query[:, :, 16:], key, value)
    of_step = None if numbers is None else (numbers[0][:, :, 16:], numbers[1])
    for trained in (True, False):
        with torch.set_grad_enabled(trained):
            row = plain_attention(*step, decay=of_step, key_ranges=last, scaling=0.3)
        assert row.requires_grad == trained
        close(row, truth[:, :, 16:])
    if not limited:
        operator, others = kernel_plain._plain_operator, [None] * 6
        check_operator(operator.forward, [*inputs[:3], *(numbers or (None, None)), None], others, 0.3, 0.0)
        step = [tensor.detach() for tensor in (*step, *(of_step or ()))]
        check_operator(operator.decode, [*step, *[None] * (6 - len(step))], others, 0.3, 0.0)


@pytest.mark.parametrize(
    ("encoding", "family"),
    slow_but(
        [("pope", "llama")],
        [
            *((name, "llama") for name in ("alibi", "cope", "cope+alibi", "cope+relative", "fox", "pope", "plan")),
            *(("cope+rope", "gpt2"), ("relative:last", "llama"), ("token_gated_cope+rope", "llama")),
        ],
    ),
)
def test_cached_decoding(encoding, family):
    model = build(encoding, family=family)
    ids, mask = tokens(2, 21), padding("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    shown = mask.bool()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        full = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation("triton")
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=24)):
            close(in_steps(model, ids, (9, 1, 10, 1), cache, mask, positions)[shown], full[shown])


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "implementation"), [*((name, "triton") for name in COMPILED), ("pope", "auto")])
def test_compiles_as_one_graph(encoding, implementation, on_gpu):
    model = build(encoding, implementation).train()
    inputs = {"input_ids": tokens(2, 16), "use_cache": False}
    mask = padding("left", length=16)
    plain = results(model, mask, **inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    logits = compiled(attention_mask=mask, **inputs).logits[mask.bool()]
    logits.square().mean().backward()
    all_close([logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], plain)


@pytest.mark.parametrize("encoding", slow_but([], ["cope", "pope"]))
def test_compiled_decoding_with_a_static_cache(encoding):
    model = build(encoding)
    ids = tokens(2, 9)
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **options)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("encoding", slow_but(["pope"], ["cope", "pope"]))
def test_export(encoding):
    model = build(encoding)
    ids, mask = tokens(2, 21), padding("left")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        exported = torch.export.export(model, (), inputs, strict=False)
        close(exported.module()(**inputs).logits, expected)


@pytest.mark.parametrize(
    "encoding", slow_but(["cope+rope", "pope"], ["cope+rope", "pope", "fox", "relative", "token_gated_cope"])
)
def test_low_precision(encoding):
    model = build(encoding, "eager")
    ids = tokens(2, 21)

    def logits(implementation, dtype=torch.float32, autocast=False):
        model.to(dtype).set_attn_implementation(implementation)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return model(ids).logits.float()

    exact = logits("eager")
    # The yardstick is the error that the readable path itself makes.
    mixed = 3 * (logits("eager", autocast=True) - exact).abs().max() + 1e-3
    assert (logits("triton", autocast=True) - exact).abs().max() < mixed
    half = 3 * (logits("eager", torch.bfloat16) - exact).abs().max() + 1e-3
    assert (logits("triton", torch.bfloat16) - exact).abs().max() < half


@pytest.mark.parametrize("encoding", slow_but(["cope", "pope"], WITH_KERNELS))
def test_autocast_trains(encoding):
    model = build(encoding).train()
    ids = tokens(2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_heads_of_another_rank():
    """Under tensor parallelism, the phase shifts of a rank's own heads."""
    model = build("pope", hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    layer = model.model.layers[0].self_attn
    query, key, value = torch.rand(1, 4, 7, 8), torch.rand(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    found = []
    for first in (0, 2):
        context = model.model.shared_encodings(query, position_context(torch.arange(7)[None], head_offset=first))
        states = query[:, first:], key[:, first // 2 :], value[:, first // 2 :]
        found.append(layer.encodings["pope"].kernel(*states, context, key_ranges=None, scaling=0.3, dropout=0.0))
    whole, part = found
    close(part, whole[:, 2:], 1e-6)


def test_the_name_is_not_saved(tmp_path):
    model = build("pope")
    model.save_pretrained(tmp_path)
    assert "triton" not in (tmp_path / "config.json").read_text()
    assert (tmp_path / "kernel_pope.py").exists()
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "auto"
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="triton")
    close(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits, 0)


def test_gradients_of_gradients_are_refused_by_name():
    model = build("cope")
    ids = tokens(1, 8)
    parameters = [p for name, p in model.named_parameters() if "encodings" in name]
    gradients = torch.autograd.grad(model(ids, labels=ids).loss, parameters, create_graph=True)
    with pytest.raises(NotImplementedError, match="eager"):
        sum(gradient.square().sum() for gradient in gradients).backward()


@pytest.mark.parametrize(
    ("encoding", "family"),
    slow_but([("pope", "gpt2")], zip(("pope", "cope+rope", "fox", "relative"), ("gpt2", "llama", "llama", "llama"))),
)
def test_dropout_trains(encoding, family):
    """By the seed of PyTorch, with and without activation checkpointing; not outside training."""
    model = build(encoding, family=family, **{"attention_dropout" if family == "llama" else "attn_pdrop": 0.5})
    ids = tokens(2, 21)
    everything = results(model, input_ids=ids)
    model.train()
    torch.manual_seed(1)
    dropped = results(model, input_ids=ids)
    assert (dropped[0] - everything[0]).abs().max() > 1e-3
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    torch.manual_seed(1)
    for one, other in zip(dropped, results(model, input_ids=ids)):
        assert torch.equal(one, other)
    torch.manual_seed(2)
    assert not torch.equal(results(model, input_ids=ids)[0], dropped[0])
