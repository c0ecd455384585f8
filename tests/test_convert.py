"""Conversion of pretrained models: logits of the source with its own encoding, what each change keeps, the command."""

import copy
import json
import shutil

import pytest
import torch
import transformers
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file

import whatwhere_cli as cli
from processes import python
from test_stock_equality import GPT2, LLAMA
from tiny import tiny_model, tokens
from toys import toy_recipe
from whatwhere import WhatWhereLlamaForCausalLM, list_position_encodings
from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts.cards.folder import write_card
from whatwhere.scripts.commands.convert import main
from whatwhere.scripts.conversion.encoding import convert
from whatwhere.scripts.conversion.folder import convert_checkpoint
from whatwhere.scripts.conversion.source import load_source
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.checkpoints import trained_length_of
from whatwhere.scripts.training.loop import train

ROPE = {"rope_type": "default", "rope_theta": 500.0}
SOURCES = {
    "llama": (transformers.LlamaConfig, {**LLAMA, "rope_parameters": ROPE}),
    "llama, tied, biases": (transformers.LlamaConfig, {**LLAMA, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": (transformers.Qwen2Config, {**LLAMA, "rope_parameters": ROPE}),
    "qwen3": (transformers.Qwen3Config, {**LLAMA, "head_dim": 16, "rope_parameters": ROPE, "vocab_size": 258}),
    # Another epsilon, and a width that the number of heads does not divide.
    "qwen3, other": (transformers.Qwen3Config, {**LLAMA, "head_dim": 16, "hidden_size": 34, "rms_norm_eps": 0.1}),
    "gpt2": (transformers.GPT2Config, GPT2),
}


@pytest.fixture
def source(request, tmp_path):
    """A stock model with random weights, biases and norms too, and its folder."""
    config_class, fields = SOURCES[request.param]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "source")
    return model, str(tmp_path / "source")


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens(2, 40)).logits


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_the_source_keeps_its_logits(source):
    stock, folder = source
    model = load_source(folder)
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)
    ours = model.generate(tokens(1, 8), max_new_tokens=8, do_sample=False)
    assert torch.equal(ours, stock.generate(tokens(1, 8), max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("source", ["llama", "qwen2", "qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("encoding", "new"), [("rope", 0), ("cope+rope", 1), (["rope", "cope+rope"], 1)], ids=["rope", "sum", "plan"]
)
def test_an_empty_table_changes_nothing(source, encoding, new):
    stock, folder = source
    model, added, dropped, _ = convert(load_source(folder), encoding)
    assert dropped == []
    assert bool(added) == bool(new)
    assert all("encodings" in name for name in added)
    torch.testing.assert_close(logits(model), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("encoding", list_position_encodings())
def test_its_own_encoding_changes_nothing(encoding):
    given = {"pope": {"theta": 1e6, "partial_rotary_factor": 0.5}, "cope": {"num_positions": 16}}
    model = tiny_model("gpt2", encoding, position_encoding_parameters=given.get(encoding))
    converted, added, dropped, _ = convert(model, encoding)
    assert (added, dropped) == ([], [])
    assert converted.config.position_encoding_parameters == model.config.position_encoding_parameters
    torch.testing.assert_close(logits(converted), logits(model))
    if encoding in ("absolute", "sinusoidal"):
        return
    # The same parameters, nested.
    converted, added, dropped, _ = convert(model, [encoding, encoding])
    assert (added, dropped) == ([], [])
    torch.testing.assert_close(logits(converted), logits(model))


def test_parameters_that_are_given_replace_those_of_the_source():
    model = tiny_model("llama", "cope", position_encoding_parameters={"num_positions": 16, "gates": "separate_key"})
    converted, added, dropped, _ = convert(model, "cope", {"num_positions": 8})
    found = converted.config.position_encoding_parameters
    assert (found["num_positions"], found["gates"]) == (8, "separate_key")
    assert added == dropped
    assert added


def test_a_new_scaling_keeps_theta():
    model = tiny_model("llama", "rope", rope_parameters={**ROPE, "partial_rotary_factor": 0.5})
    converted, *_ = convert(model, "rope", rope_parameters={"rope_type": "linear", "factor": 2.0})
    expected = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    assert converted.config.rope_parameters == expected
    converted, *_ = convert(model, rope_parameters={"rope_theta": 10.0})
    assert converted.config.rope_parameters["rope_theta"] == 10.0


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("before", "given", "original", "length"),
    [
        ({}, YARN, 48, 192),
        ({}, {**YARN, "original_max_position_embeddings": 16}, 16, 64),
        # The scaling replaces that of the source, and does not add to it.
        ({**YARN, "original_max_position_embeddings": 12}, {**YARN, "factor": 8.0}, 12, 96),
        ({**YARN, "original_max_position_embeddings": 12}, {"rope_theta": 100.0}, None, 12),
        ({}, {"rope_type": "linear", "factor": 2.0}, None, 48),
        ({}, {"rope_type": "dynamic", "factor": 2.0}, None, 48),
        ({}, {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 48, 96),
        ({}, {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 48, 48),
    ],
)
def test_the_length_of_a_new_scaling(before, given, original, length):
    model = tiny_model("llama", "rope", rope_parameters={"rope_theta": 500.0, **before})
    converted, *_ = convert(model, "rope", rope_parameters=given)
    assert converted.config.rope_parameters.get("original_max_position_embeddings") == original
    assert converted.config.max_position_embeddings == length
    # As Transformers scales without a conversion.
    expected = {"rope_theta": 500.0, **given} | ({"original_max_position_embeddings": original} if original else {})
    same = copy.deepcopy(model.config)
    same.rope_parameters = expected
    same = type(model)(same)
    same.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(converted), logits(same))


def test_a_tokenizer_gets_the_longer_length(tmp_path):
    tiny_model("llama", "rope", vocab_size=258).save_pretrained(tmp_path / "source")
    tokenizer = build_tokenizer("bytes")
    for stored, found in ((None, tokenizer.model_max_length), (48, 192), (1000, 1000)):
        tokenizer.model_max_length = stored or tokenizer.model_max_length
        tokenizer.save_pretrained(tmp_path / "source")
        output = str(tmp_path / f"out_{stored}")
        given = ["--position-encoding", "rope", "--rope-parameters", json.dumps(YARN)]
        main([str(tmp_path / "source"), *given, "--output", output])
        assert transformers.AutoTokenizer.from_pretrained(output).model_max_length == found
    assert trained_length_of(output, transformers.AutoConfig.from_pretrained(output)) == 48


def quantise(folder, method):
    """Rewrites a stock checkpoint as quantised; the weights of "fp8" are, as in Qwen's and DeepSeek's checkpoints."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("proj.weight")] if method == "fp8" else ():
        scale = weights[name].abs().max() / 448
        weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("source", ["llama", "qwen3", "gpt2"], indirect=True)
@pytest.mark.parametrize("method", ["fp8", "gptq", "unknown"])
def test_quantised_sources_are_refused(source, method, tmp_path, monkeypatch):
    folder = tmp_path / "source"
    build_tokenizer("bytes").save_pretrained(folder)
    quantise(folder, method)
    options = ["--position-encoding", "cope", "--output", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        # No weights are loaded.
        patch.setattr(transformers.PreTrainedModel, "from_pretrained", None)
        with pytest.raises(ValueError, match=rf"^checkpoint=.* are quantised \(quant_method='{method}'\)"):
            main([str(folder), *options])
    assert not (tmp_path / "out").exists()
    if method == "fp8" and source[0].config.model_type != "gpt2":
        # Without a word in the configuration.
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"are quantised \(it has 'model.layers.0.*weight_scale_inv'\)"):
            main([str(folder), *options])
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_from_pretrained_of_quantised_weights_is_that_of_transformers(source, tmp_path):
    """Without a GPU Transformers dequantises FP8."""
    folder = tmp_path / "source"
    quantise(folder, "fp8")
    stock = transformers.LlamaForCausalLM.from_pretrained(folder)
    ours = WhatWhereLlamaForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)
    assert (logits(ours) - logits(source[0])).abs().max() > 1e-3
    ours.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_rotated_part_that_the_stock_model_ignores(kind, tmp_path):
    config_class, fields = SOURCES[kind]
    config = config_class(**{**fields, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}})
    stock = transformers.AutoModelForCausalLM.from_config(config)
    stock.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load_source(str(tmp_path))), logits(stock), rtol=1e-4, atol=1e-4)


def test_layers_without_pope_stay():
    model = tiny_model("llama", "rope")
    converted, *_ = convert(model, ["rope", "pope"])
    before, after = model.state_dict(), converted.state_dict()
    name = "model.layers.{}.self_attn.q_proj.weight"
    assert torch.equal(after[name.format(0)], before[name.format(0)])
    assert not torch.equal(after[name.format(1)], before[name.format(1)])
    assert converted.config.rope_parameters == model.config.rope_parameters


@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
def test_the_command(source, tmp_path, capsys):
    folder = source[1]
    build_tokenizer("bytes").save_pretrained(folder)
    card = "---\nlicense: apache-2.0\nbase_model:\n- someone/model\n---\n# Source\n"
    (tmp_path / "source/README.md").write_text(card, encoding="utf-8")
    options = [
        "--position-encoding",
        "[rope, pope]",
        "--position-encoding-parameters",
        '{"pope": {"magnitude": "relu"}}',
    ]
    cli.main(["convert", folder, *options, "--output", str(tmp_path / "out")])
    assert "model.layers.*.self_attn.encodings" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/conversion.json").read_text())["source"] == "source"
    data = ModelCard.load(tmp_path / "out/README.md").data
    assert (data.license, data.base_model) == ("apache-2.0", ["someone/model"])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    expected, *_ = convert_checkpoint(folder, ["rope", "pope"], {"pope": {"magnitude": "relu"}})
    torch.testing.assert_close(logits(loaded), logits(expected))
    assert json.loads((tmp_path / "out/config.json").read_text())["position_encoding"] == ["rope", "pope"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"


def test_equal_weights_with_another_encoding_are_another_model(tmp_path):
    """`none` and scaled RoPE leave all weights: the source's card and its results are not theirs."""
    train(toy_recipe("selective_copy"), tmp_path / "source")
    write_card(tmp_path / "source")
    assert "model-index" in (tmp_path / "source/README.md").read_text(encoding="utf-8")
    changes = {"none": ["none"], "linear": ["rope", "--rope-parameters", '{"rope_type": "linear", "factor": 2.0}']}
    for name, options in changes.items():
        main([str(tmp_path / "source"), "--position-encoding", *options, "--output", str(tmp_path / name)])
        card = ModelCard.load(tmp_path / name / "README.md")
        assert not card.data.eval_results
        assert f"# {name}\n" in card.text
    files = [tmp_path / name / "model.safetensors" for name in ("source", *changes)]
    assert len({file.read_bytes() for file in files}) == 1
    assert len({weights_fingerprint(file.parent) for file in files}) == 3
    main([str(tmp_path / "source"), "--position-encoding", "rope", "--output", str(tmp_path / "same")])
    assert weights_fingerprint(tmp_path / "same") == weights_fingerprint(tmp_path / "source")


def test_new_parameters_stay_new(tmp_path, monkeypatch):
    """Also after a second conversion, and from the Hub, here from its cache."""
    tiny_model("llama", "rope", vocab_size=258).save_pretrained(tmp_path / "source")
    build_tokenizer("bytes").save_pretrained(tmp_path / "source")
    for old, new in (("source", "one"), ("one", "two")):
        main([str(tmp_path / old), "--position-encoding", "cope+rope", "--output", str(tmp_path / new)])
    expected = convert(load_source(str(tmp_path / "source")), "cope+rope")[1]
    assert json.loads((tmp_path / "two/conversion.json").read_text())["new_parameters"] == expected
    cached = tmp_path / "cache/models--u--m"
    shutil.copytree(tmp_path / "two", cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert convert_checkpoint("u/m")[1] == expected


def test_a_killed_conversion_leaves_no_model(tmp_path, monkeypatch):
    tiny_model("llama", "rope", vocab_size=258).save_pretrained(tmp_path / "source")
    build_tokenizer("bytes").save_pretrained(tmp_path / "source")
    options = [str(tmp_path / "source"), "--position-encoding", "cope+rope", "--output", str(tmp_path / "out")]

    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # As if the process ended, after the weights: nothing is removed.
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr("whatwhere.scripts.conversion.folder.write_json", kill)
        with pytest.raises(KeyboardInterrupt):
            main(options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_source(str(tmp_path / "out"))
    main(options)
    assert not (tmp_path / "out/.partial").exists()
    assert ModelCard.load(tmp_path / "out/README.md").text.lstrip().startswith("# out\n")
    assert load_source(str(tmp_path / "out")).config.position_encoding == "cope+rope"


def test_bad_input(tmp_path):
    transformers.BertConfig(hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"model_type is 'bert'. Allowed: .*'qwen3'"):
        load_source(str(tmp_path / "bert"))
    with pytest.raises(ValueError, match=r"position_encoding_parameters=\[1\] is not valid: it must be a mapping"):
        convert(tiny_model("llama", "rope"), "pope", [1])
    config = transformers.LlamaConfig(**LLAMA, num_labels=3)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "classes")
    with pytest.raises(ValueError, match=r"no causal language model .*ForSequenceClassification"):
        load_source(str(tmp_path / "classes"))
    with pytest.raises(ValueError, match=r"position_encoding=.*Did you mean 'pope'"):
        main(["no/source", "--position-encoding", "[rope, pop]", "--output", str(tmp_path / "out")])
    tiny_model("llama", "rope", vocab_size=258).save_pretrained(tmp_path / "no_tokenizer")
    (tmp_path / "no_tokenizer/README.md").unlink()
    options = ["--position-encoding", "pope", "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"^checkpoint=.*no_tokenizer' is not valid: it has no tokenizer\.$"):
        main([str(tmp_path / "no_tokenizer"), *options])
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=32, vocab_size=300)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"^checkpoint=.*gpt2' is not valid: it has no tokenizer\.$"):
        main([str(tmp_path / "gpt2"), *options])
    (tmp_path / "gpt2/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"gpt2' is not valid: its tokenizer cannot be read: Expecting .*[^.]\.$"):
        main([str(tmp_path / "gpt2"), *options])
    assert not (tmp_path / "out/config.json").exists()
    build_tokenizer("bytes").save_pretrained(tmp_path / "no_tokenizer")
    main([str(tmp_path / "no_tokenizer"), *options])
    assert ModelCard.load(tmp_path / "out/README.md").data.license is None
    gpt2.vocab_size = 200
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "smaller")
    build_tokenizer("bytes").save_pretrained(tmp_path / "smaller")
    options[-1] = str(tmp_path / "refused")
    with pytest.raises(ValueError, match="smaller' is not valid: its tokenizer has 257 tokens, the model has 200"):
        main([str(tmp_path / "smaller"), *options])
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ValueError, match=r"output=.*empty or new folder"):
        main([str(tmp_path), "--position-encoding", "pope", "--output", str(tmp_path)])


SCALED = {
    "rope": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
STOCK_LOAD = """
import sys, torch
sys.modules["whatwhere"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    assert AutoTokenizer.from_pretrained(folder).decode([104, 105]) == "hi"
    ids, logits = torch.load(folder + ".expected")
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, logits, rtol=1e-5, atol=1e-5)
"""


def test_stock_folders(tmp_path, capsys):
    """They load without our package, with the logits of the models of ours."""
    folders = []
    for name, scaling in {**SCALED, "biases": {}, "absolute": {}}.items():
        family = "gpt2" if name == "absolute" else "llama"
        torch.manual_seed(0)
        heads = {"num_key_value_heads": 4} if family == "gpt2" else {}
        biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True} if name == "biases" else {}
        model = tiny_model(family, "absolute" if family == "gpt2" else "rope", vocab_size=258, **biases, **heads)
        model.save_pretrained(tmp_path / f"our {name}")
        build_tokenizer("bytes").save_pretrained(tmp_path / f"our {name}")
        card = tmp_path / f"our {name}" / "README.md"
        card.write_text("---\nlicense: mit\nbase_model: someone/model\n---\n# Mine\n", encoding="utf-8")
        options = []
        if scaling:
            options = ["--position-encoding", "rope", "--rope-parameters", json.dumps(scaling)]
            converted, *_ = convert_checkpoint(str(tmp_path / f"our {name}"), "rope", None, scaling)
            model = converted.eval()
        folder = tmp_path / name
        cli.main(["convert", str(tmp_path / f"our {name}"), *options, "--stock", "--output", str(folder)])
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == family
        assert "auto_map" not in config
        assert not list(folder.glob("*.py"))
        data = ModelCard.load(folder / "README.md")
        assert (data.data.license, data.data.base_model) == ("mit", "someone/model")
        assert "trust_remote_code" not in data.text
        ids = tokens(2, 40)
        with torch.no_grad():
            torch.save([ids, model(ids).logits], f"{folder}.expected")
        folders.append(str(folder))
    assert "stock llama" in capsys.readouterr().out
    python("-c", STOCK_LOAD, *folders, env={"PYTHONPATH": ""})


@pytest.mark.parametrize(
    ("family", "encoding", "fields", "said"),
    [
        ("llama", "pope", {}, "position_encoding='pope' (allowed: 'rope')"),
        ("llama", "cope+rope", {}, "position_encoding='cope+rope' (allowed: 'rope')"),
        ("llama", ["rope", "none"], {}, "position_encoding=['rope', 'none'] (allowed: 'rope')"),
        ("gpt2", "rope", {}, "position_encoding='rope' (allowed: 'absolute')"),
        ("llama", "rope", {"qk_norm": True, "output_gate": True}, "output_gate=True, qk_norm=True"),
        ("gpt2", "absolute", {"norm_type": "rmsnorm"}, "norm_type='rmsnorm'"),
        ("gpt2", "absolute", {"num_key_value_heads": 2}, "num_key_value_heads=2 with n_head=4"),
    ],
)
def test_what_stock_models_do_not_compute(family, encoding, fields, said, tmp_path, refused):
    tiny_model(family, encoding, vocab_size=258, **fields).save_pretrained(tmp_path / "ours")
    build_tokenizer("bytes").save_pretrained(tmp_path / "ours")
    message = refused("convert", tmp_path / "ours", "--stock", "--output", tmp_path / "stock")
    assert "--stock is not valid: stock" in message
    assert said in message
    assert not (tmp_path / "stock" / "config.json").exists()
