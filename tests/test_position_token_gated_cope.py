"""Token-gated CoPE: the bias, at once and in blocks, against the note's formulas; gates, table, hybrid."""

import types

import pytest
import torch

import oracles
from bias_checks import assert_same, every_head
from tiny import LargestTensor, key_ranges_of, position_context, slow_but, tiny_model, tokens
from whatwhere.attention_autograd import blockwise_attention_by_autograd
from whatwhere.attention_blockwise import HIDDEN_LOGIT, join_digits, split_digits
from whatwhere.position_token_gated_cope import TokenGatedCoPE, TokenGatedCoPEParameters

# What the contract tests take for the defaults: positions end within their short sequences.
SMALL = {"num_positions": 9}
# Parameters that a configuration refuses, and what the message says: test_configuration.py.
REFUSED = [
    ({"num_positions": 1}, r"\['num_positions'\]=1.* at least 2"),
]

CONFIG = types.SimpleNamespace(hidden_size=6, num_attention_heads=4, head_dim=4, max_position_embeddings=48)


def inputs(Q, K, P, *, B=2, H=4, G=2, dtype=torch.float64):
    """Queries, keys, values, W_p q, gates, table."""
    shapes = [(B, H, Q, 4), (B, G, K, 4), (B, G, K, 3), (B, H, Q, 4), (B, H, K), (P, 4)]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    tensors[4] = torch.sigmoid(tensors[4])
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def layer_of(query, value, position_query, gates, table):
    """A layer with this table whose W_p is the identity, and a context with these queries of positions and gates."""
    layer = TokenGatedCoPE(CONFIG, TokenGatedCoPEParameters(len(table)), 0).to(table.dtype)
    layer.table.weight = table
    layer.position_query.weight = torch.nn.Parameter(torch.eye(table.shape[1], dtype=table.dtype))
    Q, K = query.shape[2], value.shape[2]
    state = split_digits(gates.unflatten(1, (value.shape[1], -1)).transpose(2, 3), gates.dtype)
    return layer, position_context(
        torch.arange(K - Q, K)[None],
        torch.arange(K)[None],
        query=position_query,
        value=value,
        new_value=value[:, :, K - Q :],
        states={"token_gated_cope": state},
    )


