"""What the tests of encodings with a bias share: its two paths against loops, outputs and every gradient."""

import torch

import oracles
from tiny import bias_of, key_ranges_of
from whatwhere.attention_blockwise import HIDDEN_LOGIT, blockwise_attention

# A document after padding, another one, padding.
SEGMENTS = [-1, -1, 0, 0, 0, 1, 1, 1, -1]
# Documents of nine keys, or None, and their positions.
POSITIONS = {
    "plain": (None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    "gaps": (None, [0, 1, 2, 4, 5, 6, 9, 10, 11]),
    "left-padded": ([-1, -1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 2, 3, 4, 5, 6]),
    "packed": ([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 3, 4]),
}


def states_of(H, G, Q, K, spread=1.0, V=3):
    """Queries, keys of four channels and values of `V`, in float64, of two batch entries."""
    shapes = [(2, H, Q, 4), (2, G, K, 4), (2, G, K, V)]
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [(query * spread).requires_grad_(), key.requires_grad_(), value.requires_grad_()]


def every_head(function, B, H):
    """The results of `function(b, h)`, stacked."""
    return torch.stack([torch.stack([function(b, h) for h in range(H)]) for b in range(B)])


def assert_same(outs, expected, inputs, tolerance=1e-9):
    """Each output, and its gradients, are those of the expected one."""
    grad = torch.randn_like(expected)
    options = {"retain_graph": True, "materialize_grads": True}
    truth = torch.autograd.grad(expected, inputs, grad, **options)
    for out in outs:
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        for one, other in zip(torch.autograd.grad(out, inputs, grad, **options), truth, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def check_bias(encoding, states, oracle, context, *, segments=None, inputs=(), parts=None, tolerance=1e-9):
    """The bias of full matrices, and that of blocks, give what `oracle(b, h, g, visible)` does; scaling 0.5.

    `inputs` are what else has a gradient; `parts` the encodings whose biases `encoding` adds up.
    """
    query, key, value = states
    (B, H, Q, _), (_, G, K, _) = query.shape, key.shape
    visible = oracles.visible_oracle(Q, K, segments)
    expected = every_head(lambda b, h: oracle(b, h, h // (H // G), visible), B, H)
    logits = (query @ key.repeat_interleave(H // G, 1).transpose(2, 3) * 0.5).masked_fill(~visible, HIDDEN_LOGIT)
    weights = torch.softmax(logits + encoding.bias(logits, query, context, 0.5), -1) * visible.any(-1, keepdim=True)
    outs = [weights @ value.repeat_interleave(H // G, 1)]
    mask = key_ranges_of(segments and [segments] * B, Q)
    biases = [bias_of(part, context, 0.5) for part in parts or [encoding]]
    for direct in (False, True):
        options = {"mask": mask, "scaling": 0.5, "biases": biases, "block_size": 4, "direct": direct}
        outs.append(blockwise_attention(query, key, value, **options))
    assert_same(outs, expected, [*states, *inputs], tolerance)
