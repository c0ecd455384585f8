"""Checkpoints with weights of version 2 keep their logits and generations: every encoding and variant, both families.

`saved_models/` holds weights (bfloat16), the configuration, and what the code that saved them computed: the logits of
the last three tokens, and six greedy tokens, of a batch with left padding.
"""

import json
import pathlib

import pytest
import safetensors.torch
import torch

from tiny import FAMILIES, causal_lm_class, slow_but, tokens

FOLDER = pathlib.Path(__file__).with_name("saved_models")
MODELS = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def weights():
    return {family: safetensors.torch.load_file(FOLDER / f"{family}.safetensors") for family in FAMILIES}


# Every encoding and variant once; the other family is slow.
ENCODINGS = sorted({name.split("-", 1)[1] for name in MODELS})
QUICK = [f"{FAMILIES[index % 2]}-{encoding}" for index, encoding in enumerate(ENCODINGS)]


@pytest.mark.parametrize("name", slow_but(QUICK, MODELS))
def test_logits_and_generation(name, weights, tmp_path):
    family, encoding = name.split("-", 1)
    own = {key.split("/")[1]: tensor for key, tensor in weights[family].items() if key.split("/")[0] == encoding}
    expected = own.pop("logits")
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]), encoding="utf-8")
    state = {key: tensor.float() for key, tensor in own.items()}
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    model, info = causal_lm_class(family).from_pretrained(tmp_path, output_loading_info=True)

    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = tokens(2, 14)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[:, -3:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    generated = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generated[:, ids.shape[1] :].tolist() == MODELS[name]["generated"]
    # Saved again and loaded, under present names.
    model.save_pretrained(tmp_path / "again")
    again = causal_lm_class(family).from_pretrained(tmp_path / "again")
    with torch.no_grad():
        torch.testing.assert_close(again(ids, attention_mask=mask).logits[:, -3:], logits, rtol=0, atol=0)
