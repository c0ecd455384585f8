"""Analyses of checkpoints: against loops over tokens and channels; figures, the page's data and the command line."""

import base64
import hashlib
import itertools
import json
import math
import os
import pathlib
import re

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from safetensors.torch import load_file

from oracles import contextual_positions, rope_rotation
from tiny import slow_but, tiny_model
from whatwhere.scripts.analysis import deltas, frequencies, maps, page
from whatwhere.scripts.analysis.layers import attention_layers
from whatwhere.scripts.analysis.texts import PROSE, token_texts
from whatwhere.scripts.commands import analysis as script
from whatwhere.scripts.data.sonnets import sonnets
from whatwhere.scripts.data.tokenize import build_tokenizer
from whatwhere.scripts.evaluation.checkpoints import Loading

TEXT = "One, two.\n== Three ==\nfour\n"
LENGTH = 14


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer("bytes")


def model_of(family, encoding, parameters=None, **fields):
    implementation = fields.pop("implementation", "eager")
    return tiny_model(
        family, encoding, implementation, vocab_size=258, position_encoding_parameters=parameters, **fields
    )


@torch.no_grad()
def projections(model, ids, layer):
    """Queries (H, T, D), keys and values (G, T, D) before any position encoding, and the layer's input, in float64."""
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[layer]
    if hasattr(model, "transformer"):
        block = model.transformer.h[layer]
        hidden = block.ln_1(hidden)
        states = block.attn.c_attn(hidden).split(block.attn.split_sizes, dim=2)
        attention = block.attn
    else:
        block = model.model.layers[layer]
        hidden = block.input_layernorm(hidden)
        attention = block.self_attn
        states = [getattr(attention, f"{name}_proj")(hidden) for name in "qkv"]
    query, key, value = (one[0].unflatten(-1, (-1, attention.head_dim)).transpose(0, 1).double() for one in states)
    return query, key, value, hidden[0].double(), attention


# Frequencies


def text_ids(tokenizer, text):
    return tokenizer(text, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("encoding", "parameters", "fields", "rotated"),
    [
        ("rope", None, {}, 8),
        ("rope", None, {"partial_rotary_factor": 0.5}, 4),
        ("cope+rope", None, {}, 8),
        ("pope", None, {}, 8),
        ("pope", {"partial_rotary_factor": 0.5, "scale": "1/sqrt(2d)"}, {}, 4),
        ("pope", {"magnitude": "identity"}, {}, 8),
    ],
    ids=["rope", "half rope", "cope+rope", "pope", "half pope", "raw pope"],
)
def test_norms_equal_loops_over_tokens_and_channels(tokenizer, family, encoding, parameters, fields, rotated):
    if fields:
        fields = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **fields}}
    model = model_of(family, encoding, parameters, implementation=None, **fields)
    texts = ["To be", "or not to be"]
    found = frequencies.measure(model, tokenizer, texts)
    assert found["layers"] == [0, 1]
    assert found["tokens"] == len("".join(texts))
    polar = encoding == "pope"
    count = rotated if polar else rotated // 2
    expected = [10000.0 ** (-c / count) for c in range(count)]
    assert found["frequencies"] == pytest.approx(expected, rel=1e-5)
    for layer in (0, 1):
        for side, which in ((found["queries"], 0), (found["keys"], 1)):
            norms = [0.0] * count
            for text in texts:
                states = projections(model, text_ids(tokenizer, text), layer)[which]
                heads, length, _ = states.shape
                for head in range(heads):
                    for token in range(length):
                        x = states[head, token].tolist()
                        for c in range(count):
                            if not polar:
                                norm = math.hypot(x[c], x[count + c])
                            elif parameters == {"magnitude": "identity"}:
                                norm = abs(x[c])
                            else:
                                norm = math.log1p(math.exp(x[c]))
                            norms[c] += norm / (heads * length * len(texts))
            assert side[layer] == pytest.approx(norms, rel=1e-4)
    # Nothing of the measurement stays in the model.
    assert not any("rotate" in vars(part) for layer in attention_layers(model) for part in layer.modules())


def test_summaries_of_norms():
    norms = torch.tensor([[4.0, 0, 0, 0, 0, 0, 0, 0], [1.0] * 8], dtype=torch.float64)
    entry = frequencies.usage("pope", torch.ones(8), [0, 1], norms, norms.flip(1), 5)
    assert entry["queries_highest_quarter"] == [1.0, 0.25]
    assert entry["keys_highest_quarter"] == [0.0, 0.25]
    assert entry["wavelengths"] == pytest.approx([2 * math.pi] * 8)


