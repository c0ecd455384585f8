"""`whatwhere compare`: what is put side by side, and what must not be."""

import json
import pathlib
import shutil

import pytest

import whatwhere_cli as cli
from test_cards import DATA, ORIGIN, TRAINING, ZERO_SHOT, cell, entry, run_folder, task
from whatwhere.model_card import weights_fingerprint
from whatwhere.scripts.commands.card import make
from whatwhere.scripts.writing import write_json

SHIPPED = pathlib.Path(__file__).resolve().parents[1] / "model_cards"


def lengths(folder, perplexity, *, tokens="0", **data):
    """Writes `length_pg19.json` of the weights in a folder."""
    weights = weights_fingerprint(folder)
    one = {**entry(folder.name, weights, [cell(32, perplexity), cell(64, 2 * perplexity)]), "tokens_sha256": tokens}
    content = {"data": {**DATA, **data}, "checkpoints": [one], "weights_sha256": weights, **ORIGIN}
    write_json(folder / "length_pg19.json", content)


@pytest.fixture
def runs(tmp_path):
    """Two runs on the same text, with lengths on the same tokens."""
    one, two = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", encoding="rope", seed=1)
    lengths(one, 51.25)
    lengths(two, 42.5)
    return one, two


def change(folder, **changes):
    results = json.loads((folder / "results.json").read_text())
    write_json(folder / "results.json", {**results, **changes})


def compare(capsys, *arguments):
    """Returns the scores of the runs by title, the rows of other tables by their first cell, and the other lines."""
    count = len([one for one in arguments if isinstance(one, pathlib.Path) and one.is_dir()])
    cli.main(["compare", *map(str, arguments)])
    lines = capsys.readouterr().out.splitlines()
    assert max((len(line) for line in lines if line.startswith("|")), default=0) <= 100
    found, header = {}, []
    for line, following in zip(lines, [*lines[1:], ""]):
        cells = [part.strip() for part in line.strip("|").split("|")]
        if following.startswith("|-"):
            header = cells
        elif header and not header[0] and line.startswith("| "):
            found.setdefault("", []).append(cells[0])
            for title, text in zip(header[1:], cells[1:]):
                found.setdefault(title, []).append(text)
        elif line.startswith("| "):
            found[cells[0]] = [*found.get(cells[0], []), *cells[1:]]
        elif ": " in line and not line.startswith(("(!)", "-", "Written")):
            title, _, text = line.partition(": ")
            found.setdefault(title, [text] * count)
    return found, [line for line in lines if line and not line.startswith("|")]


def warnings(lines):
    return [line for line in lines if line.startswith("(!)")]


def test_side_by_side(runs, tmp_path, capsys):
    recipe = {**TRAINING["recipe"], "training": {"steps": 99}}
    change(runs[1], recipe=recipe)
    rows, lines = compare(capsys, *runs, "--output", tmp_path / "out")
    assert rows[""] == ["one", "two"]
    assert rows["encoding"] == ["pope", "rope"]
    assert rows["parameters"] == ["54,321", "54,321"]
    assert rows["tokens trained"] == ["108,642", "108,642"]
    assert rows["evaluated on"] == ["WikiText-103 (word level, with <unk>), test split"] * 2
    assert rows["trained on"][0].startswith("English Wikipedia")
    assert rows["perplexity, test"] == ["50.831 per token", "50.831 per token"]
    assert rows["bits per byte, test"] == ["2.3457", "2.3457"]
    assert rows["training loss"] == ["2 nats per token", "2 nats per token"]
    assert rows["validation loss"] == ["4.75 nats per token", "4.75 nats per token"]
    assert rows["piqa, acc"] == ["0.8765 ± 0.0321 (first 10 questions)"] * 2
    assert rows["one"] == ["pope", "32", "51.25 ± 0.51", "102.50 ± 1.02"]
    assert rows["two"][2:] == ["42.50 ± 0.42", "85.00 ± 0.85"]
    assert "- training.steps: 77 → 99" in lines
    assert not warnings(lines)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(files) == ["curves.png", "curves.svg", "length_pg19.png", "length_pg19.svg"]
    assert b"not comparable" not in files["curves.svg"]


