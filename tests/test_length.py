"""Length extrapolation: the same tokens at every length, against a loop over tokens; reach; the command line."""

import json
import math

import pytest
import torch
import transformers

from tiny import tiny_model
from whatwhere.scripts import length as script
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation import length as evaluation

VOCABULARY = 258


def stock_llama(**kwargs):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=8, bos_token_id=0, eos_token_id=0, **{**sizes, **kwargs}
    )
    return transformers.LlamaForCausalLM(config).eval()


def stock_gpt2(positions=8):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=positions, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def granite():
    """A model whose logits are not just head x hidden state: it divides them."""
    torch.manual_seed(0)
    config = transformers.GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        logits_scaling=8.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.GraniteForCausalLM(config).eval()


@pytest.fixture
def stream():
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, VOCABULARY, (161,), generator=generator)
    return token_ids, torch.randint(0, 4, (161,), generator=generator)


@torch.no_grad()
def one_by_one(model, token_ids, byte_counts, length):
    """Bits per byte, one token at a time: token i is scored from the tokens of its window before it."""
    nats, total = 0.0, 0
    for target in range(1, len(token_ids)):
        start = (target - 1) // length * length
        logits = model(input_ids=token_ids[None, start:target]).logits[0, -1].double()
        nats -= logits.log_softmax(-1)[token_ids[target]].item()
        total += byte_counts[target].item()
    return nats / math.log(2) / total


@pytest.mark.parametrize("make", [stock_llama, granite], ids=["plain head", "scaled logits"])
def test_equals_a_loop_over_tokens(make, stream):
    model = make()
    assert evaluation.has_plain_head(model, stream[0][None, :8]) == (make is stock_llama)
    cells = evaluation.measure(model, *stream, [8, 16, 80], trained_length=8, batch_tokens=32)
    for cell in cells:
        expected = one_by_one(model, *stream, cell.length)
        assert cell.bits_per_byte == pytest.approx(expected, rel=1e-5)
        assert cell.tokens == 160
        assert cell.windows == 160 // cell.length
        assert cell.bytes == stream[1][1:].sum()
        assert cell.perplexity == pytest.approx(2 ** (expected * cell.bytes / cell.tokens), rel=1e-4)
    assert [cell.multiple for cell in cells] == [1, 2, 10]


def test_logits_are_computed_in_pieces(stream):
    model = stock_llama()
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    inputs, targets = stream[0][None, :-1], stream[0][None, 1:]
    with torch.no_grad():
        pieces = evaluation.token_losses(model, inputs, targets, plain_head=True, chunk=50)
        assert rows == [50, 50, 50, 10]
        whole = evaluation.token_losses(model, inputs, targets, plain_head=False)
    torch.testing.assert_close(pieces, whole)


def test_standard_error_is_that_of_the_mean_over_windows(stream):
    model = stock_llama()
    # With the same number of bytes in every window the ratio is a plain mean.
    cells = evaluation.measure(model, stream[0], torch.full((161,), 2), [16, 160], trained_length=8)
    with torch.no_grad():
        inputs, targets = stream[0][:-1].view(-1, 16), stream[0][1:].view(-1, 16)
        nats = evaluation.token_losses(model, inputs, targets, plain_head=True).double().sum(1)
    bits_per_byte = nats / math.log(2) / 32
    assert cells[0].standard_error == pytest.approx((bits_per_byte.std() / math.sqrt(10)).item(), rel=1e-6)
    # One window says nothing about its spread.
    assert cells[1].standard_error is None


def test_a_length_out_of_reach_is_reported_and_not_run(stream):
    model = stock_gpt2(positions=16)
    assert evaluation.reach(model) == 16
    seen = []
    model.transformer.wte.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    cells = evaluation.measure(model, *stream, [8, 16, 32], trained_length=16)
    assert max(seen) == 16
    assert [cell.reached for cell in cells] == [True, True, False]
    assert "16" in cells[2].reason
    assert cells[2].bits_per_byte is cells[2].standard_error is cells[2].perplexity is None


@pytest.mark.parametrize(("encoding", "limit"), [("absolute", 8), ("rope", None), ("pope", None)])
def test_reach_of_our_models(encoding, limit):
    from whatwhere import WhatWhereLlamaConfig, WhatWhereLlamaForCausalLM

    config = WhatWhereLlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
        position_encoding=encoding,
    )
    assert evaluation.reach(WhatWhereLlamaForCausalLM(config)) == limit