def test_channels_that_do_not_turn(tmp_path):
    """The frequency 0, as of proportional RoPE and a PoPE that was made from it, has no wavelength."""
    model = model_of("llama", "pope", {"frequencies": [0.5] * 4 + [0.0] * 4})
    (layer, *_), norms = attention_layers(model), torch.ones(1, 8)
    radians = model.base_model.shared_encodings["pope"].frequencies(torch.arange(2))
    expected = [*[pytest.approx(4 * math.pi)] * 4, *[None] * 4]
    for entry in (frequencies.usage("pope", radians, [layer.layer_idx], norms, norms, 5), deltas.read(model)):
        assert entry["wavelengths"] == expected
        json.dumps(entry, allow_nan=False)
    deltas.draw({"name": NAME, **entry}, tmp_path / "deltas")
    assert "∞" in (tmp_path / "deltas.svg").read_text(encoding="utf-8")


def test_the_sonnets():
    poems = sonnets()
    assert [len(text.split("\n")) for text in poems] == [14] * 10
    assert poems[0].startswith("From fairest creatures we desire increase,\n")
    assert poems[9].endswith("That beauty still may live in thine or thee.")


# Deltas


def test_deltas_are_what_the_model_uses():
    model = model_of("gpt2", "pope", {"partial_rotary_factor": 0.5})
    weights = [layer.encodings["pope"].delta.weight for layer in attention_layers(model)]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.linspace(-8, 1, weight.numel()).view_as(weight))
    entry = deltas.read(model)
    expected = [-abs(-2 * math.pi + abs(x + 2 * math.pi)) for x in torch.linspace(-8, 1, 16).tolist()]
    assert np.array(entry["deltas"]).shape == (2, 4, 4)
    assert np.array(entry["deltas"][1]).flatten().tolist() == pytest.approx(expected)
    assert entry["at_bounds"] == 0
    assert entry["outside"] == np.mean([not -2 * math.pi <= x <= 0 for x in torch.linspace(-8, 1, 16).tolist()])
    assert entry["largest"] == pytest.approx(max(expected), abs=1e-5)
    assert entry["delta_init"] == "zeros"


def test_a_model_without_deltas_is_refused():
    with pytest.raises(ValueError, match=r"'use_delta'\]=False"):
        deltas.read(model_of("llama", "pope", {"use_delta": False}))


# Maps


def gate_logits(model, ids, layer, encoding, parameters):
    """What opens the gates, (H, T, T), and the content logits, both float64, from the layer's weights."""
    query, key, value, hidden, attention = projections(model, ids, layer)
    scale = attention.head_dim**-0.5
    groups = query.shape[0] // key.shape[0]
    part = attention.encodings
    gate = None
    if parameters.get("gates") == "separate_key":
        gate = torch.nn.functional.linear(hidden, part["cope"].gate_key.weight.double())
        gate = gate.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
    elif parameters.get("gates") == "value":
        gate = value

    def turned(states):
        if "rope" not in encoding:
            return states
        rows = [[rope_rotation(x, t, 10000.0, attention.head_dim) for t, x in enumerate(head)] for head in states]
        return torch.stack([torch.stack(row) for row in rows])

    before = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * scale
    query = turned(query)

    def logits(states):
        return query @ turned(states).repeat_interleave(groups, 0).transpose(1, 2) * scale

    content = logits(key)
    if parameters.get("gates") == "unrotated_key":
        return before, content, query
    return content if gate is None else logits(gate), content, query


CASES = [
    ("cope", {"num_positions": 5}),
    ("cope", {"gates": "separate_key"}),
    ("cope", {"gates": "value", "num_positions": 4, "scale_positions": True}),
    ("cope", {"share_across_layers": True, "every_n_layers": 2}),
    ("cope+rope", {"cope": {"gates": "separate_key"}}),
    ("cope+rope", {"cope": {"gates": "unrotated_key"}}),
    ("cope+alibi", {}),
    ("cope+relative", {}),
    ("cope_alibi", {"slopes": "learned"}),
    ("cope_mlp", {"num_positions": 6, "layers": "first"}),
    ("token_gated_cope", {"num_positions": 6}),
    ("token_gated_cope+rope", {}),
]