@pytest.mark.parametrize(
    ("changes", "marked", "reason"),
    [
        ({"tokens": 999}, {"perplexity, test", "bits per byte, test"}, "tokens: 12345 → 999"),
        (
            {"tokens_sha256": "e" * 64},
            {"perplexity, test", "bits per byte, test"},
            "other evaluated text.",
        ),
        ({"text_sha256": "f" * 64}, {"training loss"}, "other training text."),
        (
            {"data": {**TRAINING["data"], "splits": {**TRAINING["data"]["splits"], "test": "pg19:test"}}},
            {"perplexity, test", "bits per byte, test"},
            "text: 'wikitext103_v1:test' → 'pg19:test'",
        ),
        (
            {"length": 64},
            {"perplexity, test", "bits per byte, test", "training loss", "validation loss"},
            "length: 32 → 64",
        ),
    ],
)
def test_figures_that_are_not_comparable_are_marked(runs, capsys, changes, marked, reason):
    if "tokens_sha256" in changes:
        change(runs[1], **changes)
        # Earlier versions did not record it.
        assert not warnings(compare(capsys, *runs)[1])
        change(runs[0], tokens_sha256="d" * 64)
    change(runs[1], **changes)
    rows, lines = compare(capsys, *runs)
    assert {title for title, cells in rows.items() if cells[-1].endswith("(!)")} == marked
    assert any(reason in line and "of two: not comparable with one" in line for line in warnings(lines))


def test_other_questions(runs, capsys):
    scores = {"lambada_openai": task(50, 50, acc=0.5), "piqa": task(10, 10, acc=0.25)}
    write_json(runs[1] / "lm_eval.json", {**ZERO_SHOT, "tasks": scores, "weights_sha256": weights_fingerprint(runs[1])})
    rows, lines = compare(capsys, *runs)
    assert rows["lambada_openai, acc"][1] == "0.5 ± 0.0321 (first 50 questions) (!)"
    assert rows["lambada_openai, perplexity"][1] == "-"
    assert rows["piqa, acc"][1] == "0.25 ± 0.0321 (first 10 questions)"
    assert any("limit: None → 50; samples: 100 → 50" in line for line in warnings(lines))


@pytest.mark.parametrize(
    ("tokens", "data", "reason"),
    [
        ("1", {}, "other evaluated text."),
        ("0", {"document_limit": 4}, "document_limit: None → 4"),
        ("0", {"text_tokens": 2048}, "text_tokens: None → 2048"),
    ],
)
def test_windows_on_other_tokens_have_their_own_table_and_figure(runs, tmp_path, capsys, tokens, data, reason):
    lengths(runs[1], 42.5, tokens=tokens, **data)
    _, lines = compare(capsys, *runs, "--output", tmp_path / "out")
    titles = [line for line in lines if line.startswith("Perplexity per token ± standard error on PG-19 (books")]
    assert len(set(titles)) == 2
    assert len(warnings(lines)) == 1
    assert warnings(lines)[0].startswith("(!) length_pg19 of two: not comparable")
    assert reason in warnings(lines)[0]
    for name, present in (("length_pg19.svg", [True, False]), ("length_pg19_2.svg", [False, True])):
        # Matplotlib writes each text as a comment before its shapes.
        figure = (tmp_path / "out" / name).read_bytes()
        assert [b"<!-- one -->" in figure, b"<!-- two -->" in figure] == present


