"""PoPE in place of RoPE: the fit of two channels to each pair, the start by mean angles, and what is kept."""

import itertools
import json
import math

import pytest
import torch
import transformers

import whatwhere_cli as cli
from test_stock_equality import LLAMA
from tiny import tiny_model, tokens
from whatwhere.scripts.conversion import encoding, polar_fit
from whatwhere.scripts.conversion.encoding import convert
from whatwhere.scripts.conversion.folder import convert_folder
from whatwhere.scripts.conversion.layer_start import attention_of
from whatwhere.scripts.data.tokenize import build_tokenizer

D, HEADS, KEY_HEADS = 8, 4, 2


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens(2, 40)).logits


def model_of_one_direction(family, rotated, *, theta=100.0, quarters=False, lengths=lambda one: one, **fields):
    """A model whose pairs of channels have one angle for each head, whatever the content."""
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotated / D}
    fields |= {"attention_bias": True} if family == "llama" else {}
    model = tiny_model(family, "rope", rope_parameters=rope, max_position_embeddings=512, **fields)
    pairs = rotated // 2

    def turn(rows, count):
        """Gives the pairs of each head, (heads * D, ...), angles: both channels are multiples of the first."""
        rows = rows.view(count, D, *rows.shape[1:])
        angles = (
            torch.randint(4, (count, pairs)) * (math.pi / 2) if quarters else 2 * math.pi * torch.rand(count, pairs)
        )
        shape = (count, pairs, *[1] * (rows.ndim - 2))
        first = lengths(rows[:, :pairs].clone())
        rows[:, :pairs], rows[:, pairs:rotated] = first * angles.cos().view(shape), first * angles.sin().view(shape)

    with torch.no_grad():
        for index in range(2):
            attention, state = attention_of(model, index), torch.random.get_rng_state()
            projections = (
                [(attention.q_proj, HEADS, 0), (attention.k_proj, KEY_HEADS, 0)]
                if family == "llama"
                else [(attention.c_attn, HEADS, 0), (attention.c_attn, KEY_HEADS, HEADS * D)]
            )
            for number, (projection, count, start) in enumerate(projections):
                weight = projection.weight if family == "llama" else projection.weight.T
                for rows in (weight, projection.bias):
                    torch.random.set_rng_state(state)
                    torch.rand(number)
                    turn(rows[start : start + count * D], count)
    return model