@pytest.mark.parametrize(("encoding", "parameters"), CASES, ids=lambda value: str(value).strip("{}"))
@torch.no_grad()
def test_maps_equal_loops_over_tokens(tokenizer, encoding, parameters):
    family = "gpt2" if len(parameters) % 2 else "llama"
    model = model_of(family, encoding, parameters)
    ids = text_ids(tokenizer, TEXT)[:, :LENGTH]
    found = maps.measure(model, ids, list(TEXT[:LENGTH]))
    one_layer = parameters.get("every_n_layers") == 2 or parameters.get("layers") == "first"
    assert found.layers == ([0] if one_layer else [0, 1])
    assert found.heads == [0, 1, 2, 3]
    own = parameters.get(encoding.split("+")[0], parameters)
    last = math.inf if found.last is None else found.last
    assert (last < 6) == ("num_positions" in own)
    attentions = model(input_ids=ids, output_attentions=True).attentions
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for row, layer in enumerate(found.layers):
        opening, content, query = gate_logits(model, ids, layer, encoding, own)
        attention = attention_layers(model)[layer]
        for head in range(4):
            gates, positions = found.gates[row, head].double(), found.positions[row, head].double()
            if encoding.startswith("token_gated"):
                gate = attention.encodings["token_gated_cope"].gate
                states = projections(model, ids, layer)[3]
                opened = torch.sigmoid(states @ gate.weight[head].double() + gate.bias[head].double())
                for i in range(LENGTH):
                    total = 0.0
                    for j in range(i + 1):
                        total += opened[j].item()
                        assert gates[i, j].item() == pytest.approx(opened[j].item(), abs=1e-5)
                        assert positions[i, j].item() == pytest.approx(min(total, last), abs=1e-4)
            else:
                expected = torch.sigmoid(opening[head]).masked_fill(hidden, 0)
                torch.testing.assert_close(gates, expected, rtol=0, atol=2e-5)
                for i in range(LENGTH):
                    oracle = torch.stack(contextual_positions(list(opening[head, i, : i + 1]), last))
                    torch.testing.assert_close(positions[i, : i + 1], oracle, rtol=0, atol=1e-4)
            # What is left of the model's weights without the content is the attention by position alone.
            alone = attentions[layer][0, head].double() / content[head].exp()
            alone = (alone / alone.amax(-1, keepdim=True)).masked_fill(hidden, 0)
            torch.testing.assert_close(found.position_attention[row, head].double(), alone, rtol=1e-3, atol=1e-4)
            if encoding == "cope":
                # The positions that are shown are those that the module looks up.
                part = attention.encodings["cope"]
                table = (model.base_model.shared_encodings["cope"] if part.table is None else part).table.weight
                z = query[head] @ table.double() * (attention.scaling if own.get("scale_positions", False) else 1)
                floor = positions.long()
                ceil = (floor + 1).clamp(max=table.shape[1] - 1)
                z = z.gather(1, floor) + (positions - floor) * (z.gather(1, ceil) - z.gather(1, floor))
                z = z.masked_fill(hidden, -math.inf)
                torch.testing.assert_close((z - z.amax(1, keepdim=True)).exp(), alone, rtol=2e-3, atol=1e-4)
    for kind in maps.KINDS:
        assert not getattr(found, kind)[..., hidden].any()
    torch.testing.assert_close(found.attention, torch.stack([attentions[layer][0] for layer in found.layers]))
    assert not any("bias" in vars(layer.encodings) for layer in attention_layers(model))


def test_layers_and_heads_are_chosen(tokenizer):
    model = model_of("llama", "cope")
    ids = text_ids(tokenizer, TEXT)[:, :LENGTH]
    everything = maps.measure(model, ids, list(TEXT[:LENGTH]))
    some = maps.measure(model, ids, list(TEXT[:LENGTH]), layers=[1], heads=[3, 0])
    assert (some.layers, some.heads) == ([1], [0, 3])
    for kind in maps.KINDS:
        assert torch.equal(getattr(some, kind)[0], getattr(everything, kind)[1, [0, 3]])
    sparse = model_of("llama", "cope", {"every_n_layers": 2})
    with pytest.raises(ValueError, match=r"layers=\[1\] is not valid: 1 is not one of \[0\]"):
        maps.measure(sparse, ids, list(TEXT[:LENGTH]), layers=[1])


