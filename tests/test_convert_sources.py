"""Stock models that `convert` makes Llama-style models of ours: they compute the same; what ours cannot is refused."""

import copy
import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, MistralConfig, Phi3Config, Qwen3Config, SmolLM3Config
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging

from test_stock_equality import LLAMA
from tiny import tokens
from whatwhere import WhatWhereLlamaForCausalLM
from whatwhere.scripts.commands.convert import main
from whatwhere.scripts.conversion.encoding import convert
from whatwhere.scripts.conversion.source import CONVERTED, load_source
from whatwhere.scripts.data.tokenize import build_tokenizer

FIELDS = {**LLAMA, "vocab_size": 258, "num_hidden_layers": 4}
ORIGINAL = 16


def longrope(pairs, **fields):
    """Fields of a configuration with LongRoPE, as those of Phi-3: the original length is outside `rope_scaling`."""
    short, long = [1.0 + 0.1 * pair for pair in range(pairs)], [2.0 + pair for pair in range(pairs)]
    rope = {"type": "longrope", "short_factor": short, "long_factor": long, **fields}
    return {"rope_scaling": rope, "original_max_position_embeddings": ORIGINAL}


HALF = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
# The stock configuration and the encoding that the source has.
SOURCES = {
    "mistral": (MistralConfig(**FIELDS, sliding_window=None), "rope"),
    # The window never acts; a head is wider than hidden_size / heads.
    "mistral, window": (MistralConfig(**FIELDS, sliding_window=64, head_dim=16, tie_word_embeddings=True), "rope"),
    "smollm3": (SmolLM3Config(**FIELDS), ["rope", "rope", "rope", "none"]),
    "smollm3, biases": (
        SmolLM3Config(
            **FIELDS,
            no_rope_layers=[0, 1, 0, 1, 1],
            attention_bias=True,
            mlp_bias=True,
            head_dim=16,
            tie_word_embeddings=False,
            use_sliding_window=True,
            sliding_window=64,
        ),
        ["none", "rope"],
    ),
    "smollm3, all": (SmolLM3Config(**FIELDS, no_rope_layers=[1] * 4, sliding_window=8), "rope"),
    "smollm3, none": (SmolLM3Config(**FIELDS, no_rope_layers=[0] * 4), "none"),
    "phi3": (Phi3Config(**FIELDS), "rope"),
    "phi3, part": (Phi3Config(**FIELDS, rope_parameters=HALF, tie_word_embeddings=True, head_dim=16), "rope"),
    "phi3, longrope": (Phi3Config(**FIELDS, **longrope(4), sliding_window=64), "rope"),
    "phi3, longrope, part": (
        Phi3Config(**FIELDS, partial_rotary_factor=0.5, **longrope(2, attention_factor=1.3)),
        "rope",
    ),
    # Fields that Transformers' model does not have, and one that it does not read.
    "phi3, no effect": (Phi3Config(**FIELDS, embd_pdrop=0.1, attention_bias=True, lm_head_bias=True), "rope"),
}


def stock_folder(config, dtype, folder):
    """Saves a stock model with random weights, biases and norms too, and a tokenizer with a chat template."""
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.update(temperature=0.7, do_sample=True, eos_token_id=[2, 5])
    model.save_pretrained(folder)
    tokenizer = build_tokenizer("bytes")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return model


def logits(model, length, dtype=None):
    model = model if dtype is None else copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        return model.eval()(tokens(2, length)).logits.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SOURCES)