def assert_angles_matter(converted, expected):
    for index in range(2):
        attention_of(converted, index).encodings.pope.delta.weight.data.zero_()
    assert (logits(converted) - expected).abs().max() > 0.02


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("theta", [100.0, 1e30])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["plain", "norms"])
def test_the_fit_is_exact_where_two_channels_can_be(family, rotated, theta, options):
    model = model_of_one_direction(family, rotated, theta=theta, quarters=bool(options), **options)
    scale = "1/sqrt(2d)" if rotated == 4 else "1/sqrt(d)"
    converted, added, dropped, errors = convert(model, "pope", {"scale": scale})
    assert dropped == []
    assert [name.rpartition("encodings.")[2] for name in added] == ["pope.delta.weight"] * 2
    found = converted.config.position_encoding_parameters
    assert (found["magnitude"], found["partial_rotary_factor"]) == ("identity", rotated / D)
    frequencies = [theta ** (-index / (rotated // 2)) for index in range(rotated // 2) for _ in range(2)]
    assert found["frequencies"] == pytest.approx(frequencies, rel=1e-5)
    assert list(errors) == [0, 1]
    assert max(errors.values()) < 1e-3
    torch.testing.assert_close(logits(converted), logits(model), rtol=5e-3, atol=5e-3)
    for index in range(2):
        delta = attention_of(converted, index).encodings.pope.delta.weight
        assert -1.5 * math.pi - 1e-6 <= delta.min() <= delta.max() <= -0.5 * math.pi + 1e-6
    if theta == 100.0:
        assert_angles_matter(converted, logits(model))


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("scale", ["1/sqrt(d)", "1/sqrt(2d)"])
def test_the_fit_is_near_any_content(options, scale):
    """Against what the start by mean angles and the fit without delta lose."""
    torch.manual_seed(0)
    model = tiny_model("llama", "rope", max_position_embeddings=512, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(2)
            elif "_norm.weight" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    expected = logits(model)
    text = tokens(4, 128)

    def loss(parameters):
        converted, _, _, errors = convert(model, "pope", {**parameters, "scale": scale}, text=lambda: text)
        return (logits(converted) - expected).square().mean().item() / expected.var().item(), errors

    fitted, errors = loss({})
    without_delta, larger = loss({"use_delta": False})
    aligned, none = loss({"magnitude": "relu"})
    assert none == {}
    assert max(errors.values()) < 0.3
    assert all(larger[index] > 1.5 * errors[index] for index in errors)
    assert fitted < without_delta / 1.5
    assert fitted < aligned / 1.5


@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=str)
def test_without_delta_pairs_that_do_not_turn_are_exact(options):
    rope = {"rope_type": "linear", "factor": 1e30, "rope_theta": 100.0}
    model = tiny_model("llama", "rope", rope_parameters=rope, **options)
    converted, added, _, errors = convert(model, "pope", {"use_delta": False}, text=lambda: tokens(4, 48))
    assert added == []
    assert max(errors.values()) < 1e-3
    torch.testing.assert_close(logits(converted), logits(model), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("use_delta", [True, False])
def test_the_errors_are_those_of_the_scores(monkeypatch, use_delta):
    """The share of the variance within a row, under the weights of its attention, that the fitted scores lose."""
    monkeypatch.setattr(polar_fit, "_INDEPENDENT", 0.0)
    torch.manual_seed(1)
    H, G, T, P = 2, 1, 24, 3
    query, key = torch.randn(1, H, T, 2 * P), torch.randn(1, G, T, 2 * P)
    query[..., 0] += 1
    frequencies = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    scaling = (2 * P) ** -0.5
    angles = torch.arange(T)[:, None] * frequencies.float()
    cos, sin = angles.cos(), angles.sin()

    def rotated(states):
        first, second = states.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    scores = polar_fit.Scores(frequencies, scaling)
    scores.add(query, key, rotated(query), rotated(key))
    found = polar_fit.fit(scores, 64, use_delta=use_delta)
    assert use_delta == bool(found.delta.any())
    skipped = polar_fit.SKIPPED
    assert scores.rows == T - skipped
    lost, whole = 0.0, 0.0
    for head, pair in itertools.product(range(H), range(P)):
        q, k = (
            torch.stack((one[0, index, :, pair], one[0, index, :, P + pair]), -1).double()
            for one, index in ((query, head), (key, 0))
        )
        distance = (torch.arange(T)[:, None] - torch.arange(T)) * frequencies[pair]
        rope = distance.cos() * (q @ k.T) + distance.sin() * (q[:, :1] * k[:, 1] - q[:, 1:] * k[:, 0])
        pope = sum(
            (q @ found.query[head, pair, c])[:, None]
            * (k @ found.key[0, pair, c])
            * (distance - found.delta[head, pair, c]).cos()
            for c in range(2)
        )
        logits = rotated(query)[0, head].double() @ rotated(key)[0, 0].double().T * scaling
        weights = logits.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        for row in range(skipped, T):
            for error in (rope - pope, rope):
                mean = (weights[row] * error[row]).sum()
                variance = (weights[row] * (error[row] - mean).square()).sum().item()
                if error is rope:
                    whole += variance
                else:
                    lost += variance
    assert 0 < found.error < (0.2 if use_delta else 0.5)
    assert found.error == pytest.approx(lost / whole, rel=1e-3)


def test_scaled_rope():
    """PoPE gets the scaled frequencies, and the attention factor of YaRN in its queries."""
    model = model_of_one_direction("llama", 8)
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    rope, pope = convert(model, "rope", rope_parameters=scaled), convert(model, "pope", rope_parameters=scaled)
    assert pope.model.config.max_position_embeddings == rope.model.config.max_position_embeddings == 64
    torch.testing.assert_close(logits(pope.model), logits(rope.model), rtol=5e-3, atol=5e-3)
    assert (logits(pope.model) - logits(model)).abs().max() > 0.02
    exact = convert(model, "pope", rope_parameters=scaled, exact=True)
    torch.testing.assert_close(logits(exact.model), logits(rope.model), rtol=1e-4, atol=1e-4)
    # The same from a source that is scaled already.
    again = convert(rope.model, "pope")
    torch.testing.assert_close(logits(again.model), logits(rope.model), rtol=5e-3, atol=5e-3)
    assert again.model.config.position_encoding_parameters == pope.model.config.position_encoding_parameters


def test_proportional_rope():
    """All channels are pairs, and those beyond the rotated part have the frequency 0."""
    rope = {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    model = tiny_model("llama", "rope", rope_parameters=rope)
    exact = convert(model, "pope", exact=True).model
    assert exact.config.position_encoding_parameters["frequencies"][5:] == pytest.approx([0.1**0.5, *[0] * 6])
    torch.testing.assert_close(logits(exact), logits(model), rtol=1e-4, atol=1e-4)


def test_frequencies_that_change_with_the_length(caplog):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    convert(tiny_model("llama", "rope", rope_parameters=rope), "pope")
    assert "rope_type='dynamic' changes the frequencies with the length of the text" in caplog.text


def test_rope_that_rotates_a_part():
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    model = tiny_model("llama", "rope", rope_parameters=rope)
    found = convert(model, "pope").model.config.position_encoding_parameters
    assert found["partial_rotary_factor"] == 0.5
    assert found["frequencies"] == pytest.approx([0.5, 0.5, 0.05, 0.05])
    fewer = convert(model, "pope", {"partial_rotary_factor": 0.25}).model.config.position_encoding_parameters
    assert fewer["frequencies"] == pytest.approx([0.5, 0.5])
    for factor in (0.75, 0.125):
        with pytest.raises(
            ValueError,
            match=rf"partial_rotary_factor={factor} .* it must give at least 2, at most 4, and a multiple of 2",
        ):
            convert(model, "pope", {"partial_rotary_factor": factor})


@pytest.mark.parametrize("parameters", [{}, {"magnitude": "relu"}], ids=str)
def test_rope_parameters_keep_the_pairs(parameters):
    """With another number of rotated channels, RoPE pairs other channels."""
    given = {"rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(ValueError, match=r"rope_parameters=.*'partial_rotary_factor': 0.5.* rotates 4 .* must be 8"):
        convert(tiny_model("llama", "rope"), "pope", parameters, rope_parameters=given)


@pytest.mark.parametrize("parameters", [{}, {"magnitude": "relu"}], ids=str)
def test_states_that_are_not_finite(parameters):
    model = tiny_model("llama", "rope")
    attention_of(model, 1).q_proj.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"queries or keys of layer 1 .* not finite"):
        convert(model, "pope", parameters)


@pytest.mark.parametrize(("name", "value"), [("theta", 300.0), ("frequencies", [1.0] * 8)])
def test_frequencies_are_those_of_rope(name, value):
    with pytest.raises(ValueError, match=rf"\['{name}'\]=.* is not valid: in place of RoPE, PoPE gets its frequencies"):
        convert(tiny_model("llama", "rope"), "pope", {name: value})


def test_layers_that_have_pope_keep_it():
    mixed = convert(tiny_model("llama", "rope"), ["rope", "pope"]).model
    whole = convert(mixed, "pope").model
    before, after = mixed.state_dict(), whole.state_dict()
    layer = [name for name in before if name.startswith("model.layers.1.")]
    assert len(layer) > 8
    assert all(torch.equal(before[name], after[name]) for name in layer)
    # Its own frequencies, of a model that was trained with it.
    with pytest.raises(
        ValueError, match="layers of the source have PoPE with other parameters than PoPE gets in place of its RoPE"
    ):
        convert(tiny_model("llama", ["rope", "pope"]), "pope")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("theta", [100.0, 1e30])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}], ids=["plain", "norms"])
def test_mean_angles_keep_pairs_of_one_positive_direction(family, rotated, theta, options):
    """With 1e30 all pairs but the first do not turn, and become plain channels. Positive lengths pass ReLU."""

    def lengths(first):
        return first.abs() + 1 if first.ndim == 2 else first * 0.02

    quarters = bool(options)
    model = model_of_one_direction(family, rotated, theta=theta, quarters=quarters, lengths=lengths, **options)
    polar = rotated // 2 if theta == 100.0 else 1
    converted, added, dropped, errors = convert(model, "pope", {"magnitude": "relu"})
    assert (dropped, errors) == ([], {})
    assert [name.rpartition("encodings.")[2] for name in added] == ["pope.delta.weight"] * 2
    found = converted.config.position_encoding_parameters
    assert found["partial_rotary_factor"] == polar / D
    assert found["frequencies"] == pytest.approx([theta ** (-2 * index / rotated) for index in range(polar)], rel=1e-5)
    torch.testing.assert_close(logits(converted), logits(model), rtol=1e-3, atol=1e-3)
    assert_angles_matter(converted, logits(model))


def test_pairs_that_turn_become_polar_with_softplus():
    rope = {"rope_type": "default", "rope_theta": 100.0}
    frequencies = [100.0 ** (-index / 4) for index in range(4)]
    for length, polar in ((512, 4), (64, 3), (20, 2), (2, 1)):
        model = tiny_model("llama", "rope", rope_parameters=rope, max_position_embeddings=length)
        found = convert(model, "pope", {"magnitude": "softplus"}).model.config.position_encoding_parameters
        assert found["partial_rotary_factor"] == polar / 8
        assert found["frequencies"] == pytest.approx(frequencies[:polar])
        assert polar == max(1, sum(frequency * length >= 2 * math.pi for frequency in frequencies))


def test_without_delta_queries_turn_with_their_keys():
    model = tiny_model("llama", "rope")
    converted, added, *_ = convert(model, "pope", {"use_delta": False, "magnitude": "relu"})
    assert added == []
    polar = int(converted.config.position_encoding_parameters["partial_rotary_factor"] * 8)
    before, after = attention_of(model, 0), attention_of(converted, 0)
    # The lengths of the pairs of keys are kept, and the plain channels of both.
    old, new = before.k_proj.weight.view(2, 8, -1), after.k_proj.weight.view(2, 8, -1)
    squares = old[:, :polar].square() + old[:, 4 : 4 + polar].square()
    torch.testing.assert_close(new[:, :polar].square() + new[:, polar : 2 * polar].square(), squares)
    query = after.q_proj.weight.view(4, 8, -1)
    assert (query[:, polar : 2 * polar] == 0).all()
    torch.testing.assert_close(
        query[:, 2 * polar :], before.q_proj.weight.view(4, 8, -1)[:, [*range(polar, 4), *range(4 + polar, 8)]]
    )


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True, "num_key_value_heads": 1}], ids=str)
def test_exact(rotated, fields):
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": rotated / D}
    model = tiny_model("llama", "rope", rope_parameters=rope, **fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    text = {"text": lambda: pytest.fail("there is nothing to fit")}
    for scale in ("1/sqrt(d)", "1/sqrt(2d)"):
        converted, added, dropped, errors = convert(model, "pope", {"scale": scale}, **text, exact=True)
        assert (dropped, errors) == ([], {})
        assert {name.rpartition("encodings.")[2] for name in added} == {"pope.delta.weight"}
        config = converted.config
        assert config.head_dim == D + rotated // 2
        assert len(config.position_encoding_parameters["frequencies"]) == 3 * rotated // 2
        torch.testing.assert_close(logits(converted), logits(model), rtol=1e-4, atol=1e-4)
    generated = converted.generate(tokens(1, 8), max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, model.generate(tokens(1, 8), max_new_tokens=4, do_sample=False))
    assert_angles_matter(converted, logits(model))


def test_exact_is_refused():
    for family, new, parameters, fields, said in (
        ("llama", ["rope", "pope"], {}, {}, "does not change all layers from RoPE to PoPE"),
        ("llama", "cope", {}, {}, "does not change all layers"),
        ("gpt2", "pope", {}, {}, "the width of heads cannot be changed in the GPT-2 family"),
        ("llama", "pope", {}, {"qk_norm": True}, "the source has qk_norm=True"),
        ("llama", "pope", {"magnitude": "softplus"}, {}, r"\['magnitude'\]='softplus' .* exact=True needs 'identity'"),
        ("llama", "pope", {"use_delta": False}, {}, r"\['use_delta'\]=False .* exact=True needs True"),
        ("llama", "pope", {"partial_rotary_factor": 0.5}, {}, "it gives 6 polar channels of 12.* it must give 12"),
    ):
        with pytest.raises(ValueError, match=said):
            convert(tiny_model(family, "rope", **fields), new, parameters, exact=True)
    for source in ("cope+rope", ["rope", "fox+rope"]):
        with pytest.raises(ValueError, match="exact=True is not valid: layers of the source have more than RoPE"):
            convert(tiny_model("llama", source), "pope", exact=True)


@pytest.mark.parametrize("width", [22, 64, 80, 176])
def test_shares_give_their_number_of_channels(width):
    assert all(int(width * encoding._share(polar, width)) == polar for polar in range(1, width + 1))


def test_the_calibration_file(tmp_path, capsys):
    config = transformers.LlamaConfig(**{**LLAMA, "vocab_size": 258})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    build_tokenizer("bytes").save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text("A text of the user's own. " * 40)
    (tmp_path / "short.txt").write_text("Too short.")

    def run(name, file, new="pope"):
        options = ["--position-encoding", new, "--calibration-file", str(tmp_path / file)]
        cli.main(["convert", str(tmp_path / "source"), *options, "--output", str(tmp_path / name)])
        return json.loads((tmp_path / name / "conversion.json").read_text())

    record = run("own", "text.txt")
    assert "PoPE's fit to RoPE loses " in capsys.readouterr().out
    assert record["fit_errors"].keys() == {"0", "1"}
    assert all(0 < error < 0.5 for error in record["fit_errors"].values())
    assert len(record["calibration_sha256"]) == 64
    cli.main(
        ["convert", str(tmp_path / "source"), "--position-encoding", "pope", "--output", str(tmp_path / "default")]
    )
    default = json.loads((tmp_path / "default/conversion.json").read_text())
    assert default["calibration_sha256"] is None
    assert default["fit_errors"] != record["fit_errors"]
    refused = {
        "short.txt": ("pope", "10 tokens, 0 of them unknown words. Allowed: at least 256 tokens, at most a tenth of"),
        "text.txt": ("cope", "text.txt' has no effect: no layer is fitted"),
        "missing.txt": ("pope", "missing.txt' is not valid: it must be a text file"),
    }
    for file, (new, said) in refused.items():
        with pytest.raises(SystemExit) as exit_:
            run(f"refused {file}", file, new)
        assert said in f"{exit_.value.code} {capsys.readouterr().err}"
        assert not (tmp_path / f"refused {file}/config.json").exists()


def test_a_vocabulary_without_text(tmp_path, refused):
    """Its tokenizer has no token for unknown words."""
    tokenizer = build_tokenizer("jsb")
    tiny_model("llama", "rope", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text("A text of the user's own. " * 40)
    given = ["convert", str(tmp_path / "source"), "--position-encoding", "pope", "--output", str(tmp_path / "output")]
    said = refused(*given, "--calibration-file", str(tmp_path / "text.txt"))
    assert "text.txt' is not valid: the model's tokenizer does not read it: WordLevel error" in said
    assert convert_folder(str(tmp_path / "source"), tmp_path / "output", "pope").errors.keys() == {0, 1}