def test_boundaries():
    tokens = ["\n", " =", " Title", " =", " \n", " a", " =", " b", "\n\n", "==", "More", "==", "\n", "= no\n", "x"]
    expected = ["newline", "heading", "", "", "newline", "", "", "", "newline", "heading", "", "", "newline", "newline"]
    assert maps.boundaries(tokens) == [*expected, ""]


def test_summary_of_maps():
    gates = torch.tensor([[0.5, 0, 0], [0.25, 1.0, 0], [0.0, 0.5, 0.75]])[None, None]
    zeros = torch.zeros(1, 1, 3, 3)
    positions = torch.tensor([[1.0, 0, 0], [2.0, 1, 0], [6.0, 1, 1]])[None, None]
    found = maps.Maps("cope", list("a\nb"), ["", "newline", ""], [4], [2], 63, gates, positions, zeros, zeros)
    (entry,) = found.summary()
    assert entry == {
        "layer": 4,
        "head": 2,
        "gate": 0.5,
        "gate_newline": 0.75,
        "gate_heading": None,
        "gate_other": 0.375,
        # The squares of the six differences from the mean sum to 5/8.
        "gate_deviation": pytest.approx((5 / 48) ** 0.5),
        "first_position": 3.0,
    }
    assert maps.table([entry]).splitlines()[2] == "| 4 | 2 | 0.500 | 0.750 |  | 0.375 | 0.323 | 3.000 |"


@pytest.mark.parametrize("of_query", [False, True])
def test_the_most_selective_head_is_that_whose_gates_differ_most(of_query):
    """Also if they depend on the query alone."""
    length = 40
    by_key = (torch.arange(length) % 4 == 0).float().expand(length, length)
    steep, flat = 0.2 + 0.6 * by_key, 0.2 + 0.5 * by_key
    steep, flat = (steep.T, flat) if of_query else (steep, flat.T)
    gates = torch.stack([torch.ones(length, length), 0.5 + 0.1 * by_key, flat, steep])[None].tril()
    zeros = torch.zeros(1, 4, length, length)
    found = maps.Maps("cope", ["a"] * length, [""] * length, [3], [1, 4, 5, 7], 63, gates, zeros, zeros, zeros)
    entry = found.most_selective()
    assert (entry["layer"], entry["head"]) == (3, 7)
    assert entry["gate_deviation"] == pytest.approx(0.26, abs=0.02)


def test_text_of_tokens(tokenizer):
    """A character of several tokens is the first one's; spaces that a tokenizer drops belong to the next token."""
    assert token_texts(tokenizer, "a é\n") == ["a", " ", "é", "", "\n"]

    class Trimmed:
        """Begins with a special token, and has words without their spaces."""

        def __call__(self, text, **_):
            return {"input_ids": [0, 1, 2], "offset_mapping": [(0, 0), (0, 3), (4, 7)]}

        def convert_ids_to_tokens(self, ids):
            return ["<s>", "the", "end"]

    assert token_texts(Trimmed(), "the end") == ["<s>", "the", " end"]


# The page


def some_maps(length=5, layers=2, heads=3, tokens=None):
    generator = torch.Generator().manual_seed(5)
    values = [torch.rand(layers, heads, length, length, generator=generator).tril() for _ in range(4)]
    values[1] *= 37.5
    tokens = tokens or [f"t{index}" for index in range(length)]
    names = ("gates", "positions", "position_attention", "attention")
    return maps.Maps(
        encoding="cope",
        tokens=tokens,
        boundaries=maps.boundaries(tokens),
        layers=list(range(layers)),
        heads=list(range(heads)),
        last=63,
        **dict(zip(names, values)),
    )


