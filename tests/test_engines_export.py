"""Transformers' exporters: each cell of `engine_matrix` gives the logits and tokens of the model."""

import pytest
import torch
from transformers import DynamicCache

from engine_matrix import for_engine
from tiny import FAMILIES, tiny_model, tokens

exporters = pytest.importorskip("transformers.exporters", reason="this Transformers has no exporters")

# PyTorch's own, and what it says of operators that ONNX does not have.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

QUICK = ("none", "rope", "pope")


def runs(engine, model):
    """The model as a program of the engine: any number of sequences, of new tokens and of cached ones."""
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], attention_mask=mask[:, :5], cache=cache)
    inputs = {"input_ids": ids[:, 5:], "attention_mask": mask, "position_ids": positions(mask)[:, 5:], "cache": cache}
    if engine == "onnx":
        return exporters.OnnxExporter().export(model, inputs, exporters.OnnxConfig(dynamic=True))
    program = exporters.OpenVINOExporter().export(model, inputs, exporters.OpenVINOConfig(dynamic=True, stateful=False))
    # By default some processors compute in bfloat16.
    return program.to(config={"INFERENCE_PRECISION_HINT": "f32"})


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


def empty_cache(model, batch):
    """A cache of no tokens, with the shapes of its tensors."""
    cache = DynamicCache(config=model.config)
    model(tokens(batch, 1), cache=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    return cache


def check(engine, encoding, family):
    model = tiny_model(family, encoding, "eager", num_hidden_layers=1)
    with torch.no_grad():
        program = runs(engine, model)
        for batch, length in ((1, 1), (1, 17), (3, 8)):
            ids, new = tokens(batch, length, seed=length), 6
            mask = torch.ones(batch, length + new, dtype=torch.long)
            if batch > 1:
                mask[0, :3] = 0
            cache, found, given = empty_cache(model, batch), [], ids
            for end in range(length, length + new):
                place = positions(mask[:, :end])[:, -given.shape[1] :]
                step = program(input_ids=given, attention_mask=mask[:, :end], position_ids=place, cache=cache)
                found.append(step.logits)
                given, cache = step.logits[:, -1:].argmax(-1), step.cache
                ids = torch.cat((ids, given), dim=1)
            prompt = {"input_ids": ids[:, :length], "attention_mask": mask[:, :length]}
            assert ids.equal(model.generate(**prompt, max_new_tokens=new, do_sample=False, eos_token_id=-1))
            expected = model(ids[:, :-1], attention_mask=mask[:, :-1], position_ids=positions(mask[:, :-1])).logits
            shown = mask[:, :-1] > 0
            torch.testing.assert_close(torch.cat(found, dim=1)[shown], expected[shown], rtol=1e-4, atol=1e-4)


@for_engine("onnx", QUICK, family=list(FAMILIES))
def test_onnx_runtime(encoding, expected, family):
    assert expected == "works"
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    check("onnx", encoding, family)


@for_engine("openvino", QUICK, family=list(FAMILIES))
def test_openvino(encoding, expected, family):
    assert expected == "works"
    pytest.importorskip("openvino", reason="openvino is not installed")
    check("openvino", encoding, family)