def test_another_tokenizer(runs, tmp_path, capsys):
    path = runs[1] / "tokenizer.json"
    content = json.loads(path.read_text())
    # Saved with a call's settings, it is the same tokenizer.
    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps({**content, "truncation": truncation}))
    assert not warnings(compare(capsys, *runs)[1])
    path.write_text(json.dumps({**content, "normalizer": {"type": "Lowercase"}}))
    rows, lines = compare(capsys, *runs, "--output", tmp_path / "out")
    assert rows["perplexity, test"][1].endswith("(!)")
    every = "training loss, validation loss, bits per byte, perplexity, test"
    assert warnings(lines) == [f"(!) {every} of two: not comparable with one: another tokenizer."]
    # Windows on its tokens are a table of their own, whose title says why.
    lengths(runs[1], 42.5, tokens="1")
    _, lines = compare(capsys, *runs)
    assert any("test split: 4 documents (another tokenizer), by sequence length" in line for line in lines)
    assert "(!) length_pg19 of two: not comparable with its first table: another tokenizer." in lines
    assert b"not comparable" in (tmp_path / "out" / "curves.svg").read_bytes()


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ({"data": {"tokenizer": "gpt2"}, "training": {}}, "another tokenizer"),
        (None, "a tokenizer that is not known"),
    ],
)
def test_a_card_knows_its_tokenizer_by_the_recipe(runs, tmp_path, capsys, recipe, reason):
    change(runs[0], recipe={"name": "tiny", "data": {"tokenizer": "bytes"}, "training": {}})
    change(runs[1], recipe=recipe)
    (card, *_) = make([runs[0]], tmp_path / "cards")
    rows, lines = compare(capsys, card.parent, runs[1])
    # Tokens are bytes.
    assert rows["training loss"][0] == "2 nats per byte"
    assert rows["training loss"][1].endswith(" (!)")
    assert any(reason in line for line in warnings(lines))
    assert ("- not known" in lines) == (recipe is None)


def test_seeds_of_one_recipe(tmp_path, capsys):
    folders = []
    for seed, value in enumerate((2.0, 3.0, 4.0)):
        metrics = {"perplexity": {"value": value}}
        folders.append(run_folder(tmp_path / f"s{seed}", encoding="rope", seed=seed, metrics=metrics))
        change(folders[-1], seed=seed, recipe={**TRAINING["recipe"], "seed": seed})
        lengths(folders[-1], 40.0 + seed)
    other = run_folder(tmp_path / "other", encoding="rope", seed=5)
    change(other, seed=3, recipe={**TRAINING["recipe"], "seed": 3, "training": {"steps": 78}})
    rows, lines = compare(capsys, *folders, other)
    name = "s0, mean of 3 seeds"
    assert list(dict.fromkeys(rows[""])) == ["s0", "s1", "s2", "other", name]
    assert rows["perplexity, test"] == [f"{value} per token" for value in ("2", "3", "4", "50.831", "3 ± 1")]
    assert rows["seed"] == ["0", "1", "2", "3", "0, 1, 2"]
    assert rows[name][-2:] == ["41.00 ± 1.00", "82.00 ± 2.00"]
    assert "Mean ± standard deviation over seeds:" in lines
    # Other evaluated text.
    change(folders[1], tokens=999)
    rows, _ = compare(capsys, *folders)
    assert rows["perplexity, test"][-1] == "-"
    # The same seed twice is no mean.
    change(folders[1], seed=0)
    assert name not in compare(capsys, *folders)[0][""]


def test_long_names_and_texts_fit(tmp_path, capsys):
    """As of the user's own text."""
    about = {"source": "local", "train_file": ["a" * 60 + ".txt"], "validation_file": ["b" * 70 + ".txt"]}
    folders = [run_folder(tmp_path / name, data={**about, "split": "validation"}) for name in ("x" * 40, "y" * 40)]
    change(folders[1], data={**about, "train_file": ["c" * 60 + ".txt"], "split": "validation"})
    rows, lines = compare(capsys, *folders)
    assert any(line.startswith(f"trained on, {'y' * 40}: ") for line in lines)
    assert rows[""][:2] == ["x" * 40, "y" * 40]