def test_the_page_holds_the_maps_and_nothing_that_breaks_out():
    tokens = ["</script><script>alert(1)</script>", "<!--", '"&', "\u2028\n", "{{data}}"]
    found = some_maps(tokens=tokens)
    content = page.page(found, name="<b>{{data}}", text="<i>{{title}}")
    assert content.count("<script") == content.count("</script>") == 2
    assert "<title>&lt;b&gt;{{data}}: what it counts</title>" in content
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', content, flags=re.DOTALL)[1]
    assert "<" not in text
    data = json.loads(text)
    assert data["tokens"] == tokens
    values = np.frombuffer(base64.b64decode(data["values"]), "<u2").reshape(4, 2, 3, 15)
    rows, columns = np.tril_indices(5)
    for kind, stored in zip(data["kinds"], values):
        expected = getattr(found, kind["key"]).numpy()[:, :, rows, columns]
        np.testing.assert_allclose(stored / data["steps"] * kind["scale"], expected, atol=0.51 * kind["scale"] / 65535)
    # The policy allows this script, and nothing from elsewhere.
    code = re.search(r'<script id="code">(.*?)</script>', content, flags=re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in content
    assert not re.search(r"https?:|//[a-z]+\.", content.replace(text, ""))


def test_a_page_that_is_too_large_is_refused():
    big = torch.zeros(1).expand(12, 12, 512, 512)
    large = maps.Maps("cope", ["a"] * 512, [""] * 512, list(range(12)), list(range(12)), 63, big, big, big, big)
    with pytest.raises(ValueError, match=r"512 tokens, 12 layers and 12 heads has 192 MiB; allowed: 24.*--layers"):
        page.page(large, name="big", text="a")


# Figures and commands


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tokenizer):
    root = tmp_path_factory.mktemp("checkpoints")
    for name, encoding in {"rope": "rope", "pope": "pope", "cope": "cope", "plan": ["rope", "cope"]}.items():
        model_of("llama", encoding, num_hidden_layers=2).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def test_figures_of_the_same_numbers_are_the_same_bytes(tmp_path):
    found = some_maps(layers=1, heads=2, tokens=["a$b", "\n", "<x>", " ", "é"])
    for turn in ("first", "second"):
        maps.draw(found, "gates", tmp_path / turn / "gates", name="tiny", text="a.txt")
        one = some_maps(layers=1, heads=1, tokens=found.tokens)
        maps.draw(one, "attention", tmp_path / turn / "one", name="tiny", text="a.txt")
        usage = frequencies.usage("rope", torch.logspace(0, -3, 6), [0, 3], torch.rand(2, 6), torch.rand(2, 6), 9)
        if turn == "first":
            entry = {"name": "tiny", **usage}
        frequencies.draw([entry], tmp_path / turn / "frequencies", text="a.txt")
    first, second = (sorted((tmp_path / turn).iterdir()) for turn in ("first", "second"))
    assert [path.name for path in first] == [
        f"{name}.{ending}" for name in ("frequencies", "gates", "one") for ending in ("png", "svg")
    ]
    for one, other in zip(first, second):
        assert one.read_bytes() == other.read_bytes()


@pytest.fixture
def figures(monkeypatch):
    """The figures that would be saved, by the name of their files."""
    saved = {}
    monkeypatch.setattr("whatwhere.scripts.evaluation.figures.save_png", lambda figure, path, palette: None)
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: saved.update({pathlib.Path(path).stem: figure}))
    return saved


def check_texts_are_inside(figure):
    """Every text that is seen is whole on the canvas, and legends and title are clear of the panels."""
    FigureCanvasAgg(figure).draw()
    renderer = figure.canvas.get_renderer()
    width, height = figure.canvas.get_width_height()
    # Ticks outside the limits of an axis keep their texts, but are not drawn.
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        outside = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
        hidden |= {label for tick in outside for label in (tick.label1, tick.label2)}
    for text in figure.findobj(Text):
        if text not in hidden and text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(renderer)
            inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
            assert inside, (text.get_text(), box, width, height)
    panels = [axes.get_tightbbox(renderer) for axes in figure.axes]
    for one in (*figure.legends, *figure.texts):
        assert not one.get_window_extent(renderer).count_overlaps(panels), one


