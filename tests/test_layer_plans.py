"""Plans by layers: each layer has the encoding that the list gives it; what is refused is in test_configuration.py."""

import pytest
import torch

from tiny import FAMILIES, tiny_model, tokens
from whatwhere.forward_arguments import CACHE

PLANS = (
    (["cope", "rope"], {"cope": {"num_positions": 6}}),
    (["pope", "alibi"], {"pope": {"theta": 100.0}}),
    (["cope+rope", "fox"], {"cope": {"num_positions": 6, "gates": "separate_key"}}),
    (["relative", "none"], {"relative": {"num_positions": 7, "beyond": "last"}}),
    (["stick_breaking", "token_gated_cope"], {"stick_breaking": {"remainder": "value"}}),
    (["cope+alibi", "alibi"], {"cope": {"share_across_layers": True}, "alibi": {"head_fraction": 0.5}}),
)


def layers_of(model):
    base = model.base_model
    return base.layers if hasattr(base, "layers") else base.h


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("plan", "parameters"), PLANS, ids=[str(plan) for plan, _ in PLANS])
def test_each_layer_is_that_of_its_encoding(family, plan, parameters):
    """A model of one layer with the encoding and the weights of a layer computes the same from the same states."""
    model = tiny_model(family, plan, position_encoding_parameters=parameters)
    attention = [layer.self_attn if family == "llama" else layer.attn for layer in layers_of(model)]
    assert [list(layer.encodings) for layer in attention] == [name.split("+") for name in plan]
    base = model.base_model
    norm = base.norm if family == "llama" else base.ln_f
    ids = tokens(2, 14)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, :4] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": False}
    with torch.no_grad():
        states = base(ids, output_hidden_states=True, **given).hidden_states
        for index, name in enumerate(plan):
            own = {part: parameters[part] for part in name.split("+") if part in parameters}
            own = own if "+" in name else own.get(name)
            alone = tiny_model(family, name, num_hidden_layers=1, position_encoding_parameters=own)
            layers_of(alone)[0].load_state_dict(layers_of(model)[index].state_dict())
            shared = base.shared_encodings.state_dict()
            kept = {key: shared[key] for key in alone.base_model.shared_encodings.state_dict()}
            alone.base_model.shared_encodings.load_state_dict(kept)
            (alone.base_model.norm if family == "llama" else alone.base_model.ln_f).load_state_dict(norm.state_dict())
            found = alone.base_model(inputs_embeds=states[index], **given).last_hidden_state
            # Transformers returns the last states after the norm.
            expected = states[index + 1] if index == len(plan) - 1 else norm(states[index + 1])
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("encoding", ["rope", "cope", "pope", "fox+rope"])
def test_one_name_for_all_layers_is_that_encoding(family, encoding):
    model, plan = tiny_model(family, encoding), tiny_model(family, [encoding])
    assert plan.state_dict().keys() == model.state_dict().keys()
    plan.load_state_dict(model.state_dict())
    ids = tokens(2, 20)
    assert torch.equal(plan(ids).logits, model(ids).logits)
    assert torch.equal(plan.generate(ids[:, :9], max_new_tokens=5), model.generate(ids[:, :9], max_new_tokens=5))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pattern_is_repeated(family):
    short = tiny_model(family, ["cope", "none", "rope"], num_hidden_layers=6)
    whole = tiny_model(family, ["cope", "none", "rope"] * 2, num_hidden_layers=6)
    whole.load_state_dict(short.state_dict())
    assert [short.config.layer_encodings(layer) for layer in range(6)] == [["cope"], ["none"], ["rope"]] * 2
    ids = tokens(2, 20)
    assert torch.equal(short(ids).logits, whole(ids).logits)


def test_layers_that_parameters_leave_out():
    """`every_n_layers` counts the layers of the model, not those of the plan that have the encoding."""
    parameters = {"cope": {"every_n_layers": 2}}
    plan = ["cope", "cope", "rope", "cope+rope"]
    model = tiny_model("llama", plan, num_hidden_layers=4, position_encoding_parameters=parameters)
    assert [list(layer.self_attn.encodings) for layer in model.model.layers] == [["cope"], [], ["rope"], ["rope"]]
    # A layer that has cached gate keys beside one that has none.
    parameters = {"cope": {"gates": "separate_key"}}
    model = tiny_model("llama", ["cope", "rope"], position_encoding_parameters=parameters)
    cache = model(tokens(1, 7), use_cache=True)[CACHE]
    assert [layer.keys.shape[-1] for layer in cache.layers] == [16, 8]