def test_its_own_encoding_keeps_the_model(kind, dtype, tmp_path):
    config, encoding = SOURCES[kind]
    stock = stock_folder(config, dtype, tmp_path / "source")
    name = encoding if isinstance(encoding, str) else f"[{', '.join(encoding)}]"
    main([str(tmp_path / "source"), "--position-encoding", name, "--output", str(tmp_path / "out")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", trust_remote_code=True)
    assert model.dtype == dtype
    assert model.config.position_encoding == encoding
    for length in (ORIGINAL, 40, 64):
        if config.model_type != "phi3":
            assert torch.equal(logits(model, length), logits(stock, length))
            continue
        # The products of fused and of split projections are rounded differently.
        exact = logits(stock, length, torch.float64)
        torch.testing.assert_close(logits(model, length, torch.float64), exact, rtol=0, atol=1e-10)
        error, stock_error = ((logits(one, length) - exact).abs().max() for one in (model, stock))
        assert error <= 2 * stock_error
    if (config.model_type, dtype) != ("phi3", torch.bfloat16):
        # LongRoPE has other frequencies from 17 tokens on, in the prompt or at one of the new tokens.
        for length in (8, 20):
            given = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
            # In older versions, Phi-3 loses its cache at that token.
            expected = stock.generate(tokens(2, length), **given, use_cache=config.model_type != "phi3")
            assert torch.equal(model.generate(tokens(2, length), **given), expected)
    saved = [json.loads((tmp_path / one / "generation_config.json").read_text()) for one in ("source", "out")]
    assert saved[0] == saved[1]
    tokenizers = [transformers.AutoTokenizer.from_pretrained(tmp_path / one) for one in ("source", "out")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_no_warning_of_fields_without_effect(tmp_path):
    stock_folder(SOURCES["phi3, no effect"][0], torch.float32, tmp_path)
    with CaptureLogger(logging.get_logger("whatwhere")) as log:
        model = load_source(str(tmp_path))
    assert log.out == ""
    assert not model.config.attention_bias


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MistralConfig(**FIELDS), None),
        (MistralConfig(**FIELDS, sliding_window=63), r"sliding_window=63\), .* at least max_position_embeddings=64\.$"),
        (Phi3Config(**FIELDS, sliding_window=32), r"have a sliding window \(sliding_window=32\)"),
        (Phi3Config(**FIELDS, resid_pdrop=0.1), r"has resid_pdrop=0.1, and models of ours .* Allowed: 0.0\.$"),
        (SmolLM3Config(**FIELDS, use_sliding_window=True, sliding_window=8), r"\(sliding_window=8\)"),
        (Qwen3Config(**FIELDS, use_sliding_window=True, sliding_window=9, max_window_layers=2), r"sliding_window=9\)"),
        (MistralConfig(**FIELDS, sliding_window=None, is_causal=False), r"is_causal=False\. Allowed: True\.$"),
        (transformers.LlamaConfig(**FIELDS, is_causal=False), r"is_causal=False\. Allowed: True\.$"),
        (transformers.Qwen2MoeConfig(**FIELDS), "'qwen2_moe'. Allowed: 'gpt2', .*" + ", ".join(map(repr, CONVERTED))),
    ],
)
def test_what_ours_cannot_compute_is_refused(config, message, tmp_path):
    """From the configuration alone, before weights are loaded."""
    config.save_pretrained(tmp_path)
    # None: not refused, but the folder has no weights.
    message = message or "cannot be loaded: .* no file named model.safetensors"
    with pytest.raises(ValueError, match=rf"^checkpoint=.*{message}"):
        load_source(str(tmp_path))


@pytest.mark.parametrize("kind", CONVERTED)
def test_from_pretrained_names_the_command(kind, tmp_path):
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"model_type='{kind}' cannot be loaded .* with `whatwhere convert`\.$"):
        WhatWhereLlamaForCausalLM.from_pretrained(tmp_path)