def test_help_explains_every_column_and_file(capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    text = capsys.readouterr().out
    usage = frequencies.usage("rope", torch.ones(2), [0], torch.ones(1, 2), torch.ones(1, 2), 1)
    own = deltas.read(model_of("llama", "pope"))
    (summary,) = some_maps(layers=1, heads=1).summary()
    for word in (*usage, *own, *summary, *maps.KINDS, "boundaries", "token_ids", "last_position", "summary"):
        assert re.search(rf"\b{word}\b", text), word


NAME = "a_name_that_is_as_long_as_those_of_runs_with_many_words_in_them"


@pytest.mark.parametrize(
    ("layers", "heads", "length", "kind"),
    [
        (1, 1, 4, "attention"),
        (1, 1, 300, "positions"),
        (1, 7, 5, "attention"),
        (2, 3, 40, "positions"),
        (6, 1, 5, "attention"),
    ],
)
def test_maps_have_labels_that_are_whole(tmp_path, figures, layers, heads, length, kind):
    tokens = ["\n", "== T ==", "a_very_long_token_$", *(f"t{index}" for index in range(3, length))]
    found = some_maps(length, layers, heads, tokens=tokens)
    maps.draw(found, kind, tmp_path / "map", name=NAME, text="a.txt")
    figure = figures["map"]
    check_texts_are_inside(figure)
    axes, bar = figure.axes
    assert bar.get_ylabel() == {"positions": "contextual positions"}.get(kind, "weight / largest weight of the row")
    if layers * heads > 1:
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(index) for index in range(heads)]
        assert [label.get_text() for label in axes.get_yticklabels()] == [str(index) for index in range(layers)]
    elif length <= maps.LABELLED:
        assert [label.get_text() for label in axes.get_xticklabels()] == [maps.printable(token) for token in tokens]
    # The maps side by side, with nothing where a key is hidden.
    step = length + max(1, length // 16)
    drawn = np.asarray(axes.images[0].get_array().filled(np.nan))
    for layer, head in itertools.product(range(layers), range(heads)):
        expected = getattr(found, kind)[layer, head]
        if kind == "attention":
            expected = expected / expected.amax(-1, keepdim=True)
        expected = expected.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), torch.nan)
        panel = drawn[layer * step :, head * step :][:length, :length]
        np.testing.assert_allclose(panel, expected.numpy(), rtol=1e-5)


def test_a_map_of_many_tokens_is_not_drawn_ever_larger(tmp_path, figures):
    sizes = []
    for length in (257, 600):
        maps.draw(some_maps(length, 1, 1), "gates", tmp_path / "map", name="tiny", text="a.txt")
        sizes.append(figures["map"].get_size_inches().tolist())
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) < 12