def oracle(query, key, value, position_query, gates, table, visible):
    B, H, n = *query.shape[:2], query.shape[1] // key.shape[1]

    def head(b, h):
        states = query[b, h], key[b, h // n], value[b, h // n], position_query[b, h], gates[b, h]
        return oracles.token_gated_cope_oracle(*states, table, visible, 0.5)

    return every_head(head, B, H)


def eager(query, key, value, position_query, gates, table, visible):
    n = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(n, 1).transpose(2, 3) * 0.5
    logits = logits.masked_fill(~visible, HIDDEN_LOGIT)
    layer, context = layer_of(query, value, position_query, gates, table)
    weights = torch.softmax(logits + layer.bias(logits, query, context, 0.5), -1) * visible.any(-1, keepdim=True)
    return weights @ value.repeat_interleave(n, 1)


def blocks(query, key, value, position_query, gates, table, mask, block_size=3):
    layer, context = layer_of(query, value, position_query, gates, table)
    settings = {"scaling": 0.5, "bias": layer.bias, "context": context, "block_size": block_size}
    return blockwise_attention_by_autograd(query, key, value, mask=mask, **settings)


def kernel(query, key, value, position_query, gates, table, mask):
    layer, context = layer_of(query, value, position_query, gates, table)
    return layer.kernel(query, key, value, context, key_ranges=mask, scaling=0.5, dropout=0.0)


def tree(Q, K):
    """Rows that see what no other row sees: branches, and one row that sees nothing."""
    visible = torch.rand(Q, K) < 0.6
    visible &= oracles.visible_oracle(Q, K)
    visible[range(Q), range(K - Q, K)] = True
    visible[2] = False
    return visible


@pytest.mark.parametrize("num_positions", [2, 4, 20], ids=lambda number: f"P{number}")
@pytest.mark.parametrize("mask", ["causal", "packed-padded", "tree"])
def test_equals_the_note(num_positions, mask):
    """Outputs and every gradient, at once and in blocks, with every form of a mask."""
    Q, K = 7, 9
    states = inputs(Q, K, num_positions)
    segments = [-1, 0, 0, -1, 0, 1, 1, 1, -1] if mask == "packed-padded" else None
    visible = tree(Q, K) if mask == "tree" else oracles.visible_oracle(Q, K, segments)
    compact = key_ranges_of(segments and [segments, segments], Q)
    additive = torch.where(visible, 0.0, torch.finfo(torch.float16).min).half()
    additive[~visible.any(-1)] = float("-inf")
    forms = [visible[None, None], additive[None, None]]
    found = [eager(*states, visible), *(blocks(*states, form) for form in forms)]
    if mask != "tree":
        found += [blocks(*states, compact), blocks(*states, compact, block_size=Q)]
    assert_same(found, oracle(*states, visible), states)


def segments_of(kind, K):
    """Documents (2, K), -1 for padding: padding on both sides or packed documents; None for causal."""
    slots = torch.arange(K)
    if kind == "padded":
        shown = (slots >= K // 3, (slots < K - K // 4) & (slots >= K // 5))
    elif kind == "packed":
        shown = (slots >= 0, slots != K // 2)
    else:
        return None
    documents = slots * 3 // K if kind == "packed" else slots * 0
    return torch.where(torch.stack(shown), documents, -1)


# What a row of the kernels sees, with lengths of one and of several tiles, and a row alone.
@pytest.mark.parametrize(
    ("Q", "K", "kind", "dtype"),
    slow_but(
        [(5, 9, "padded", torch.float32), (5, 9, "packed", torch.bfloat16)],
        [
            (1, 1, "causal", torch.float32),
            (1, 9, "causal", torch.bfloat16),
            (1, 9, "packed", torch.float32),
            (5, 9, "padded", torch.float32),
            (5, 9, "packed", torch.bfloat16),
            (33, 33, "padded", torch.float32),
            (70, 70, "packed", torch.float32),
        ],
    ),
)
def test_kernel_equals_the_note(Q, K, kind, dtype):
    """Outputs and every gradient; keys that no row sees do not count; twice the same; decoding."""
    pytest.importorskip("triton", reason="the kernels need Triton")
    states = [one.detach().to(dtype) for one in inputs(Q, K, 6)]
    # As wide as the keys; gates have more digits than bfloat16.
    states[2] = torch.randn(2, 2, K, 4).to(dtype)
    states[4] = torch.rand(2, 4, K)
    states = [torch.nn.Parameter(one) for one in states]
    segments = segments_of(kind, K)
    key_ranges = key_ranges_of(segments, Q)
    exact = [one.detach().double().requires_grad_() for one in states]
    if segments is None:
        expected = oracle(*exact, oracles.visible_oracle(Q, K))
    else:
        visible = [oracles.visible_oracle(Q, K, row.tolist()) for row in segments]
        rows = ([*(one[b : b + 1] for one in exact[:5]), exact[5], visible[b]] for b in range(2))
        expected = torch.cat([oracle(*one) for one in rows])
    grad = torch.randn(expected.shape).to(dtype)
    truth = [expected, *torch.autograd.grad(expected, exact, grad.double())]
    runs = []
    for _ in range(2):
        out = kernel(*states, key_ranges)
        runs.append([out, *torch.autograd.grad(out, states, grad)])
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    for one, other, right in zip(*runs, truth):
        assert torch.equal(one, other)
        assert (one.double() - right).norm() <= tolerance * max(right.norm(), 0.1 * grad.double().norm())
    last = [states[0][:, :, -1:], *states[1:3], states[3][:, :, -1:], *states[4:]]
    with torch.no_grad():
        step = kernel(*last, None if key_ranges is None else key_ranges[:, :, Q - 1 :])
    assert (step - expected[:, :, -1:]).norm() <= tolerance * max(expected[:, :, -1:].norm(), 0.1)


def test_kernel_counts_in_documents():
    """Thousands of tokens before a document take no digits from its counts."""
    K = 6000
    states = [one.detach().float() for one in inputs(1, K, 48)]
    states[2], states[5] = torch.randn(2, 2, K, 4), torch.nn.Parameter(states[5])
    key_ranges = key_ranges_of([0] * (K - 20) + [1] * 20, 1).expand(2, -1, -1, -1)
    own = [*states[:1], *(one[:, :, -20:] for one in states[1:3]), states[3], states[4][:, :, -20:], states[5]]
    with torch.no_grad():
        torch.testing.assert_close(kernel(*states, key_ranges), kernel(*own, None), rtol=1e-5, atol=1e-5)


def test_kernel_refuses_windows():
    """Rows that see the same token from different ones on: its position is not one number."""
    model = tiny_model("llama", "token_gated_cope", "triton", num_hidden_layers=1)
    ids, key_ranges = tokens(1, 6), key_ranges_of([0] * 6, 6)
    model(ids, attention_mask=key_ranges)
    key_ranges[0, 0, 5, 0] = 3
    with pytest.raises(ValueError, match=r"'token_gated_cope'.*different ones.*'blockwise'"):
        model(ids, attention_mask=key_ranges)


def test_many_blocks_equal_one():
    """Documents and padding that begin and end inside of blocks, counts past the table."""
    T = 100
    segments = torch.arange(T).repeat(2, 1) // 40
    segments[0, 90:] = -1
    segments[1] = torch.arange(T) // 65
    states = inputs(T, T, 15)
    expected = blocks(*states, key_ranges_of(segments, T), block_size=T)
    assert_same([blocks(*states, key_ranges_of(segments, T), block_size=16)], expected, states, 1e-7)


@pytest.mark.parametrize("implementation", ["eager", "blockwise"])
def test_layer_equals_the_note(implementation):
    """From hidden states: gates of each head, W_p, the table; gradients of all parameters."""
    B, H, G, T, E = 2, 4, 2, 6, 6
    layer = TokenGatedCoPE(CONFIG, TokenGatedCoPEParameters(3), 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    query, key, value, *_ = inputs(T, T, 3)
    visible = oracles.visible_oracle(T, T)
    weight, bias = layer.gate.weight, layer.gate.bias
    gates = torch.stack([1 / (1 + torch.exp(-(hidden @ weight[h] + bias[h]))) for h in range(H)], 1)
    position_query = torch.einsum("de,bhqe->bhqd", layer.position_query.weight, query)
    expected = oracle(query, key, value, position_query, gates, layer.table.weight, visible)

    context = position_context(torch.arange(T)[None], query=query, value=value, new_value=value)
    state = layer.cached_state(hidden, key, context)
    assert state.shape == (B, G, T, 2 * H // G)
    context.states["token_gated_cope"] = state
    if implementation == "eager":
        logits = query @ key.repeat_interleave(H // G, 1).transpose(2, 3) * 0.5
        logits = logits.masked_fill(~visible, torch.finfo(torch.float32).min)
        weights = torch.softmax(logits + layer.bias(logits, query, context, 0.5), -1)
        out = weights @ value.repeat_interleave(H // G, 1)
    else:
        settings = {"scaling": 0.5, "bias": layer.bias, "context": context, "block_size": 4}
        out = blockwise_attention_by_autograd(query, key, value, **settings)
    assert_same([out], expected, [hidden, query, key, value, *layer.parameters()], 1e-7)


@pytest.mark.parametrize("encoding", ["token_gated_cope", "token_gated_cope+rope"])
@pytest.mark.parametrize("hidden", ["padded", "packed"])
def test_one_key_head_in_a_batch(encoding, hidden):
    # Projections of one key head are transposed views: nothing may need their memory in order.
    ids, options = tokens(2, 12), {}
    kept = torch.ones(2, 12, dtype=torch.bool)
    if hidden == "padded":
        kept[0, :4] = False
        options["attention_mask"] = kept.long()
    else:
        options["position_ids"] = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    model, found = tiny_model("llama", encoding, num_key_value_heads=1), []
    for implementation in ("eager", "blockwise"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, use_cache=False, **options).logits[kept]
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=5e-5, atol=5e-5)


def test_hybrid_takes_the_query_before_rotation():
    """W_p q is that of the query as projected; content uses the rotated one, as RoPE alone has it."""
    model, seen = tiny_model("llama", "token_gated_cope+rope", "eager"), []
    layer = model.model.layers[0].self_attn
    part, biases = layer.encodings["token_gated_cope"], layer.encodings.bias

    def watched(logits, query, context, scaling):
        seen.append((query, context, biases(logits, query, context, scaling)))
        return seen[-1][-1]

    layer.encodings.bias = watched
    model(tokens(1, 5))
    hidden = model.model.layers[0].input_layernorm(model.get_input_embeddings()(tokens(1, 5)))
    query = layer.q_proj(hidden).view(1, 5, 4, 8).transpose(1, 2)
    ((turned, context, bias),) = seen
    rope = [oracles.rope_rotation(query[0, :, t].T, t, 10000.0, 8).T for t in range(5)]
    torch.testing.assert_close(turned, torch.stack(rope, dim=1)[None])
    assert not torch.allclose(turned[:, :, 1:], query[:, :, 1:])
    # The count of the oldest key is its gate alone.
    gate = torch.sigmoid(part.gate(hidden))[:, 0]
    embedding = (1 - gate)[..., None] * part.table.weight[0] + gate[..., None] * part.table.weight[1]
    expected = ((query @ part.position_query.weight.T) * embedding[:, :, None]).sum(-1) * 8**-0.5
    torch.testing.assert_close(context.query, query)
    torch.testing.assert_close(bias[..., 0], expected)


def test_clamped_counts_have_the_last_position_and_no_gradient():
    """Gates of 1: counts 1, 2, 2.999, 2.999, ... with four entries; nearly the last entry, and no gradient from it."""
    query, key, value, position_query, gates, table = inputs(8, 8, 4)
    gates = torch.ones_like(gates).requires_grad_()
    logits = torch.zeros(2, 4, 8, 8, dtype=torch.float64).masked_fill(~oracles.visible_oracle(8, 8), HIDDEN_LOGIT)
    layer, context = layer_of(query, value, position_query, gates, table)
    bias = layer.bias(logits, query, context, 1.0)
    for j, embedding in enumerate([table[1], table[2], *[0.001 * table[2] + 0.999 * table[3]] * 6]):
        torch.testing.assert_close(bias[:, :, 7, j], position_query[:, :, 7] @ embedding)
    (grad,) = torch.autograd.grad(bias[:, :, 7, 2:].sum(), gates)
    assert not grad.any()
    for mask in (None, oracles.visible_oracle(8, 8)[None, None]):
        out = blocks(query, key, value, position_query, gates, table, mask)
        (grad,) = torch.autograd.grad(out.sum(), gates)
        # Only the first and the second count are below 2.999.
        assert grad[:, :, :2].any()
        assert not grad[:, :, 2:].any()


def test_the_end_of_a_large_table():
    """In float32 65536 - 1.001 is 65535, the last entry itself."""
    P = T = 65536
    query, key, value = torch.randn(1, 1, 8, 2), torch.randn(1, 1, T, 2), torch.randn(1, 1, T, 2)
    position_query, gates, table = torch.randn(1, 1, 8, 2), torch.ones(1, 1, T), torch.randn(P, 2)
    states = [torch.nn.Parameter(state) for state in (query, key, value, position_query, gates, table)]
    outs = [blocks(*states, None, block_size=size) for size in (8, 4)]
    torch.testing.assert_close(outs[1], outs[0])
    for one, other in zip(*(torch.autograd.grad(out.sum(), states) for out in outs)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_gates_keep_their_digits_in_bfloat16():
    layer = TokenGatedCoPE(CONFIG, TokenGatedCoPEParameters(48), 0).bfloat16()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    hidden, key = torch.randn(1, 50, 6).bfloat16(), torch.randn(1, 2, 50, 4).bfloat16()
    state = layer.cached_state(hidden, key, position_context(torch.arange(50)[None]))
    assert state.dtype == torch.bfloat16
    gates = join_digits(state).transpose(2, 3).flatten(1, 2)
    logits = torch.nn.functional.linear(hidden, layer.gate.weight, layer.gate.bias).float()
    torch.testing.assert_close(gates, torch.sigmoid(logits).transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("reach", "expected"), [(48, 48), (5000, 2048), (1, 2)])
def test_default_num_positions(reach, expected):
    config = types.SimpleNamespace(**{**vars(CONFIG), "max_position_embeddings": reach})
    assert TokenGatedCoPEParameters().resolve(config).num_positions == expected
    assert TokenGatedCoPEParameters(7).resolve(config).num_positions == 7


def test_initialisation():
    """N(0, 0.02) everywhere, and zero biases of the gates."""
    config = types.SimpleNamespace(hidden_size=64, num_attention_heads=32, head_dim=48, max_position_embeddings=100)
    layer = TokenGatedCoPE(config, TokenGatedCoPEParameters().resolve(config), 0)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "gate.weight": (32, 64),
        "gate.bias": (32,),
        "table.weight": (100, 48),
        "position_query.weight": (48, 48),
    }
    for part in (layer.gate, layer.table, layer.position_query):
        torch.nn.init.ones_(part.weight)
        part.reset()
        assert abs(part.weight.std().item() / 0.02 - 1) < 0.1
        assert abs(part.weight.mean().item()) < 0.002
    assert not layer.gate.bias.any()


def test_memory_is_linear_in_length():
    """No operation of a training step makes a tensor with T * T elements."""
    sizes = []
    for T in (512, 1024):
        states = inputs(T, T, 64, B=1, H=2, dtype=torch.float32)
        with LargestTensor() as mode:
            torch.autograd.grad(blocks(*states, None, block_size=64).sum(), states)
        sizes.append(mode.largest)
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[1] <= 64 * 1024 * 2
