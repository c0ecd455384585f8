"""`convert --gguf-file` with small files; the real one is in test_pretrained.py."""

import json
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tiny import tokens
from whatwhere.scripts.commands.convert import main
from whatwhere.scripts.conversion.source import load_source

gguf = pytest.importorskip("gguf", reason='needs pip install "whatwhere[train]"')

HIDDEN, HEADS, KEY_HEADS, WIDTH, LENGTH = 32, 4, 2, 8, 64


def write(folder, seed=0, arch="llama", without=(), tensors=(), settings=()):
    """Writes m.gguf, a model of two layers with a tokenizer of bytes; returns the tensors."""
    folder.mkdir(exist_ok=True)
    vocabulary = [*bytes_to_unicode().values(), "<|endoftext|>", "Ġt"]
    file = gguf.GGUFWriter(folder / "m.gguf", arch)
    file.add_context_length(LENGTH)
    file.add_embedding_length(HIDDEN)
    file.add_block_count(2)
    file.add_feed_forward_length(HIDDEN)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KEY_HEADS)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_freq_base(100.0)
    file.add_rope_dimension_count(WIDTH)
    file.add_vocab_size(len(vocabulary))
    for name, *values in settings:
        getattr(file, name)(*values)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(vocabulary)
    file.add_token_types([1] * 256 + [3, 1])
    file.add_token_merges(["Ġ t"])
    file.add_eos_token_id(256)
    shapes = {name: (len(vocabulary), HIDDEN) for name in ("token_embd.weight", "output.weight")}
    shapes["output_norm.weight"] = (HIDDEN,)
    for layer in ("blk.0", "blk.1"):
        square = ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        shapes |= {f"{layer}.{name}.weight": (HIDDEN, HIDDEN) for name in square}
        shapes |= {f"{layer}.{name}.weight": (KEY_HEADS * WIDTH, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
    shapes |= dict(tensors)
    generator = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    for name, tensor in found.items():
        if name not in without:
            file.add_tensor(name, tensor.numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return found


def test_a_file_of_this_name_in_the_working_folder_is_another(tmp_path, monkeypatch):
    found = write(tmp_path / "source")
    write(tmp_path / "other", seed=1)
    monkeypatch.chdir(tmp_path / "other")
    model = load_source("../source", "m.gguf")
    assert torch.equal(model.lm_head.weight, found["output.weight"])


def test_a_file_in_a_folder_of_the_source(tmp_path):
    write(tmp_path / "source")
    output = tmp_path / "out"
    main([str(tmp_path), "--gguf-file", "source/m.gguf", "--position-encoding", "cope+rope", "--output", str(output)])
    assert json.loads((output / "conversion.json").read_text())["gguf_file"] == "source/m.gguf"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"without": ["blk.0.ffn_up.weight"]}, "it has no model.layers.0.mlp.up_proj.weight"),
        ({"tensors": [("rope_freqs.weight", (4,))]}, "it has rope_freqs.weight, which Transformers does not read"),
        ({"tensors": [("blk.1.attn_q.bias", (HIDDEN,))]}, "it has blk.1.attn_q.bias, which"),
        (
            {"settings": [("add_rope_scaling_type", gguf.RopeScalingType.YARN)]},
            "it has rope.scaling.type='yarn', which",
        ),
        ({"arch": "phi3", "settings": [("add_sliding_window", 16)]}, "it has attention.sliding_window=16, which"),
    ],
    ids=["tensor", "factors", "bias", "yarn", "window"],
)
def test_what_transformers_does_not_read_is_refused(content, said, tmp_path, refused):
    write(tmp_path / "source", **content)
    options = ["--gguf-file", "m.gguf", "--position-encoding", "rope", "--output", tmp_path / "out"]
    assert said in refused("convert", tmp_path / "source", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "settings", [[("add_rope_scaling_type", gguf.RopeScalingType.NONE)], [("add_sliding_window", 64)]]
)
def test_what_changes_nothing_is_accepted(settings, tmp_path):
    write(tmp_path / "source", settings=settings)
    assert load_source(str(tmp_path / "source"), "m.gguf").config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n.gguf", "gguf_file='n.gguf' is not valid: .* the name of a file in .* Allowed: 'm.gguf'."),
        ("../source/m.gguf", "gguf_file='../source/m.gguf' is not valid: it must be the name of a file in"),
        ("/m.gguf", "gguf_file='/m.gguf' is not valid"),
        ("m.gguf", "checkpoint=.*source' cannot be loaded: "),
    ],
)
def test_a_file_that_cannot_be_read(name, said, tmp_path):
    (tmp_path / "source").mkdir()
    # Cut off in the header.
    (tmp_path / "source/m.gguf").write_bytes(b"GGUF\3\0\0\0")
    options = ["--gguf-file", name, "--position-encoding", "rope", "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=said):
        main([str(tmp_path / "source"), *options])
    assert not (tmp_path / "out").exists()


def test_the_logits_are_those_of_the_weights(tmp_path):
    found = write(tmp_path)
    model = load_source(str(tmp_path), "m.gguf").eval()
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    stock = LlamaForCausalLM(config).eval()
    stock.load_state_dict(model.state_dict())
    assert torch.equal(stock.model.embed_tokens.weight, found["token_embd.weight"])
    torch.testing.assert_close(model(tokens(1, 20)).logits, stock(tokens(1, 20)).logits)


def test_its_package_is_needed(tmp_path, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x.gguf").touch()
    options = ["--gguf-file", "x.gguf", "--position-encoding", "pope", "--output", tmp_path / "out"]
    said = refused("convert", tmp_path, *options).strip()
    assert said == 'error: `gguf` is not installed: pip install "whatwhere[train]"'


def test_a_file_is_no_source(tmp_path):
    file = tmp_path / "x.gguf"
    file.touch()
    with pytest.raises(ValueError, match=r"x\.gguf' is not valid: it is a file\. Give its folder, .*file x\.gguf"):
        load_source(str(file))


def test_what_it_states_is_in_the_card(tmp_path):
    stated = [("add_license", "apache-2.0"), ("add_languages", ["en", "fr"]), ("add_base_model_count", 1)]
    stated.append(("add_name", "A small model"))
    stated.append(("add_base_model_repo_url", 0, "https://huggingface.co/someone/model"))
    write(tmp_path / "source", settings=stated)
    output = str(tmp_path / "out")
    main([str(tmp_path / "source"), "--gguf-file", "m.gguf", "--position-encoding", "cope+rope", "--output", output])
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert "converted from `A small model`" in (tmp_path / "out" / "README.md").read_text()
    assert (data.license, data.language, data.base_model) == ("apache-2.0", ["en", "fr"], "someone/model")