def test_tokens_are_a_multiple_of_every_length():
    assert evaluation.usable_tokens(None, 10**6, [256, 512, 1024, 2048, 2560]) == 40960
    assert evaluation.usable_tokens(1, 10**6, [8, 12]) == 24
    assert evaluation.usable_tokens(25, 10**6, [8, 12]) == 48
    # As much as there is, when nobody asked for more.
    assert evaluation.usable_tokens(None, 101, [8, 12]) == 96
    for requested, available in ((100, 100), (None, 24)):
        with pytest.raises(ValueError, match=f"it holds {available}"):
            evaluation.usable_tokens(requested, available, [8, 12])


@pytest.mark.parametrize("text", ["", "1,two", "0,1", "-1", "1,nan", "inf"])
def test_bad_multiples(text):
    with pytest.raises(ValueError, match="lengths="):
        script.parse_multiples(text)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("length")
    for name, model in (("llama", stock_llama()), ("gpt2", stock_gpt2())):
        model.save_pretrained(root / name)
        build_tokenizer("bytes").save_pretrained(root / name)
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("def f(x):\n    return x + 1\n" * 40, encoding="utf-8")
    return root


def test_command_line(folders, capsys):
    output = folders / "out"
    checkpoints = [str(folders / "llama"), str(folders / "gpt2")]
    local = ["--data", "local", "--data-dir", str(folders / "text"), "--lengths", "4,1,2", "--tokens", "200"]
    arguments = [*checkpoints, *local, "--output", str(output), "--device", "cpu"]
    script.main(arguments)
    printed = capsys.readouterr().out
    content = json.loads((output / "length.json").read_text(encoding="utf-8"))
    llama, gpt2 = content["checkpoints"]
    assert [cell["length"] for cell in llama["cells"]] == [8, 16, 32]
    assert {cell["tokens"] for cell in llama["cells"]} == {224}
    assert llama["tokens_sha256"] == gpt2["tokens_sha256"]
    assert [cell["reached"] for cell in gpt2["cells"]] == [True, False, False]
    assert printed.count("cannot reach") == 2
    assert f"{llama['cells'][2]['bits_per_byte']:.3f}" in printed
    assert content["command"].startswith("python -m whatwhere.scripts.length ")
    assert content["date"]
    assert content["versions"]["torch"] == torch.__version__
    figures = {ending: (output / f"length.{ending}").read_bytes() for ending in ("png", "svg")}
    assert figures["png"].startswith(b"\x89PNG")
    assert b"<svg" in figures["svg"]
    # The same numbers draw the same bytes.
    evaluation.draw(content["checkpoints"], folders / "again")
    assert {ending: (folders / f"again.{ending}").read_bytes() for ending in ("png", "svg")} == figures


def test_one_checkpoint_keeps_its_numbers_beside_its_weights(folders):
    from whatwhere.model_card import read_results

    local = ["--data", "local", "--data-dir", str(folders / "text"), "--lengths", "1", "--tokens", "16"]
    script.main([str(folders / "llama"), *local])
    assert read_results(folders / "llama")["length"]["checkpoints"][0]["name"] == "llama"


def test_trained_length_comes_from_the_run_before_the_configuration(tmp_path):
    config = stock_llama().config
    assert script.trained_length_of(str(tmp_path), config) == 8
    (tmp_path / "results.json").write_text('{"length": 4}', encoding="utf-8")
    assert script.trained_length_of(str(tmp_path), config) == 4
    with pytest.raises(ValueError, match="--trained-length"):
        script.trained_length_of("me/x", transformers.BloomConfig())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{root}/text"], "has no config.json"),
        (["{root}/nowhere"], "cannot be loaded"),
        (["{root}/llama", "--lengths", "1.3"], "no whole number"),
        (["{root}/llama", "--tokens", "99999"], "Use more text"),
        (["{root}/llama", "--trained-length", "0"], "trained-length"),
    ],
)
def test_bad_input_is_one_clear_line(folders, capsys, monkeypatch, arguments, message):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    local = ["--data", "local", "--data-dir", str(folders / "text"), "--output", str(folders / "bad")]
    with pytest.raises(SystemExit) as stop:
        script.main([argument.format(root=folders) for argument in arguments] + local)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (folders / "bad").exists()


@pytest.mark.parametrize("option", ["--tokens", "--batch-tokens"])
def test_numbers_out_of_range(option, checkpoint_for_errors, capsys):
    with pytest.raises(SystemExit):
        script.main([str(checkpoint_for_errors), option, "-5"])
    assert f"{option.removeprefix('--')}=-5 is not valid: it must be at least 1" in capsys.readouterr().err


def test_corrupt_weights(checkpoint_for_errors, capsys):
    (checkpoint_for_errors / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(SystemExit):
        script.main([str(checkpoint_for_errors), "--lengths", "1", "--tokens", "32"])
    assert "cannot be loaded" in capsys.readouterr().err


@pytest.fixture
def checkpoint_for_errors(tmp_path):
    tiny_model("llama", "rope").save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"
