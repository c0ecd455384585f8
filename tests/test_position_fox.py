"""FoX: specification and blockwise path against loops; the options of its Pro block; the token before; parameters."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import oracles
import whatwhere.position_fox as module
from bias_checks import assert_same, every_head
from tiny import causal_lm_class, key_ranges_of, position_context, tiny_config, tiny_model, tokens
from whatwhere.attention_blockwise import HIDDEN_LOGIT, BiasInputs, blockwise_attention, join_digits
from whatwhere.attention_options import HeadNorm, previous_slots
from whatwhere.forward_arguments import CACHE
from whatwhere.modeling_whatwhere_llama import WhatWhereLlamaAttention
from whatwhere.position_base import PositionContext
from whatwhere.position_fox import FoXBias
from whatwhere.position_modules import SharedPositionEncodings

PARTS = ["output_gate", "output_norm", "qk_norm", "key_value_shift"]
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"gate_bias_init": 1e300}, r"\['gate_bias_init'\]=1e[+]300 is not valid: it must be finite in float32"),
    ({"gate_bias_init": float("nan")}, r"\['gate_bias_init'\]=nan is not valid"),
    ({"gate_bias_init": "0"}, r"\['gate_bias_init'\]='0' is not valid"),
    # Parameters of earlier versions: the fields are named.
    *(({name: True}, f"unknown key '{name}'.*output_gate.*key_value_shift") for name in ("pro", *PARTS)),
]
# Row i has slot i + 2 of 9. Not a tree: what a row sees is any subset.
SUBSETS = torch.rand(7, 9, generator=torch.Generator().manual_seed(3)) < 0.6
MASKS = {
    "causal": None,
    "left-padded": [-1, -1, -1, 0, 0, 0, 0, 0, 0],
    "packed-with-holes": [0, 0, -1, 0, 1, 1, -1, 1, -1],
    "subsets": SUBSETS,
}


@pytest.mark.parametrize("gate", [4.0, 0.0, -30.0], ids=["open", "half", "closed"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_loops(mask, gate, monkeypatch):
    """Outputs and every gradient of the eager and of the blockwise path, with grouped heads."""
    monkeypatch.setattr(module, "REFERENCE_ROWS", 2)
    Q, K, H, G, scaling = 7, 9, 4, 2, 0.5
    shapes = [(2, H, Q, 4), (2, G, K, 4), (2, G, K, 3)]
    states = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    forget = nn.functional.logsigmoid(torch.randn(2, H, K, dtype=torch.float64) + gate).requires_grad_()
    query, key, value = states
    subsets = isinstance(mask, torch.Tensor)
    visible = mask if subsets else oracles.visible_oracle(Q, K, mask)

    def oracle(b, h):
        return oracles.fox_oracle(query[b, h], key[b, h // 2], value[b, h // 2], forget[b, h], visible, scaling)

    logits = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) * scaling
    logits = logits.masked_fill(~visible, HIDDEN_LOGIT)
    weights = torch.softmax(logits + FoXBias.bias(logits, query, (forget,), ()), -1) * visible.any(-1, keepdim=True)
    outs = [weights @ value.repeat_interleave(2, dim=1)]
    if subsets:
        forms = [visible.expand(2, 1, Q, K), torch.where(visible, 0.0, -1e4).expand(2, 1, Q, K)]
    else:
        forms = [key_ranges_of(mask and [mask, mask], Q)]
    biases = [BiasInputs(FoXBias, (forget,))]
    for form in forms:
        for direct in (False, True):
            options = {"mask": form, "scaling": scaling, "biases": biases, "block_size": 4, "direct": direct}
            outs.append(blockwise_attention(*states, **options))
    assert_same(outs, every_head(oracle, 2, H), [*states, forget])


@pytest.mark.parametrize("gate", [-7.0, 9.0], ids=["all-forgotten", "hardly-forgotten"])
def test_long_sequences_keep_their_digits(gate):
    """float32 sums from the beginning of the sequence would give errors of 5e-4, and of 2e-3 in the gradients."""
    T = 2500
    states = [torch.randn(1, 1, T, 8, dtype=torch.float64) for _ in range(3)]
    forget = nn.functional.logsigmoid(torch.randn(1, 1, T, dtype=torch.float64) + gate)
    outs, grads = [], []
    for dtype in (torch.float64, torch.float32):
        leaf = forget.detach().to(dtype).requires_grad_()
        out = blockwise_attention(
            *(x.to(dtype) for x in states), scaling=0.35, biases=[BiasInputs(FoXBias, (leaf,))], block_size=64
        )
        out.square().sum().backward()
        outs.append(out.double())
        grads.append(leaf.grad.double())
    # What is added: dot products of less than 8, and log f of the rows that share a reference. A few roundings of that
    # are in the logits, and the same share of outputs and gradients.
    share = 4 * torch.finfo(torch.float32).eps * max(8, -float(forget.mean()) * module.REFERENCE_ROWS)
    assert (outs[1] - outs[0]).abs().max() < share * outs[0].abs().max()
    assert (grads[1] - grads[0]).abs().max() < share * grads[0].abs().max()
    # Errors of the tokens do not add up: no logit depends on the oldest gate, so its gradient is what the others left.
    # Sums in float64 leave T roundings of gradients of 10; those of float32 would be 1e-7 and more.
    assert grads[1][..., 0].abs() < T * 10 * torch.finfo(torch.float64).eps


SEGMENTS = {"plain": [0] * 6, "padded": [-1, 0, 0, -1, 0, 0], "packed": [0, 0, 0, 1, 1, 1]}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("parts", [PARTS, ["key_value_shift"], ["qk_norm"], ["output_gate"], ["output_norm"], []])
def test_layer_equals_loops(parts, segments):
    """A whole attention layer, hidden states to output: outputs, and the gradients of all weights and of the input."""
    T, E, H, G, D = 6, 8, 4, 2, 2
    fields = {"qk_norm_eps": 0.1} if "qk_norm" in parts else {}
    config = tiny_config("llama", "fox", hidden_size=E, **fields, **dict.fromkeys(parts, True))
    layer = WhatWhereLlamaAttention(config, 0).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.7)
    hidden = torch.randn(1, T, E, dtype=torch.float64, requires_grad=True)
    mask, positions = None, torch.arange(T)[None]
    if -1 in segments:
        mask = (torch.tensor([segments]) >= 0).long()
    elif 1 in segments:
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    context = PositionContext(positions, mask, key_length=T, consecutive=mask is not None)
    context = SharedPositionEncodings(config)(hidden, context)
    visible = oracles.visible_oracle(T, T, segments)
    given = {"eager": visible[None, None], "sdpa": visible[None, None]}
    given["blockwise"] = key_ranges_of(segments, T)

    fox, options, x = layer.encodings["fox"], layer.options, hidden[0]
    query, key, value = (
        projection(x).view(T, -1, D).transpose(0, 1) for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    gates = torch.log(1 / (1 + torch.exp(-(x @ fox.gate.weight.T + fox.gate.bias)))).T
    if "key_value_shift" in parts:
        a, b = (1 / (1 + torch.exp(-(x @ shift.weight.T))) for shift in (options.key_shift, options.value_shift))
        key = torch.stack([oracles.token_shift_oracle(key[g], a[:, g], segments) for g in range(G)])
        value = torch.stack([oracles.token_shift_oracle(value[g], b[:, g], segments) for g in range(G)])
    norm = oracles.rms_norm_oracle
    if "qk_norm" in parts:
        weights = options.query_norm.weight, options.key_norm.weight
        query, key = (
            torch.stack(
                [torch.stack([norm(row, scale, eps=0.1) for row in head]) for head, scale in zip(heads, weight)]
            )
            for heads, weight in zip((query, key), weights)
        )
    heads = []
    for h in range(H):
        head = oracles.fox_oracle(query[h], key[h // 2], value[h // 2], gates[h], visible, D**-0.5)
        if "output_norm" in parts:
            head = torch.stack([norm(row, options.output_norm.weight[h]) for row in head])
        if "output_gate" in parts:
            head = head / (1 + torch.exp(-(x @ options.output_gate.weight[h * D : (h + 1) * D].T)))
        heads.append(head)
    expected = torch.cat(heads, dim=1) @ layer.o_proj.weight.T
    seen = torch.tensor(segments) >= 0
    for name in ("eager", "sdpa", "blockwise"):
        config._attn_implementation = name
        out = layer(hidden, context, given[name])[0][0]
        # sdpa reads the mask, and adds the bias, in float32.
        tolerance = 1e-5 if name == "sdpa" else 1e-9
        assert_same([out[seen]], expected[seen], [hidden, *layer.parameters()], tolerance)


def slots_before(positions, mask=None, past=0, consecutive=False):
    """The token before each key, -1 for none, of position ids (T,) and a mask, in plain lists."""
    positions = torch.tensor([positions])
    length = positions.shape[1] + past
    if mask is not None:
        mask = torch.as_tensor(mask)
        mask = mask[None] if mask.ndim == 1 else mask[None, None]
    previous, found = previous_slots(PositionContext(positions, mask, past, length, consecutive))
    return torch.where(found, previous, -1)[0].tolist()


def test_the_token_before():
    assert slots_before([0, 1, 2, 3]) == [-1, 0, 1, 2]
    assert slots_before([3, 4], past=3) == [-1, 0, 1, 2, 3]
    # Packed documents; positions that jump begin one too, where Transformers looks for documents.
    assert slots_before([0, 1, 0, 1]) == [-1, 0, -1, 2]
    assert slots_before([0, 1, 5, 6]) == [-1, 0, -1, 2]
    # Padding is no token: at the left, in a hole, at the right before new tokens.
    assert slots_before([0, 0, 0, 1], [0, 0, 1, 1])[2:] == [-1, 2]
    for positions, consecutive in (([0, 1, 0, 2], False), ([0, 1, 2, 3], True)):
        assert slots_before(positions, [1, 1, 0, 1], consecutive=consecutive)[3] == 1
    assert slots_before([2], [1, 1, 0, 0, 1], past=4)[4] == 1
    # Documents beside padding are told by their positions.
    assert slots_before([0, 1, 0, 1, 2], [1, 1, 1, 1, 0])[:4] == [-1, 0, -1, 2]
    # With a 4D mask, what the token sees decides: two branches from slot 1, and two documents.
    tree = torch.ones(4, 4, dtype=torch.bool).tril()
    tree[3, 2] = False
    assert slots_before([0, 1, 2, 2], tree) == [-1, 0, 1, 1]
    assert slots_before([0, 1, 2, 2], torch.where(tree, 0.0, float("-inf"))) == [-1, 0, 1, 1]
    assert slots_before([2], tree[3:], past=3) == [-1, 0, 1, 1]
    documents = torch.block_diag(torch.ones(2, 2).tril(), torch.ones(2, 2).tril()).bool()
    assert slots_before([0, 1, 2, 3], documents) == [-1, 0, -1, 2]


@pytest.fixture(scope="module")
def pro():
    return tiny_model("llama", "fox", **dict.fromkeys(PARTS, True))


def test_exports_for_every_length(pro):
    length = torch.export.Dim("length", min=5, max=40)
    shapes = {"input_ids": {1: length}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(pro, (tokens(2, 9),), {"use_cache": False}, dynamic_shapes=shapes)
        ids = tokens(2, 23)
        exported = program.module()(ids, use_cache=False).logits
        torch.testing.assert_close(exported, pro(ids, use_cache=False).logits, rtol=2e-5, atol=2e-5)


def test_a_branch_goes_on_in_the_cache(pro):
    """Tokens 3 and 4 both follow token 2; token 5 follows 4, with all of them cached."""
    ids = tokens(1, 6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[4:, 3] = False
    positions = torch.tensor([[0, 1, 2, 3, 3, 4]])
    with torch.no_grad():
        cache = DynamicCache(config=pro.config)
        pro(ids[:, :5], attention_mask=mask[None, None, :5, :5], position_ids=positions[:, :5], cache=cache)
        last = pro(ids[:, 5:], attention_mask=mask[None, None, 5:], position_ids=positions[:, 5:], cache=cache).logits
        branch = pro(ids[:, [0, 1, 2, 4, 5]]).logits
    torch.testing.assert_close(last[:, 0], branch[:, -1], rtol=2e-5, atol=2e-5)


def test_a_cropped_cache_goes_on(pro):
    ids, other = tokens(1, 12), tokens(1, 5, seed=7)
    with torch.no_grad():
        cache = pro(ids)[CACHE]
        cache.crop(-4)
        pieces = pro(other, cache=cache).logits
        full = pro(torch.cat((ids[:, :8], other), dim=1)).logits
    torch.testing.assert_close(pieces, full[:, 8:], rtol=2e-5, atol=2e-5)


def test_what_is_cached():
    """Beside a key, for each key head: log f of its query heads, in half precision with 16 digits, and two gates."""
    config = tiny_config("llama", "fox", key_value_shift=True)
    layer = WhatWhereLlamaAttention(config, 0).to(torch.bfloat16)
    hidden = torch.randn(2, 5, 32, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, 2, 5, 8, dtype=torch.bfloat16)
    context = position_context(torch.arange(5)[None], value=value, new_value=value)
    cache = DynamicCache(config=config)
    layer.update_cache(hidden, key, context, cache, {})
    cached, state = cache.layers[0].keys.split((8, 2 * 2 + 2), dim=-1)
    assert state.dtype == torch.bfloat16
    assert torch.equal(cached, key)
    assert torch.equal(cache.layers[0].values, value)
    gates = layer.encodings["fox"].gate(hidden).float()
    log_forget = nn.functional.logsigmoid(gates).unflatten(2, (2, 2)).transpose(1, 2)
    torch.testing.assert_close(join_digits(state[..., :4]), log_forget, rtol=2**-16, atol=0)
    torch.testing.assert_close(context.states["fox"], state[..., :4], rtol=0, atol=0)
    shifts = [shift(hidden) for shift in (layer.options.key_shift, layer.options.value_shift)]
    shifts = torch.stack(shifts, dim=-1).transpose(1, 2).sigmoid()
    torch.testing.assert_close(state[..., 4:], shifts, rtol=2**-7, atol=0)


def test_norms_take_the_local_heads():
    norm = HeadNorm(6, 4)
    nn.init.normal_(norm.weight)
    states = torch.randn(1, 6, 5, 4)
    torch.testing.assert_close(norm(states[:, 2:4], 2), norm(states, 0)[:, 2:4])
    norm.reset()
    assert (norm.weight == 1).all()


@pytest.mark.parametrize("encoding", ["none", "fox", "fox+rope", "cope", ["fox", "rope"]], ids=str)
def test_options(encoding):
    """Each field brings its weights to every layer, and no others; off is the default."""
    weights = {
        "output_gate": {"options.output_gate.weight"},
        "output_norm": {"options.output_norm.weight"},
        "qk_norm": {"options.query_norm.weight", "options.key_norm.weight"},
        "key_value_shift": {"options.key_shift.weight", "options.value_shift.weight"},
    }

    def names(**fields):
        model = tiny_model("llama", encoding, **fields)
        assert {part: getattr(model.config, part) for part in PARTS} == {**dict.fromkeys(PARTS, False), **fields}
        return [{name for name, _ in layer.self_attn.named_parameters()} for layer in model.model.layers]

    plain = names()
    rotated = "rope" in str(encoding)
    allowed = PARTS[:3] if rotated else PARTS
    for part in allowed:
        assert names(**{part: True}) == [own | weights[part] for own in plain]
    everything = set().union(*(weights[part] for part in allowed))
    assert names(**dict.fromkeys(allowed, True)) == [own | everything for own in plain]


def test_gates_at_the_start():
    """Projections as the model's own, no bias but that of the forget gates, norms of 1."""
    fields = {"position_encoding_parameters": {"gate_bias_init": 3}, **dict.fromkeys(PARTS, True)}
    layer = causal_lm_class("gpt2")(tiny_config("gpt2", "fox", **fields)).transformer.h[1].attn
    fox, options = layer.encodings["fox"], layer.options
    assert (fox.gate.bias == 3).all()
    for projection in (fox.gate, options.output_gate):
        assert 0.15 < projection.weight.std() < 0.25
    for projection in (options.output_gate, options.key_shift, options.value_shift):
        assert projection.bias is None
    for norm in (options.query_norm, options.key_norm, options.output_norm):
        assert (norm.weight == 1).all()


def test_keys_are_normed_before_they_are_rotated():
    model, seen = tiny_model("llama", "fox+rope", "eager", qk_norm=True), []
    layer = model.model.layers[0].self_attn
    attend = layer.attention
    layer.attention = lambda *states, **options: seen.extend(states[1:3]) or attend(*states, **options)
    ids = tokens(1, 6)
    cache = model(ids, use_cache=True)[CACHE]
    hidden = model.model.layers[0].input_layernorm(model.get_input_embeddings()(ids))
    query, key = (part(hidden).view(1, 6, -1, 8).transpose(1, 2) for part in (layer.q_proj, layer.k_proj))
    context = model.model.shared_encodings(hidden, position_context(torch.arange(6)[None]))
    rope, options = layer.encodings["rope"], layer.options
    expected = rope.before_cache(options.query_norm(query, 0), options.key_norm(key, 0), context)
    for one, other in zip(seen, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(cache.layers[0].keys[..., :8], expected[1], rtol=0, atol=0)
    # A scale of its own for each channel: the other order would be something else.
    other_order = options.key_norm(rope.before_cache(query, key, context)[1], 0)
    assert not torch.allclose(other_order, expected[1], atol=1e-2)
