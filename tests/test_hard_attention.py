"""Hard attention: all weight on one key; what passes back, and what is refused."""

import pytest
import torch

from tiny import FAMILIES, tiny_model, tokens
from whatwhere.attention import hard_weights


def test_weights_and_gradients():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    soft = torch.softmax(logits, -1)
    values = torch.randn(5, dtype=torch.float64)
    for straight_through in (True, False):
        hard = hard_weights(soft, straight_through=straight_through)
        assert torch.equal(hard.detach().round(), torch.nn.functional.one_hot(logits.argmax(-1), 5).double())
        (found,) = torch.autograd.grad((hard * values).sum(), logits, retain_graph=True)
        (through_softmax,) = torch.autograd.grad((soft * values).sum(), logits, retain_graph=True)
        torch.testing.assert_close(found, through_softmax * straight_through)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ["absolute", "cope"])
def test_model_attends_to_one_key(family, encoding):
    model = tiny_model(family, encoding, attention_weights="hard")
    outputs = model(tokens(2, 9), labels=tokens(2, 9), output_attentions=True)
    for weights in outputs.attentions:
        torch.testing.assert_close(weights.amax(-1), torch.ones(2, 4, 9))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9))
    outputs.loss.backward()
    # The choice has no gradient; values and everything else have one.
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")) or "encodings" in name:
            assert not parameter.grad.any(), name
        else:
            assert parameter.grad.any(), name


def test_other_implementations_are_refused():
    with pytest.raises(ValueError, match=r"(?s)sdpa.*not supported.*Allowed: 'eager'"):
        tiny_model("llama", "rope", "sdpa", attention_weights="hard")
    with pytest.raises(Exception, match=r"(?s)attention_weights.*'softmax', 'hard', 'straight_through'.*soft"):
        tiny_model("llama", "rope", attention_weights="soft")
