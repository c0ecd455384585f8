"""What figures share: colours and markers of systems, ticks, and files of the same bytes."""

import itertools
import json
import pathlib

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgba_array

from whatwhere.scripts.evaluation import figures
from whatwhere.scripts.evaluation.length_report import figure_of
from whatwhere.scripts.reproduction import conversion_table, drawing

ROOT = pathlib.Path(__file__).parent.parent


def test_no_two_systems_look_the_same():
    known = list(figures.ENCODINGS)
    styles = figures.line_styles([*known, *known, *[None] * 8, ["rope", "cope"], "alibi"])
    looks = [(style["color"], style.get("linestyle")) for style in styles]
    assert len(set(looks)) == len(looks) == 26
    # More lines than a figure has in practice, without a colour twice.
    colours = [style["color"] for style in figures.line_styles([*known, *[None] * len(figures.OTHERS)])]
    assert len(set(colours)) == len(colours) == 16


def test_an_encoding_looks_the_same_in_any_company():
    for order in itertools.permutations(["cope", "pope", None, "pope"]):
        styles = figures.line_styles(order)
        first = dict(reversed(list(zip(order, styles))))
        for encoding in ("cope", "pope"):
            assert (first[encoding]["color"], first[encoding]["marker"]) == figures.ENCODINGS[encoding]


def test_lines_above_are_thinner():
    styles = figures.line_styles(["rope", "rope", None, "none"])
    for below, above in itertools.pairwise(styles):
        assert above["zorder"] > below["zorder"]
        assert above["linewidth"] < below["linewidth"]
        assert above["markersize"] < below["markersize"]


@pytest.mark.parametrize(
    ("scale", "low", "high", "expected"),
    [
        ("linear", 0, 20000, ["0", "2,500", "5,000", "7,500", "10,000", "12,500", "15,000", "17,500", "20,000"]),
        ("linear", 0.52, 2.1, ["0.6", "0.8", "1.0", "1.2", "1.4", "1.6", "1.8", "2.0"]),
        ("log", 210, 340, ["220", "240", "260", "280", "300", "320", "340"]),
        ("log", 4, 90, ["5", "10", "20", "50"]),
        ("log", 0.5, 3e6, ["1", "10", "100", "1,000", "10,000", "100,000", "1,000,000"]),
    ],
)
def test_ticks_are_plain_numbers(scale, low, high, expected):
    axes = figures.new_figure(4, 4).add_subplot()
    axes.set_yscale(scale)
    axes.set_ylim(low, high)
    figures.number_ticks(axes.yaxis)
    assert [label.get_text() for label in axes.get_yticklabels()] == expected
    assert not len(axes.yaxis.get_minorticklocs())


def colours(figure):
    """The colours of a figure's legend by its labels."""
    (legend,) = figure.legends
    found = zip(legend.get_texts(), legend.legend_handles)
    # Those of lines with error bars are arrays.
    return {
        text.get_text().partition(" (")[0]: to_hex(np.ravel(to_rgba_array(handle.get_color()))).upper()
        for text, handle in found
    }


def test_cards_show_each_model_in_one_colour():
    found = {}
    for path in sorted(ROOT.glob("model_cards/*/length_pg19.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        (own,) = (one for one in content["checkpoints"] if one["variant"] is None)
        found[path.parent.name] = {**own, "name": path.parent.name}
    first = colours(figure_of(list(found.values()), title="x"))
    assert len(set(first.values())) == len(first) == 6
    assert colours(figure_of(list(found.values())[::-1], title="x")) == first
    assert first["wikipedia_en_cope_small"] == figures.ENCODINGS["cope"][0]


def test_tables_show_systems_in_the_colours_of_their_encodings(tmp_path, monkeypatch):
    drawn = []
    for module in (drawing, conversion_table):
        name = "save_png" if module is drawing else "save_figure"
        monkeypatch.setattr(module, name, lambda figure, path: drawn.append(figure))
    table = ROOT / "model_cards/length_extrapolation_small/results.json"
    drawing.draw(json.loads(table.read_text(encoding="utf-8")), tmp_path / "x.png")
    conversion_table.draw(json.loads((ROOT / "docs/conversion.json").read_text(encoding="utf-8")), tmp_path / "x")
    table, conversion = map(colours, drawn)
    names = {"RoPE": "rope", "PoPE": "pope", "CoPE": "cope", "CoPE + RoPE": "cope+rope"}
    for label, encoding in {**names, "Absolute": "absolute", "Relative": "relative"}.items():
        assert table[label] == figures.ENCODINGS[encoding][0]
    for label, encoding in {**names, "RoPE, trained on unchanged": "rope", "none": "none"}.items():
        assert label in ("RoPE", "PoPE") or conversion[label] == figures.ENCODINGS[encoding][0]
    assert len(set(conversion.values())) == len(conversion) == 7
    # The text of the measurement.
    for figure, tokens in zip(drawn, ("20,480", "8,192")):
        assert f"4 documents, the first {tokens} tokens of each" in " ".join(figure.get_suptitle().split())


def test_the_same_figure_gives_the_same_small_file(tmp_path):
    for name in "ab":
        figure = figures.new_figure(4, 3)
        figure.add_subplot().plot([0, 1], [0, 1])
        figures.save_figure(figure, tmp_path / name)
    for ending in ("png", "svg"):
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()
    assert (tmp_path / "a.png").stat().st_size < 20_000
