"""Our models equal the stock GPT-2 and Llama at the same weights."""

import copy

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPT2ForQuestionAnswering,
    GPT2ForTokenClassification,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    Qwen2Config,
)
from transformers.utils import logging

import whatwhere
from tiny import FAMILIES, tokens
from whatwhere import WhatWhereGPT2Config, WhatWhereGPT2ForCausalLM, WhatWhereLlamaForCausalLM

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    **SPECIAL,
}
GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "initializer_range": 0.2,
    **SPECIAL,
}
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
    },
}
STOCK = {
    "llama": (LlamaForCausalLM, LLAMA),
    "tied": (LlamaForCausalLM, {**LLAMA, "tie_word_embeddings": True}),
    "llama-biases": (LlamaForCausalLM, {**LLAMA, "head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    **{f"rope-{name}": (LlamaForCausalLM, {**LLAMA, "rope_parameters": rope}) for name, rope in ROPE.items()},
    "gpt2": (GPT2LMHeadModel, GPT2),
    "gpt2-scaled": (
        GPT2LMHeadModel,
        {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True, "n_inner": 40},
    ),
}


def stock_model(model_class, fields, folder):
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**fields)).eval()
    model.save_pretrained(folder)
    return model


def our_class(stock_class):
    return getattr(whatwhere, f"WhatWhere{stock_class.__name__.replace('LMHeadModel', 'ForCausalLM')}")


# Every model with the implementation that is the default; those whose scores are scaled differently with eager, too.
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "sdpa") for name in STOCK), *((name, "eager") for name in ("llama", "gpt2", "gpt2-scaled"))],
)
def test_same_logits_gradients_and_generations(name, implementation, tmp_path):
    stock = stock_model(*STOCK[name], tmp_path)
    ours = our_class(type(stock))
    model, info = ours.from_pretrained(tmp_path, attn_implementation=implementation, output_loading_info=True)
    model.eval()
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config._attn_implementation == implementation
    ids = tokens(2, 40)
    for one in (stock, model):
        one(ids, labels=ids).loss.backward()
    with torch.no_grad():
        theirs, exact = stock(ids).logits, copy.deepcopy(stock).double()(ids).logits
        # Sums in another order make errors of the size of the stock model's own.
        allowed = 8 * (theirs - exact).abs().max().item()
        torch.testing.assert_close(model(ids).logits, theirs, rtol=0, atol=allowed)
    gradients = dict(stock.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(ids[:, :9], **options), stock.generate(ids[:, :9], **options))
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    assert torch.equal(
        model.generate(ids[:, :9], attention_mask=mask, **options),
        stock.generate(ids[:, :9], attention_mask=mask, **options),
    )


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_same_weight_names_and_shapes(name, tmp_path):
    def shapes(model):
        return {name: tuple(p.shape) for name, p in model.state_dict().items()}

    stock = stock_model(*STOCK[name], tmp_path)
    ours = our_class(type(stock))
    assert shapes(ours(ours.config_class(**STOCK[name][1]))) == shapes(stock)


def test_same_initialisation_statistics():
    torch.manual_seed(0)
    stock = GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_embd": 256, "n_layer": 8}))
    ours = WhatWhereGPT2ForCausalLM(WhatWhereGPT2Config(**{**GPT2, "n_embd": 256, "n_layer": 8}))
    reference = dict(stock.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.std(), reference[name].std(), rtol=0.1, atol=1e-4, msg=name)


TOKEN_LABELS = {"labels": torch.tensor([[0, 1, 2, 0, 1, 2, 0, -100, 1], [2, 2, 1, 0, -100, 2, 0, 1, 1]])}
SPANS = {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 20])}