@pytest.mark.parametrize("count", slow_but([1, 32], [1, 4, 16, 32]))
def test_frequencies_and_deltas_have_labels_and_regular_ticks(tmp_path, figures, count):
    norms = torch.rand(3, count, generator=torch.Generator().manual_seed(0))
    radians = 10000 ** -(torch.arange(count) / count)
    entry = {"name": NAME, **frequencies.usage("pope", radians, [0, 1, 2], norms, norms, 9)}
    frequencies.draw([entry, entry], tmp_path / "frequencies", text="a.txt")
    # One value among few, and very many at a bound.
    for heads in (1, 12):
        turned = torch.zeros(3, heads, count).index_fill(0, torch.tensor([1]), -1.0)
        deltas.draw({**entry, "deltas": turned.tolist()}, tmp_path / f"deltas {heads}")
    for name, figure in figures.items():
        check_texts_are_inside(figure)
        bars = [axes for axes in figure.axes if axes.get_label() == "<colorbar>"]
        assert {axes.get_ylabel() for axes in bars} == {"mean norm" if name == "frequencies" else "delta (radians)"}
        for axes in (axes for axes in figure.axes if axes.images):
            assert axes.get_xlabel().startswith("layer")
            assert axes.get_ylabel() == "wavelength (tokens)"
            ticks = axes.get_yticks().tolist()
            assert len(ticks) <= 8
            assert ticks == list(range(0, count, max(1, count // 8)))
    assert figures["deltas 1"].axes[0].get_xlabel() == "layer, 1 head each"


def loaded(folder):
    loading, config = Loading(), Loading().config(str(folder))
    return loading.model(str(folder), config), loading.tokenizer(str(folder), config)


def test_frequencies_from_the_command_line(checkpoints, tmp_path, capsys):
    """Documents are those of training: a line of a jsonl file."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"body": "To be,\\nor not"}\n{"body": ""}\n{"body": "to be"}\n')
    arguments = ["frequencies", *(str(checkpoints / name) for name in ("rope", "pope")), "--output", str(tmp_path)]
    script.main([*arguments, "--validation-file", str(texts), "--text-field", "body"])
    printed = capsys.readouterr().out
    assert "| pope | keys | 0." in printed
    assert "Text: texts.jsonl, 2 documents." in printed
    assert "text: texts.jsonl" in (tmp_path / "frequencies.svg").read_text()
    content = json.loads((tmp_path / "frequencies.json").read_text())
    assert content["texts"]["count"] == 2
    assert content["texts"]["source"] == "texts.jsonl"
    assert [entry["name"] for entry in content["checkpoints"]] == ["rope", "pope"]
    assert [entry["tokens"] for entry in content["checkpoints"]] == [len("To be,\nor not") + len("to be")] * 2
    assert content["command"].startswith("whatwhere analysis frequencies ")
    model, tokenizer = loaded(checkpoints / "pope")
    expected = frequencies.measure(model, tokenizer, ["To be,\nor not", "to be"])
    assert content["checkpoints"][1]["keys"] == expected["keys"]
    assert {"frequencies.png", "frequencies.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_deltas_from_the_command_line(checkpoints, tmp_path, capsys):
    script.main(["deltas", str(checkpoints / "pope"), "--output", str(tmp_path)])
    assert "delta: mean -" in capsys.readouterr().out
    content = json.loads((tmp_path / "deltas.json").read_text())
    assert content["deltas"] == deltas.read(loaded(checkpoints / "pope")[0])["deltas"]
    assert {"deltas.png", "deltas.svg"} <= {path.name for path in tmp_path.iterdir()}


def test_maps_from_the_command_line(checkpoints, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    chosen = ["--validation-file", str(text), "--tokens", "9", "--layers", "1", "--heads", "0,2-3"]
    script.main(["maps", str(checkpoints / "cope"), *chosen, "--output", str(tmp_path)])
    assert "| 1 | 3 | 0." in capsys.readouterr().out
    content = json.loads((tmp_path / "maps.json").read_text())
    assert "".join(content["tokens"]) == TEXT[:9]
    assert (content["layers"], content["heads"]) == ([1], [0, 2, 3])
    assert len(content["summary"]) == 3
    assert load_file(tmp_path / "maps.safetensors")["positions"].shape == (1, 3, 9, 9)
    figures = {f"{kind}.{ending}" for kind in maps.KINDS for ending in ("png", "svg")}
    assert {path.name for path in tmp_path.iterdir()} == figures | {
        "maps.html",
        "maps.json",
        "maps.safetensors",
        "text.txt",
    }


def opened(folder):
    """The text that the page of a folder is about, what the page says of it, and where the page opens."""
    text = re.search(r'id="data">(.*?)</script>', (folder / "maps.html").read_text(), flags=re.DOTALL)[1]
    data = json.loads(text)
    return "".join(data["tokens"]), data["text"], (data["layers"][data["first"][0]], data["heads"][data["first"][1]])


def test_without_a_text_an_article_is_read(checkpoints, tmp_path, capsys):
    # Figures take a second for each head.
    few = ["--tokens", "40", "--layers", "1", "--heads", "1-2"]
    script.main(["maps", str(checkpoints / "cope"), *few, "--output", str(tmp_path)])
    text, about, first = opened(tmp_path)
    assert about == json.loads((tmp_path / "maps.json").read_text())["text"] == "prose.txt"
    printed = capsys.readouterr().out
    assert "Text: prose.txt." in printed
    assert f"The page opens at layer {first[0]}, head {first[1]}, " in printed
    assert PROSE.read_text().startswith(text)


def test_mistakes(checkpoints, tmp_path, refuses):
    table = (
        ("frequencies", "", "cannot be loaded"),
        ("frequencies", "cope", "position_encoding='cope' has no frequencies"),
        *((name, "plan", "position_encoding=['rope', 'cope'] has no ") for name in ("frequencies", "deltas", "maps")),
        ("frequencies", "rope", "--validation-file", "nowhere.txt", "nowhere.txt"),
        ("frequencies", "rope", "--text-field", "body", "text_field='body' has no effect"),
        ("deltas", "rope", "position_encoding='rope' has no learned phase shifts"),
        ("maps", "rope", "position_encoding='rope' has no contextual positions"),
        ("maps", "cope", "--tokens", "1", "tokens=1 is not valid"),
        ("maps", "cope", "--validation-file", os.devnull, "validation_file='/dev/null' is not valid"),
        ("maps", "cope", "--layers", "0-x", "--layers"),
        ("maps", "cope", checkpoints / "pope", "maps takes one CHECKPOINT"),
        ("maps", "cope", "--heads", "7", "heads=[7] is not valid: 7 is not one of [0, 1, 2, 3]"),
    )
    refuses("analysis", [(name, checkpoints / folder, *row) for name, folder, *row in table], "--output", tmp_path)
    assert not list(tmp_path.iterdir())