def test_layers_without_rope(tmp_path):
    """`cope` starts as `none`; an encoding for all layers rotates what the source does not, and says so."""
    stock = stock_folder(SOURCES["smollm3"][0], torch.float32, tmp_path)
    source = load_source(str(tmp_path))
    with CaptureLogger(logging.get_logger("whatwhere")) as log:
        # What `finetune` does without `--position-encoding`.
        assert convert(source)[0].config.position_encoding == ["rope", "rope", "rope", "none"]
        model, *_ = convert(source, ["cope+rope", "cope+rope", "cope+rope", "cope"])
    assert log.out == ""
    torch.testing.assert_close(logits(model, 40), logits(stock, 40), rtol=1e-4, atol=1e-4)
    for encoding in ("rope", "cope+rope", "pope"):
        with CaptureLogger(logging.get_logger("whatwhere")) as log:
            model, *_ = convert(source, encoding)
        assert f"position_encoding={encoding!r} rotates queries and keys of layers [3], " in log.out
        assert (logits(model, 40) - logits(stock, 40)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        ("LlamaModel", transformers.LlamaConfig(**FIELDS, tie_word_embeddings=True)),
        ("LlamaForSequenceClassification", transformers.LlamaConfig(**FIELDS, tie_word_embeddings=True)),
        ("Qwen2ForSequenceClassification", transformers.Qwen2Config(**FIELDS, tie_word_embeddings=True)),
        ("GPT2DoubleHeadsModel", transformers.GPT2Config(vocab_size=258, n_embd=16, n_layer=1, n_head=2)),
    ],
)
def test_other_kinds_of_models_are_refused(cls, config, tmp_path):
    """By their configuration, or by their weights; their embeddings could be the head."""
    getattr(transformers, cls)(copy.deepcopy(config)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"it is no causal language model \(architectures=\['{cls}'\]\)"):
        load_source(str(tmp_path))
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "architectures": None}))
    if cls != "LlamaModel":
        with pytest.raises(ValueError, match=r"its kind has no (score\.weight|multiple_choice_head\.summary\.bias, )"):
            load_source(str(tmp_path))


def test_buffers_of_earlier_versions_are_no_weights(tmp_path):
    stock = stock_folder(transformers.LlamaConfig(**FIELDS), torch.float32, tmp_path)
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(4)}
    stock.save_pretrained(tmp_path, state_dict={**stock.state_dict(), **buffers})
    assert torch.equal(logits(load_source(str(tmp_path)), 40), logits(stock, 40))


def test_the_old_name_of_longrope(tmp_path):
    """Transformers reads it without the original length."""
    Phi3Config(**FIELDS, **longrope(4)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["rope_scaling"] = {**longrope(4)["rope_scaling"], "type": "su"}
    del content["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="rope_scaling has the type 'su', an old name: write 'longrope' into its"):
        load_source(str(tmp_path))


def test_rope_is_added_with_the_base_of_the_source(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 777.0}
    stock_folder(SmolLM3Config(**FIELDS, no_rope_layers=[0] * 4, rope_parameters=rope), torch.float32, tmp_path)
    source = load_source(str(tmp_path))
    assert source.config.position_encoding == "none"
    for encoding in ("cope+rope", "rope"):
        assert convert(source, encoding)[0].config.rope_parameters == rope
    model, *_ = convert(source, "cope")
    model.save_pretrained(tmp_path / "cope")
    assert "rope_parameters" not in json.loads((tmp_path / "cope" / "config.json").read_text())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("problem_type", "text-classification"),
        ("attn_implementation", "flash_attention_2"),
        ("_attn_implementation", "flash_attention_2"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mistral", "ours"])
def test_fields_of_the_source_that_do_not_matter(tmp_path, kind, field, value):
    """They are dropped with a warning, and the model computes the same."""
    config = SOURCES["mistral"][0] if kind == "mistral" else transformers.LlamaConfig(**FIELDS)
    stock_folder(config, torch.float32, tmp_path)
    if kind == "ours":
        load_source(str(tmp_path)).save_pretrained(tmp_path)
    expected = logits(load_source(str(tmp_path)), 8)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, field: value}))
    with CaptureLogger(logging.get_logger("whatwhere")) as said:
        model = load_source(str(tmp_path))
    assert f"{field}={value!r}" in said.out
    torch.testing.assert_close(logits(model, 8), expected)
    model.save_pretrained(tmp_path / "saved")
    assert not {field, "attn_implementation"} & {*json.loads((tmp_path / "saved" / "config.json").read_text())}