@pytest.mark.parametrize(
    ("stock_class", "fields", "targets"),
    [
        (LlamaForTokenClassification, {**LLAMA, "num_labels": 3}, TOKEN_LABELS),
        (LlamaForQuestionAnswering, LLAMA, SPANS),
        (LlamaForSequenceClassification, {**LLAMA, "num_labels": 3}, {"labels": torch.tensor([0, 2])}),
        (GPT2ForTokenClassification, {**GPT2, "num_labels": 3}, TOKEN_LABELS),
        (GPT2ForQuestionAnswering, GPT2, SPANS),
    ],
    ids=["llama tokens", "llama spans", "llama classes", "gpt2 tokens", "gpt2 spans"],
)
def test_heads_of_a_stock_checkpoint(stock_class, fields, targets, tmp_path):
    stock, ours_class = stock_model(stock_class, fields, tmp_path / "stock"), our_class(stock_class)
    ours, info = ours_class.from_pretrained(tmp_path / "stock", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    inputs = {"input_ids": tokens(2, 9), **targets}
    expected, found = stock(**inputs), ours.eval()(**inputs)
    for name in {"loss", "logits", "start_logits", "end_logits"} & set(expected):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    expected.loss.backward()
    found.loss.backward()
    heads = {"score", "classifier", "qa_outputs"}
    (head,) = heads & {name for name, _ in stock.named_children()}
    for find in (lambda model: getattr(model, head), lambda model: model.get_input_embeddings()):
        torch.testing.assert_close(find(ours).weight.grad, find(stock).weight.grad, atol=1e-5, rtol=0)
    # Both kinds of weights are found again, and so are those of a language model.
    ours.save_pretrained(tmp_path / "ours")
    again, info = ours_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    torch.testing.assert_close(dict(again.named_parameters()), dict(ours.named_parameters()), rtol=0, atol=0)
    _, info = AutoModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    language_model = WhatWhereLlamaForCausalLM if "Llama" in stock_class.__name__ else WhatWhereGPT2ForCausalLM
    language_model(ours.config).save_pretrained(tmp_path / "lm")
    _, info = ours_class.from_pretrained(tmp_path / "lm", output_loading_info=True)
    assert {name.partition(".")[0] for name in info["missing_keys"]} <= heads


PLANS = (["rope", "none"], ["cope+rope", "fox"])


@pytest.mark.parametrize(
    ("name", "encoding"),
    [
        (family, encoding)
        for index, encoding in enumerate([*whatwhere.list_position_encodings(), *PLANS])
        for family in FAMILIES
        if encoding in ("absolute", "sinusoidal", "rope") or family == FAMILIES[index % 2]
    ],
    ids=str,
)
def test_another_encoding_keeps_the_other_weights_and_says_which(name, encoding, tmp_path):
    stock = stock_model(*STOCK[name], tmp_path)
    model, info = our_class(type(stock)).from_pretrained(tmp_path, position_encoding=encoding, output_loading_info=True)
    assert model.config.position_encoding == encoding
    state = stock.state_dict()
    new = {name for name in model.state_dict() if name not in state}
    gone = {name for name in state if name not in model.state_dict()}
    assert set(info["missing_keys"]) == new
    assert set(info["unexpected_keys"]) == gone
    assert all("encodings." in name or "embed_positions" in name for name in new)
    assert gone <= {"transformer.wpe.weight"}
    for name, value in model.state_dict().items():
        assert value.isfinite().all()
        if name in state:
            assert torch.equal(value, state[name]), name
    assert model(tokens(1, 9)).logits.isfinite().all()


def test_a_named_weight_report_reaches_the_user(tmp_path, caplog):
    stock_model(*STOCK["gpt2"], tmp_path)
    logging.enable_propagation()
    WhatWhereGPT2ForCausalLM.from_pretrained(tmp_path, position_encoding="cope")
    logging.disable_propagation()
    report = caplog.text
    assert "wpe.weight" in report
    assert "encodings.cope" in report


def test_foreign_checkpoints_are_refused(tmp_path):
    BertConfig().save_pretrained(tmp_path / "bert")
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    for folder in ("bert", "gpt2"):
        with pytest.raises(ValueError, match=rf"model_type='{folder}' cannot be loaded as WhatWhereLlamaConfig"):
            WhatWhereLlamaForCausalLM.from_pretrained(tmp_path / folder)
    Qwen2Config().save_pretrained(tmp_path / "qwen2")
    with pytest.raises(ValueError, match=r"model_type='qwen2' cannot be loaded .* with `whatwhere convert`\.$"):
        WhatWhereLlamaForCausalLM.from_pretrained(tmp_path / "qwen2")


def test_registered_with_the_auto_classes(tmp_path):
    config = AutoConfig.for_model("whatwhere_llama", **LLAMA, position_encoding="pope")
    model = AutoModelForCausalLM.from_config(config)
    assert type(model) is WhatWhereLlamaForCausalLM
    model.save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is WhatWhereLlamaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path, position_encoding="cope").position_encoding == "cope"


def test_dropout_is_turned_off_by_modules():
    # As TRL's DPO does.
    config = WhatWhereGPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=2, position_encoding="cope")
    model = WhatWhereGPT2ForCausalLM(config).train()
    ids = torch.randint(61, (2, 16))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_public_attributes_of_stock_llama():
    model = WhatWhereLlamaForCausalLM(whatwhere.WhatWhereLlamaConfig(**{**LLAMA, "pad_token_id": 1}))
    assert (model.vocab_size, model.model.vocab_size, model.model.padding_idx) == (61, 61, 1)


def test_rmsnorm_and_grouped_heads_of_the_gpt2_family():
    config = WhatWhereGPT2Config(**GPT2, norm_type="rmsnorm", num_key_value_heads=2, position_encoding="pope")
    model = WhatWhereGPT2ForCausalLM(config)
    assert model.transformer.h[0].attn.c_attn.weight.shape == (32, 32 + 2 * 16)
    assert not hasattr(model.transformer.ln_f, "bias")
    ids = tokens(2, 8)
    model(ids, labels=ids).loss.backward()
    assert model.transformer.h[0].ln_1.weight.grad.abs().sum() > 0


def test_post_norm_equals_torch_layers():
    config = WhatWhereGPT2Config(
        **GPT2, norm_position="post", activation_function="relu", position_encoding="none", resid_pdrop=0, attn_pdrop=0
    )
    model = WhatWhereGPT2ForCausalLM(config).eval()
    layers = []
    for block in model.transformer.h:
        layer = torch.nn.TransformerEncoderLayer(32, 4, 128, dropout=0.0, batch_first=True, norm_first=False).eval()
        layer.self_attn.in_proj_weight.data = block.attn.c_attn.weight.T.contiguous()
        layer.self_attn.out_proj.weight.data = block.attn.c_proj.weight.T.contiguous()
        layer.linear1.weight.data = block.mlp.c_fc.weight.T.contiguous()
        layer.linear2.weight.data = block.mlp.c_proj.weight.T.contiguous()
        layers.append(layer)
        for bias in (
            layer.self_attn.in_proj_bias,
            layer.self_attn.out_proj.bias,
            layer.linear1.bias,
            layer.linear2.bias,
        ):
            torch.nn.init.zeros_(bias)
    ids = tokens(2, 10)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(10)
    with torch.no_grad():
        hidden = model.transformer.wte(ids)
        for layer in layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        expected = hidden @ model.transformer.wte.weight.T
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)