def test_toy_tasks(tmp_path, capsys):
    errors = {"token_error": 0.125, "sequence_error": 0.5}
    recipe = {"data": {"source": "task", "test_sets": {"sparse": {"ignore": 0.9}}}, "training": {}}
    data = {"source": "task", "task": "flip_flop", "split": "test"}
    about = {"data": data, "metrics": {"test_sets": {"sparse": errors}}, "recipe": recipe, "text_sha256": "0"}
    folders = [run_folder(tmp_path / "one", **about), run_folder(tmp_path / "two", **{**about, "text_sha256": "1"})]
    # Each seed draws its own training samples.
    rows, lines = compare(capsys, *folders)
    assert rows["wrong answer tokens, sparse"] == ["12.50%", "12.50%"]
    assert not warnings(lines)
    harder = {"data": {"source": "task", "test_sets": {"sparse": {"ignore": 0.95}}}, "training": {}}
    change(folders[1], recipe=harder)
    rows, lines = compare(capsys, *folders)
    assert rows["wrong answer tokens, sparse"] == ["12.50%", "12.50% (!)"]
    assert "test_sets.sparse.ignore: 0.9 → 0.95" in warnings(lines)[0]


def test_results_of_other_weights_are_named(runs, capsys):
    write_json(runs[0] / "lm_eval.json", {**ZERO_SHOT, "weights_sha256": "0" * 64})
    rows, lines = compare(capsys, *runs)
    assert "(!) lm_eval.json of one is left out: its results are of other weights." in lines
    assert rows["piqa, acc"][0] == "-"


def test_results_without_training(runs, tmp_path, capsys):
    for folder in runs:
        (folder / "results.json").unlink()
    rows, lines = compare(capsys, *runs)
    assert rows["piqa, acc"] == ["0.8765 ± 0.0321 (first 10 questions)"] * 2
    assert "perplexity, test" not in rows
    assert "- not known" in lines


def test_lengths_that_were_measured_together(runs, tmp_path, capsys, refuses):
    found = [json.loads((folder / "length_pg19.json").read_text()) for folder in runs]
    for folder in runs:
        (folder / "length_pg19.json").unlink()
    entries = [one for content in found for one in content["checkpoints"]]
    write_json(tmp_path / "length_pg19.json", {**found[0], "checkpoints": entries})
    assert "one" not in compare(capsys, *runs)[0]
    rows, _ = compare(capsys, *runs, "--results", tmp_path / "length_pg19.json")
    assert rows["one"][2:] == ["51.25 ± 0.51", "102.50 ± 1.02"]
    assert rows["two"][2:] == ["42.50 ± 0.42", "85.00 ± 0.85"]
    write_json(tmp_path / "length.json", {**found[0], "checkpoints": [{**entries[0], "weights": "0" * 64}]})
    refuses(
        "compare",
        [
            (*runs, "--results", tmp_path / "length.json", "results='length' is not valid"),
            (*runs, "--results", runs[0] / "results.json", "results='results' is not valid"),
        ],
    )


def test_shipped_cards_of_one_recipe_are_comparable(capsys):
    names = [f"wikipedia_en_{name}_small" for name in ("rope", "pope", "cope", "relative", "absolute")]
    rows, lines = compare(capsys, *(SHIPPED / name for name in names))
    assert len(rows["perplexity, test"]) == 5
    assert not warnings(lines)


def test_mistakes(runs, tmp_path, refuses):
    (tmp_path / "empty").mkdir()
    other = shutil.copytree(runs[0], tmp_path / "other")
    for name in ("results.json", "lm_eval.json", "length_pg19.json"):
        content = json.loads((other / name).read_text())
        write_json(other / name, {**content, "weights_sha256": "0" * 64})
    table = (
        (tmp_path / "empty", "empty' is not valid: it has no results of"),
        (tmp_path / "missing", "missing' is not a folder"),
        (runs[0] / "results.json", "results.json' is not a folder"),
        (SHIPPED / "cope_3_small", "a table of the papers"),
        (other, "other' is not valid: it has no results of"),
        (runs[0], "is given twice"),
        ("at least two folders",),
    )
    refuses("compare", [(runs[0], *row) for row in table])
