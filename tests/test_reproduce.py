"""The papers' tables and ours: figures, plans, verdicts and reports on made-up numbers, and real runs of some steps."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate", reason='needs pip install "whatwhere[train]"')

import whatwhere_cli as cli
import whatwhere_cli.reproduce
from whatwhere.scripts.commands import card as cards
from whatwhere.scripts.commands import reproduce as script
from whatwhere.scripts.data.corpora import CORPORA
from whatwhere.scripts.evaluation.results import read_json
from whatwhere.scripts.reproduction import drawing, measures, report, runs
from whatwhere.scripts.reproduction.runs import plan, unique
from whatwhere.scripts.reproduction.tables import TABLES, load_tables, read_figure
from whatwhere.scripts.reproduction.verdict import (
    ALONE,
    DIFFERS,
    NOT_RUN,
    ORDER,
    UNPRINTED,
    WITHIN,
    Cell,
    judge,
    ordered,
)
from whatwhere.scripts.training.loop import TrainingRun
from whatwhere.scripts.training.model import build_config, build_model
from whatwhere.scripts.training.recipe import RECIPES, load_recipe

CARDS = Path(__file__).resolve().parents[1] / "model_cards"

# --- figures


@pytest.mark.parametrize(
    ("text", "mean", "spread", "rounding"),
    [
        ("22.55", 22.55, None, 0.005),
        ("6.8 (6.9)", 6.8, 6.9, 0.05),
        ("94.82 ± 2.91", 94.82, 2.91, 0.005),
        ("0.0 (0.0)", 0.0, 0.0, 0.05),
        ("7", 7.0, None, 0.5),
    ],
)
def test_figure(text, mean, spread, rounding):
    figure = read_figure(text)
    assert (figure.mean, figure.spread) == (mean, spread)
    assert figure.rounding == pytest.approx(rounding)


@pytest.mark.parametrize("text", ["", "-", "1.0 (2.0", "6.8(6.9)", "1.0 2.0", "nan"])
def test_bad_figure(text):
    with pytest.raises(ValueError, match="is not valid"):
        read_figure(text)


# --- verdicts


@pytest.mark.parametrize(
    ("one", "other", "result"),
    [
        # combined spread 5
        ("10.0 (3.0)", "15.1 (4.0)", True),
        ("10.0 (3.0)", "14.9 (4.0)", False),
        ("0.0 (0.0)", "0.0 (0.0)", False),
        ("0.0 (0.0)", "0.1 (0.0)", True),
        # no spread: the margin, which is 1
        ("10.0", "11.1", True),
        ("10.0", "10.9", False),
        # 4.2 - 3.2 is more than 1 in floating point
        ("4.2", "3.2", False),
        # one spread: the larger of the two
        ("10.0 (3.0)", "12.9", False),
        ("10.0 (3.0)", "13.1", True),
        ("10.0 (0.1)", "10.9", False),
    ],
)
def test_what_is_an_order(one, other, result):
    assert ordered(read_figure(one), read_figure(other), 1.0) is result
    assert ordered(read_figure(other), read_figure(one), 1.0) is result


def cells(*rows, exact=False):
    """Cells of one column: (printed figure or None, our figures)."""
    return [
        Cell(row=str(number), column="x", paper=text and read_figure(text), values=tuple(values), exact=exact)
        for number, (text, values) in enumerate(rows)
    ]


def verdicts(*rows, exact=False):
    column = cells(*rows, exact=exact)
    return [(found.text, found.agreed, found.compared) for found in (judge(cell, column, 1.0) for cell in column)]


def test_verdict_by_order():
    # 5, 20 and 20.5: the last two are in no order
    agree = verdicts(("5.0", [40]), ("20.0", [60, 80]), ("20.5", [50]), ("30.0", []))
    assert agree == [(ORDER, 2, 2), (ORDER, 1, 1), (ORDER, 1, 1), (NOT_RUN, 0, 0)]
    one_wrong = verdicts(("5.0", [40]), ("20.0", [60]), ("20.5", [30]))
    assert one_wrong == [(DIFFERS, 1, 2), (ORDER, 1, 1), (DIFFERS, 0, 1)]
    # means count: 10 and 50 are 30
    assert verdicts(("5.0", [10, 50]), ("20.0", [29])) == [(DIFFERS, 0, 1), (DIFFERS, 0, 1)]
    # equal means are in no order
    assert verdicts(("5.0", [0]), ("20.0", [0])) == [(DIFFERS, 0, 1), (DIFFERS, 0, 1)]
    assert verdicts(("5.0", [1]), ("5.5", [90])) == [(ALONE, 0, 0), (ALONE, 0, 0)]
    assert verdicts(("5.0", [1]), ("20.0", [])) == [(ALONE, 0, 0), (NOT_RUN, 0, 0)]


def test_cells_that_the_paper_does_not_have_judge_nothing():
    found = verdicts(("5.0", [40]), (None, [90, 91]), ("20.0", [60]), (None, []), exact=True)
    assert found == [(ORDER, 1, 1), (UNPRINTED, 0, 0), (ORDER, 1, 1), (NOT_RUN, 0, 0)]


def test_clear_order():
    def clear(one, other):
        return judge(cells(("5.0", one), ("20.0", other))[0], cells(("5.0", one), ("20.0", other)), 1.0).clear

    # standard deviations of 0.71 each: together 1
    assert clear([1, 2], [2.6, 3.6]) == 1
    assert clear([1, 2], [1.9, 2.9]) == 0
    assert clear([1, 2], [30]) == 0
    assert clear([30, 31], [1, 2]) == 0


def test_verdict_within_spread():
    # ours: mean 12, standard deviation 2; allowed: 2 * sqrt(2^2 + 1.5^2) + 0.05 = 5.05
    def first(text, values=(10, 12, 14), exact=True):
        return verdicts((text, values), ("90.0 (1.0)", [95]), exact=exact)[0][0]

    assert first("17.0 (1.5)") == WITHIN
    assert first("7.0 (1.5)") == WITHIN
    assert first("6.9 (1.5)") == ORDER
    assert first("17.1 (1.5)") == ORDER
    assert first("17.0 (1.5)", exact=False) == ORDER
    assert first("17.0") == ORDER
    assert first("17.0 (1.5)", values=[12]) == ORDER
    # a printed 0.0 (0.0) may be up to 0.05
    assert first("0.0 (0.0)", values=[0.05, 0.05]) == WITHIN
    assert first("0.0 (0.0)", values=[0.06, 0.06]) == ORDER


# --- tables and plans


def test_tables():
    assert list(TABLES) == [table.name for table in TABLES.values()]
    for table in TABLES.values():
        columns = [column.key for column in table.columns]
        assert len(set(columns)) == len(columns)
        assert len({row.key for row in table.rows}) == len(table.rows)
        assert all(row.figures and set(row.figures) <= set(columns) for row in table.rows)
        assert (table.solved is None) == (table.lifted is None) == ("accuracy" not in table.unit)
        assert all(set(row.parameters) <= set(columns) for row in table.rows)
        for column in table.columns:
            assert (RECIPES / f"{column.recipe}.yaml").exists()
            # a variant of a recipe may have no small version where the recipe has one
            assert (
                column.small
                <= (RECIPES / f"{column.recipe}_small.yaml").exists()
                <= (column.small or column.variant != "")
            )
    assert [len(TABLES[name].rows) for name in ("cope_2", "cope_7", "cope_8", "cope_9", "pope_indexing")] == [
        3,
        31,
        7,
        3,
        6,
    ]
    assert set(TABLES["cope_9"].rows[0].figures) == {"1_var", "3_var", "5_var"}
    assert TABLES["cope_2"].rows[2].figures["copy_sparse"] == read_figure("0.004 (0.006)")


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Plans of one seed, by the name of a table; each is made once."""
    output, made = tmp_path_factory.mktemp("runs"), {}

    def planned(name, *, small=False):
        if (name, small) not in made:
            made[name, small] = plan(TABLES[name], output=output, small=small, seeds=1)
        return made[name, small]

    return planned


def test_tables_share_runs(tmp_path, planned):
    def folders(name):
        return {run.folder for run in unique(planned(name))}

    counting = folders("cope_3")
    assert folders("cope_9") == counting
    assert folders("cope_4") < counting
    assert {folder.name for folder in counting} == {
        f"{row}{variant}-seed0" for row in ("absolute", "relative", "cope") for variant in ("", "-3var", "-5var")
    }
    both, copying = folders("cope_2"), folders("cope_10")
    assert copying < both
    assert both - copying < folders("cope_7")
    assert folders("pope_1") < folders("pope_indexing")
    assert {folder.name for folder in folders("pope_4") & folders("pope_8")} == {"pope-seed0", "pope-253m-seed0"}
    assert {folder.name for folder in folders("cope_5") & folders("cope_8")} == {"cope-seed0"}
    ours = ("length_extrapolation", "cope_ablations", "pope_ablations", "token_budget")
    common = {name: {folder.name for folder in folders(name) & folders("length_extrapolation")} for name in ours[1:]}
    assert common == {
        "cope_ablations": {"cope-seed0", "cope-rope-seed0"},
        "pope_ablations": {"pope-seed0"},
        "token_budget": {"rope-seed0", "pope-seed0", "cope-seed0"},
    }
    of_paper = plan(TABLES["cope_5"], output=tmp_path, small=True, seeds=3)
    shared = {run.folder for run in unique(of_paper)} - {
        run.folder for run in unique(plan(TABLES["length_extrapolation"], output=tmp_path, small=True))
    }
    assert {folder.name for folder in shared} == {f"cope-scaled-seed{seed}" for seed in range(3)}
    small = plan(TABLES["pope_1"], output=tmp_path, small=True, seeds=2)
    assert {run.folder for run in unique(small)} == {
        tmp_path / "indirect_indexing_small" / f"{row}-seed{seed}" for row in ("rope", "pope") for seed in (0, 1)
    }


@pytest.mark.parametrize("small", [False, True], ids=["exact", "small"])
def test_every_run_builds(planned, small):
    """All systems of all tables; those of exact runs have as many parameters as the papers say."""
    built = set()
    for name in TABLES:
        rows = {row.key: row for row in TABLES[name].rows}
        for (row, column), (run, *_) in planned(name, small=small).items():
            if run.folder in built:
                continue
            built.add(run.folder)
            config = build_config(run.recipe)
            assert run.recipe.seed == 0
            assert bool(run.changes) == small, run.folder
            printed = rows[row].parameters.get(column)
            if printed is None or small:
                continue
            with torch.device("meta"):
                model = build_model(config, run.recipe.training)
            count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            if run.recipe.name == "code_cope" and row in ("cope", "cope-rope"):
                # What the paper counts there is not known: `choices` says so.
                assert (printed, count) == (20.8, pytest.approx(19.8, abs=0.05))
            elif column == "774m":
                # GPT-2's, with learnt positions
                assert (printed, count) == (774, pytest.approx(774 - 1024 * 1280 / 1e6, abs=0.1))
            elif run.recipe.name == "openwebtext":
                assert round(count) == printed, run.folder
            else:
                assert count == pytest.approx(printed, abs=0.1), run.folder
    cope, pope = 31 + 3 + 9 + 7 + 6, 6
    # JSB, genome, OpenWebText: two systems each, and three ablations
    domains = 2 + 2 + 2 + 3
    exact = 0 if small else 4 + 2 + 2 * 2 + 3
    # Ours that are not the papers': lengths, CoPE, PoPE, budgets, indirect indexing.
    ours = 1 + 2 + 4 + 13 + 2
    assert len(built) == cope + pope + domains + exact + ours


def test_recipes_are_those_of_the_papers(planned):
    """What the papers and conventions say, beyond what the recipes say themselves."""

    def recipe(table, row, column):
        return planned(table)[row, column][0].recipe

    flip_flop = recipe("cope_7", "cope-half-dimension-half-heads", "ood")
    assert (flip_flop.model["n_embd"], flip_flop.model["n_layer"], flip_flop.model["n_head"]) == (128, 4, 2)
    assert flip_flop.data.test_sets["sparse"] == {"ignore": 0.98, "test_samples": 160_000}
    copying = recipe("cope_10", "rope", "copy_dense")
    assert {name: s.get("blanks") for name, s in copying.data.test_sets.items()} == {
        "in_distribution": None,
        "dense": 128,
        "sparse": 512,
    }
    counting = recipe("cope_9", "relative", "5_var")
    assert counting.data.task_parameters["variables"] == 5
    assert counting.training.steps * counting.training.batch_size == 100 * counting.data.train_samples
    assert (counting.model["position_encoding"], counting.model["position_encoding_parameters"]) == ("relative", None)
    indexing = recipe("pope_indexing", "alibi-half", "accuracy")
    assert indexing.model["position_encoding_parameters"] == {"head_fraction": 0.5}
    for size, expected in {"124m": (768, 12, 12), "253m": (1024, 16, 16), "774m": (1280, 36, 20)}.items():
        model = recipe("pope_4", "pope", size).model
        assert (model["n_embd"], model["n_layer"], model["n_head"]) == expected
    ablations = {
        row: build_config(recipe("pope_8", row, "253m")).position_encoding_parameters
        for row in ("pope-identity", "pope-relu", "pope-no-delta", "pope")
    }
    changes = [{"magnitude": "identity"}, {"magnitude": "relu"}, {"use_delta": False}, {}]
    assert list(ablations.values()) == [{**ablations["pope"], **change} for change in changes]
    wikitext = recipe("cope_8", "cope-all-positions", "test")
    assert wikitext.model["position_encoding_parameters"] == {"num_positions": 1024, "share_across_layers": True}


def test_plan(tmp_path):
    planned = plan(TABLES["cope_2"], output=tmp_path, small=True, rows=["cope", "rope"], sets=["training.steps=200"])
    assert {row for row, _ in planned} == {"rope", "cope"}
    assert [run.seed for run in unique(planned)] == [0] * 4 + [1] * 4 + [2] * 4
    run = planned["rope", "ood"][1]
    assert run is planned["rope", "in"][1]
    assert run.recipe.training.steps == 200
    assert "training.steps: 10000 → 200" in run.changes
    assert run.command() == (
        "whatwhere train flip_flop_small --set training.steps=200 --set model.position_encoding=rope "
        f"--set model.position_encoding_parameters=null --set seed=1 --output {tmp_path}/flip_flop_small/rope-seed1"
    )
    # how a run is made does not make it another one
    same = plan(TABLES["cope_2"], output=tmp_path, sets=["training.micro_batch_size=4", "training.log_every=7"])
    assert not any(run.changes for run in unique(same))
    # halves are those of the recipe as the user changed it
    halved = plan(TABLES["cope_7"], output=tmp_path, sets=["model.n_embd=64"], rows=["cope-half-dimension"])
    assert halved["cope-half-dimension", "in"][0].recipe.model["n_embd"] == 32


def test_plan_of_our_tables(tmp_path):
    planned = plan(TABLES["indirect_indexing"], output=tmp_path, small=True)
    assert {row: len(runs) for (row, _), runs in planned.items()} == {
        "rope": 8,
        "pope": 8,
        "none": 3,
        "absolute": 3,
        "cope": 3,
    }
    seeds = [run.seed for run in unique(planned)]
    assert seeds == sorted(seeds)
    assert {len(cell) for cell in plan(TABLES["indirect_indexing"], output=tmp_path, seeds=1).values()} == {1}
    budgets = plan(TABLES["token_budget"], output=tmp_path, small=True, rows=["fox-1of8", "fox"])
    schedules = {row: cell[0].recipe.training for (row, _), cell in budgets.items()}
    assert {row: (one.steps, one.warmup_steps) for row, one in schedules.items()} == {
        "fox": (1000, 100),
        "fox-1of8": (125, 12),
    }
    assert TABLES["token_budget"].multiples == [1, 2, 4, 8, 16]


def test_columns_without_a_small_version(tmp_path, capsys, monkeypatch):
    table = TABLES["cope_5"]
    assert {column for _, column in plan(table, output=tmp_path)} == {"validation", "test", "code"}
    small = plan(table, output=tmp_path, small=True)
    assert {column for _, column in small} == {"validation", "test"}
    assert not [run for run in unique(small) if run.recipe.name != "wikitext103_small"]
    with pytest.raises(ValueError, match="--small is not valid for rows cope-rope of cope_5"):
        plan(table, output=tmp_path, small=True, rows=["cope-rope"])
    monkeypatch.setattr(script, "estimate_seconds", lambda recipe: 3600.0)
    script.main(["cope_5", "--small", "--dry-run", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert "  Code, Test PPL: left out, code_cope has no small version for it\n0 of 7" in said
    assert said.endswith("Time on this machine, in one process: about 7.0 h for 7 runs that are not done.\n")
    monkeypatch.setattr(script, "estimate_seconds", lambda recipe: None)
    script.main(["cope_5", "--dry-run", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    assert "left out" not in said
    assert "runs are not estimated" in said


def test_sums_keep_the_recipe_s_cope(tmp_path):
    sets = ["model.position_encoding_parameters.num_positions=16"]
    planned = plan(TABLES["cope_5"], output=tmp_path, rows=["cope-relative", "cope-rope"], sets=sets)
    for cell, name in {("cope-relative", "test"): "cope+relative", ("cope-rope", "code"): "cope+rope"}.items():
        model = planned[cell][0].recipe.model
        assert model["position_encoding"] == name
        assert model["position_encoding_parameters"] == {"cope": {"num_positions": 16, "share_across_layers": True}}
    assert list(planned) == [("cope-relative", "validation"), ("cope-relative", "test"), ("cope-rope", "code")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": ["copes"]}, "--rows 'copes' is not valid.*'cope'"),
        ({"seeds": 0}, "--seeds 0 is not valid"),
        ({"sets": ["seed=3"]}, "--set seed is not valid"),
        ({"sets": ["model.position_encoding=rope"]}, "--set model.position_encoding is not valid"),
        ({"sets": ["model.position_encoding=rope"], "rows": ["cope"]}, "--set model.position_encoding is not valid"),
        ({"sets": ["training.stesp=3"]}, "training.stesp"),
        (
            {"sets": ["model.position_encoding_parameters.num_positions=16"]},
            "--set model.position_encoding_parameters.num_positions is not valid: row 'absolute'",
        ),
    ],
)
def test_bad_plan(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        plan(TABLES["cope_2"], output=tmp_path, **options)


@pytest.mark.parametrize(
    ("table", "row", "key"),
    [
        ("cope_8", "cope-all-positions", "model.position_encoding_parameters.num_positions"),
        ("cope_8", "cope-all-positions", "model.position_encoding_parameters"),
        ("pope_4", "rope", "model.n_embd"),
    ],
)
def test_keys_that_a_row_or_its_column_sets_are_refused(tmp_path, table, row, key):
    with pytest.raises(ValueError, match=f"--set {key} is not valid: row '{row}', its column or --seeds sets"):
        plan(TABLES[table], output=tmp_path, rows=[row], sets=[f"{key}=null"])


# --- reports, on made-up runs


def pretend(run, value, **others):
    """Writes the results of a run that was never made; `value` is a share, or a mapping of test sets to shares.

    `others` are further metrics.
    """
    shares = value if isinstance(value, dict) else dict.fromkeys(run.recipe.data.test_sets or ("none",), value)
    results = {
        "metrics": {"test_sets": {name: {"token_error": share} for name, share in shares.items()}, **others},
        "data": {"source": run.recipe.data.source},
        "recipe": run.recipe.resolved(),
        "steps": run.recipe.training.steps,
        "parameters": 1000,
        "seconds": 1.5,
        "commit": "abc",
        "device": "cpu",
        "processes": 1,
        "versions": {"python": "3"},
    }
    run.folder.mkdir(parents=True)
    (run.folder / "results.json").write_text(json.dumps(results))
    # The accuracy rises from 10 %, in five evaluations; the last one has the error of the first test set.
    last = next(iter(shares.values()), 0.9)
    lines = [
        {"step": 100 * index, "validation_token_error": 0.9 + (last - 0.9) * (index - 1) / 4} for index in range(1, 6)
    ]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_report_of_exact_runs(tmp_path, capsys):
    planned = plan(TABLES["pope_indexing"], output=tmp_path)
    for row, errors in {"pope": [0.02, 0.03, 0.55], "rope": [0.9, 0.88], "sinusoidal": [0.98, 0.981]}.items():
        for run, error in zip(planned[row, "accuracy"], errors):
            pretend(run, error)
    script.main(["pope_indexing", "--report-only", "--output", str(tmp_path), "--cards", str(tmp_path / "cards")])
    text = capsys.readouterr().out
    middle = "2 of 3 | 0 of 2 | 10.00, 12.00 | never, never"
    assert f"| RoPE | Indirect Idx. | 11.00 ± 1.41 | {middle} | 11.16 ± 2.45 | agrees within spread |" in text
    # 1.95 ± 0.07: within 2 * sqrt(0.07^2 + 0.04^2) of 1.90
    middle = "2 of 3 | 0 of 2 | 2.00, 1.90 | never, never"
    assert f"| Sinusoidal | Indirect Idx. | 1.95 ± 0.07 | {middle} | 1.90 ± 0.04 | agrees within spread |" in text
    # far from 94.82, but one failed run of three makes the spread large
    middle = "3 of 3 | 2 of 3 | 98.00, 97.00, 45.00 | 300, 300, 500"
    assert f"| PoPE | Indirect Idx. | 80.00 ± 30.32 | {middle} | 94.82 ± 2.91 | agrees within spread |" in text
    assert "| Learnable | Indirect Idx. | - | 0 of 3 | 0 of 0 | - | - | 10.08 ± 0.19 | not run |" in text
    assert "The recipes are the exact ones." in text
    assert "- Learnable: `model.position_encoding=absolute`, `model.position_encoding_parameters=null`" in text
    found = json.loads((tmp_path / "pope_indexing.json").read_text())
    pope = next(cell for cell in found["cells"] if cell["row"] == "pope")
    assert [seed["value"] for seed in pope["ours"]["seeds"]] == pytest.approx([98, 97, 45])
    assert pope["verdict"] == {"text": WITHIN, "compared": 2, "agreed": 2, "clear": 2}
    assert found["origin"]["versions"] == [{"python": "3"}]
    assert (tmp_path / "pope_indexing.md").read_text() == report.markdown(found)
    card = tmp_path / "cards" / "pope_indexing"
    assert json.loads((card / "results.json").read_text()) == found
    assert report.markdown(found) in (card / "README.md").read_text()
    assert "license: apache-2.0" in (card / "README.md").read_text()
    assert "- finished runs: 7, with 0.0 to 0.0 minutes of training each" in text


def test_card_with_other_results_is_kept(tmp_path):
    """Results of runs whose folders are gone, or that were trained elsewhere, are in the card only."""
    planned = plan(TABLES["pope_indexing"], output=tmp_path / "old", rows=["rope"])["rope", "accuracy"]
    pretend(planned[1], 0.9)
    arguments = ["pope_indexing", "--rows", "rope", "--report-only", "--cards", str(tmp_path / "cards")]
    script.main([*arguments, "--output", str(tmp_path / "old")])
    pretend(plan(TABLES["pope_indexing"], output=tmp_path / "new", rows=["rope"])["rope", "accuracy"][0], 0.9)
    before = {file: file.read_bytes() for file in (tmp_path / "cards").rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=r"other runs .*'indirect_indexing/rope-seed1'"):
        script.main([*arguments, "--output", str(tmp_path / "new")])
    assert {file: file.read_bytes() for file in (tmp_path / "cards").rglob("*") if file.is_file()} == before
    pretend(plan(TABLES["pope_indexing"], output=tmp_path / "new", rows=["rope"])["rope", "accuracy"][1], 0.9)
    script.main([*arguments, "--output", str(tmp_path / "new")])


def test_report_of_nothing_is_refused(tmp_path):
    """So that it does not take the place of an earlier report."""
    with pytest.raises(SystemExit, match=r"--report-only is not valid: no run of pope_1 is finished in .*nowhere'"):
        cli.main(
            ["reproduce", "pope_1", "--report-only", "--output", str(tmp_path / "nowhere"), "--cards", str(tmp_path)]
        )
    assert not list(tmp_path.iterdir())


def test_report_of_small_runs(tmp_path, capsys):
    planned = plan(TABLES["cope_4"], output=tmp_path, small=True, seeds=2)
    for run in planned["cope", "pass_10"]:
        pretend(run, {"in_distribution": 0.0, "longer": 0.0, "shorter": 0.5})
    for run in planned["relative", "pass_10"]:
        pretend(run, {"in_distribution": 0.01, "longer": 0.2, "shorter": 0.4})
    script.main(["cope_4", "--small", "--seeds", "2", "--report-only", "--output", str(tmp_path)])
    text = capsys.readouterr().out
    assert "| CoPE | w_pass = 100 | 0.00 ± 0.00 | 2 of 2 | 0.0 (0.0) | agrees in order (1 of 1, 1 clear) |" in text
    assert "| CoPE | w_pass = 10 | 50.00 ± 0.00 | 2 of 2 | 4.0 (4.1) | differs (0 of 1, 0 clear) |" in text
    assert f"`training.steps: 15625 → {planned['cope', 'pass_10'][0].recipe.training.steps}`" in text
    assert "Small runs can only agree in order" in text
    assert not (tmp_path / "cope_4.md").exists()


def pretend_text(run, validation, test):
    """Writes the results of a language model that was never made: its perplexities, and 2.5 million parameters."""
    pretend(run, {}, perplexity={"value": test})
    path = run.folder / "results.json"
    others = {"parameters": 2_500_000, "data": {"source": "corpus", "place": "local files"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | others))
    line = {"step": run.recipe.training.steps, "validation_perplexity": validation}
    (run.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def test_report_of_text(tmp_path, capsys):
    """The figures that the paper does not have, those of another corpus, the sizes, and a column that is left out."""
    planned = plan(TABLES["cope_5"], output=tmp_path, small=True)
    for row, values in {"cope": (80, 90), "absolute": (85, 95), "relative": (79, 96), "pope": (70, 71)}.items():
        pretend_text(planned[row, "test"][0], *values)
    script.main(["cope_5", "--small", "--report-only", "--output", str(tmp_path), "--cards", str(tmp_path / "cards")])
    text = capsys.readouterr().out
    validation, test = "WikiText-103, Val. PPL", "WikiText-103, Test PPL"
    for line in (
        f"| CoPE | {validation} | 80.00 | 1 of 1 | 22.55 | differs (1 of 2, 0 clear) | 2.5 | 123.7 |",
        f"| CoPE | {test} | 90.00 | 1 of 1 | 23.46 | agrees in order (2 of 2, 0 clear) | 2.5 | 123.7 |",
        f"| Absolute PE | {validation} | 85.00 | 1 of 1 | 23.96 | agrees in order (2 of 2, 0 clear) | 2.5 | 124.4 |",
        f"| CoPE + Relative | {validation} | - | 0 of 1 | 22.31 | not run | - | 123.7 |",
        f"| PoPE | {test} | 71.00 | 1 of 1 | - | not in the paper | 2.5 | - |",
        f"| RoPE | {test} | - | 0 of 1 | - | not run | - | - |",
        "- Code, Test PPL (`code_cope`)",
        "*Not in the paper*: measured in the same way, without a verdict.",
    ):
        assert line in text, line
    assert "| Code, Test PPL |" not in text
    splits = planned["cope", "test"][0].recipe.data.splits
    assert f"  - `data.splits: None → {dict(splits)}`\n" in text
    assert "- corpora from: local files\n" in text
    folder = tmp_path / "cards" / "cope_5_small"
    readme = (folder / "README.md").read_text()
    assert report.markdown(json.loads((folder / "results.json").read_text()), card=True) == readme
    for name in {choice.partition(":")[0] for choice in splits.values()}:
        assert f"\n- {CORPORA[name].title}: {CORPORA[name].licence}\n".replace("<", "&lt;") in readme


def pretend_own(run, test, lengths):
    """Writes the results of a language model that was never made; `lengths`: its perplexities from 1x on, or NaN."""
    pretend_text(run, test, test)
    path = run.folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": run.folder.name}))
    cells = [
        {"length": 512 * 2**index, "multiple": 2.0**index, "reached": value == value}
        | ({"perplexity": value} if value == value else {"reason": "made up"})
        for index, value in enumerate(lengths)
    ]
    entry = {"name": "x", "variant": None, "weights": run.folder.name, "trained_length": 512, "tokens_sha256": "x"}
    others = {"command": "x", "date": "x", "versions": {}, "data": measures.BOOKS}
    content = {**others, "checkpoints": [{**entry, "cells": cells, "by_position": []}]}
    (run.folder / "length_pg19.json").write_text(json.dumps(content))


def test_help_says_what_each_table_is(capsys):
    with pytest.raises(SystemExit):
        script.main(["--help"])
    text = capsys.readouterr().out
    for name, title in {**{name: table.title for name, table in TABLES.items()}, "conversion": "A model"}.items():
        assert re.search(rf"^  {name} +{re.escape(title)}", text, flags=re.MULTILINE), name


def test_report_of_our_table(tmp_path, capsys):
    """Rows, seeds and lengths may be missing; differences are those of the seeds that both rows have."""
    planned = plan(TABLES["length_extrapolation"], output=tmp_path, small=True)
    nan = float("nan")
    for seed, (test, lengths) in enumerate([(280, [230, 240, 270, 300, 330, 1e9]), (284, [234]), (288, [])]):
        pretend_own(planned["rope", "test"][seed], test, lengths)
    for seed, test in {0: 260, 2: 262}.items():
        pretend_own(planned["pope", "test"][seed], test, [220 + seed, 225, 230, 235, 240])
    pretend_own(planned["absolute", "test"][0], 360, [350, nan, nan, nan, nan])
    arguments = ["length_extrapolation", "--small", "--report-only", "--output", str(tmp_path)]
    script.main([*arguments, "--cards", str(tmp_path / "cards")])
    text = capsys.readouterr().out
    # Differences of PoPE: -20 and -26 of seeds 0 and 2; at 1x, seed 2 of RoPE is not measured.
    for line in (
        "| system | seeds | WikiText-103 test | PG-19 1x | 2x | 4x | 8x | 16x |",
        "| RoPE | 3 of 3 | 284.0 ± 4.0 | 232.0 ± 2.8 (n = 2) | 240.0 (n = 1) | 270.0 (n = 1) | 300.0 (n = 1) |"
        " 330.0 (n = 1) |",
        "| PoPE | 2 of 3 | 261.0 ± 1.4 | 221.0 ± 1.4 | 225.0 ± 0.0 | 230.0 ± 0.0 | 235.0 ± 0.0 | 240.0 ± 0.0 |",
        "| CoPE | 0 of 3 | - | - | - | - | - | - |",
        "| Absolute | 1 of 3 | 360.0 | 350.0 | not supported | not supported | not supported | not supported |",
        "Differences to RoPE, paired by seed:",
        "| PoPE | 2 | -23.0 ± 4.2 | -10.0 (n = 1) | -15.0 (n = 1) | -40.0 (n = 1) | -65.0 (n = 1) | -90.0 (n = 1) |",
        "| Absolute | 1 | +80.0 | +120.0 | - | - | - | - |",
        "- CoPE: the recipe without changes",
    ):
        assert f"{line}\n" in text, line
    assert not re.search("(?i)paper's figures|verdict|agrees|not run|exact ones", text)
    card = tmp_path / "cards" / "length_extrapolation_small"
    found = read_json(card / "results.json")
    assert not [cell for cell in found["cells"] if {"paper", "verdict"} & set(cell)]
    assert "![Perplexity by length](length_extrapolation_small.png)" in (card / "README.md").read_text()
    before = (card / "length_extrapolation_small.png").read_bytes()
    assert before.startswith(b"\x89PNG")
    (tmp_path / "cards" / "README.md").write_text("\n".join(cards.INDEX))
    cards.main(["--output", str(tmp_path / "cards")])
    assert (card / "length_extrapolation_small.png").read_bytes() == before
    title = TABLES["length_extrapolation"].title
    row = f"| {title} | 6 | 14 measured, 24 not run, 4 not supported |"
    assert row in (tmp_path / "cards" / "README.md").read_text()


def test_report_by_group(tmp_path, capsys):
    """A row is compared with the first row of its group, if that is in the plan."""
    rows = ["rope", "pope", "rope-1of8", "pope-1of8", "fox-1of2", "fox-1of8"]
    planned = plan(TABLES["token_budget"], output=tmp_path, small=True, rows=rows)
    for number, row in enumerate(rows):
        pretend_own(planned[row, "test"][0], 100 + number**2, [200 + number] * 5)
    script.main(["token_budget", "--small", "--report-only", "--output", str(tmp_path), "--rows", *rows])
    text = capsys.readouterr().out
    assert (
        "Differences to RoPE or PoPE or FoX, 1/2 of the tokens (the first row of the group), paired by seed:\n" in text
    )
    for row, test, others in (("RoPE", 4, 2), ("PoPE", 8, 2), ("FoX", 9, 1)):
        assert f"| {row}, 1/8 of the tokens | 1 | +{test}.0 |{f' +{others}.0 |' * 5}\n" in text
    assert (tmp_path / "token_budget_small.png").is_file()


def test_report_of_lift_off(tmp_path, capsys):
    planned = plan(TABLES["indirect_indexing"], output=tmp_path, small=True)
    for row, errors in {"pope": [0.02, 0.03, 0.55], "rope": [0.8]}.items():
        for run, error in zip(planned[row, "accuracy"], errors):
            pretend(run, error)
    script.main(["indirect_indexing", "--small", "--report-only", "--output", str(tmp_path)])
    text = capsys.readouterr().out
    for line in (
        "| system | column | seeds | solved | each seed | lifted off at step |",
        "| PoPE | Indirect Idx. | 3 of 8 | 2 of 3 | 98.0, 97.0, 45.0 | 300, 300, 500 |",
        "| RoPE | Indirect Idx. | 1 of 8 | 0 of 1 | 20.0 | never |",
        "| CoPE | Indirect Idx. | 0 of 3 | 0 of 0 | - | - |",
    ):
        assert f"{line}\n" in text, line
    assert "±" not in text
    assert "*Lifted off*: the first evaluation during training with at least 40 %" in text
    found = json.loads((tmp_path / "indirect_indexing_small.json").read_text())
    steps = planned["pope", "accuracy"][0].recipe.training.steps
    curves = drawing.curves(found)[""]
    expected = [(0, 1), (300, 2 / 3), (300, 1 / 3), (500, 0), (steps, 0)]
    assert [(x, pytest.approx(y)) for x, y, _ in curves["PoPE (n = 3)"]] == expected
    assert [(x, y) for x, y, _ in curves["RoPE (n = 1)"]] == [(0, 1), (steps, 1)]
    assert (tmp_path / "indirect_indexing_small.png").is_file()
    (planned["pope", "accuracy"][0].folder / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit, match="was not evaluated during training"):
        cli.main(["reproduce", "indirect_indexing", "--small", "--report-only", "--output", str(tmp_path)])


def test_report_of_music(tmp_path, capsys):
    """Figures have as many digits as the paper's; MAESTRO has no small version."""
    planned = plan(TABLES["pope_2"], output=tmp_path, small=True)
    for (row, _), (run,) in planned.items():
        pretend(run, {}, loss={"value": {"rope": 0.61234, "pope": 0.60001}[row]})
    script.main(["pope_2", "--small", "--report-only", "--output", str(tmp_path)])
    text = capsys.readouterr().out
    assert "| PoPE | JSB | 0.6000 | 1 of 1 | 0.4889 | agrees in order (1 of 1, 0 clear) |" in text
    assert "are left out:\n\n- MAESTRO (`maestro`)\n" in text
    assert "| MAESTRO |" not in text


def test_runs_that_cannot_be_the_paper_s_are_not_exact(tmp_path):
    table = TABLES["cope_5"]
    planned = plan(table, output=tmp_path, rows=["cope", "rope"])
    for run in unique(planned):
        pretend_text(run, 22.0, 4.0)
    found = report.collect(table, planned, small=False)
    assert found["scaled_down"] == {"wikitext103": [], "code_cope": []}
    assert {cell["column"]: cell["ours"]["exact"] for cell in found["cells"]} == {
        "validation": True,
        "test": True,
        "code": False,
    }
    text = report.markdown({**found, "command": "made up"})
    assert f"- `code_cope`: {table.columns[2].departs}" in text
    assert found["texts"] == [
        "EleutherAI/wikitext_document_level: licence not known",
        "source code of Python's standard library: PSF License",
    ]


@pytest.mark.parametrize(
    "folder", sorted(path.parent.name for path in CARDS.glob("*/results.json") if '"table":' in path.read_text())
)
def test_shipped_cards_are_those_of_their_results(folder):
    assert (CARDS / folder / "README.md").read_text(encoding="utf-8") == report.markdown(
        json.loads((CARDS / folder / "results.json").read_text(encoding="utf-8")), card=True
    )


def test_changed_recipe_is_refused(tmp_path):
    planned = plan(TABLES["pope_1"], output=tmp_path, seeds=1)
    pretend(planned["rope", "accuracy"][0], 0.1)
    arguments = ["pope_1", "--seeds", "1", "--output", str(tmp_path)]
    changed = [*arguments, "--set", "training.steps=5000"]
    with pytest.raises(SystemExit, match=r"training\.steps: 100000 → 5000"):
        cli.main(["reproduce", *changed, "--report-only"])
    # before anything is trained
    with pytest.raises(SystemExit, match="100000 → 5000"):
        cli.main(["reproduce", *changed])
    (planned["rope", "accuracy"][0].folder / "results.json").write_text("{")
    with pytest.raises(SystemExit, match="cannot be read"):
        cli.main(["reproduce", *arguments, "--report-only"])


def test_overridden_runs_are_not_exact(tmp_path):
    sets = ["training.batch_size=32"]
    planned = plan(TABLES["pope_1"], output=tmp_path, sets=sets)
    for cell, error in zip(planned.values(), (0.8884, 0.0518)):
        for run in cell:
            pretend(run, error)
    found = report.collect(TABLES["pope_1"], planned, small=False)
    assert {cell["verdict"]["text"] for cell in found["cells"]} == {ORDER}
    assert found["scaled_down"] == {"indirect_indexing": ["training.batch_size: 64 → 32"]}


def test_validation_perplexity(tmp_path):
    measure = TABLES["cope_8"].columns[0].figure
    lines = [{"step": 5, "validation_perplexity": 9.0}, {"step": 10, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="not evaluated after its last step"):
        measure({"steps": 10}, tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 10, "validation_perplexity": 8.5}) + "\n")
    assert measure({"steps": 10}, tmp_path) == 8.5
    # of the model that was kept
    assert measure({"steps": 10, "kept": {"step": 5, "validation_loss": 2.2}}, tmp_path) == 9.0


def test_what_the_best_is_chosen_from_matters(tmp_path):
    def changes(table, *sets):
        return unique(plan(TABLES[table], output=tmp_path, seeds=1, sets=sets, rows=["pope"]))[0].changes

    assert changes("pope_1", "evaluation.every=7", "evaluation.blocks=8") == ()
    assert changes("pope_1", "evaluation.every=7", "evaluation.blocks=8", "evaluation.keep=best") == (
        "evaluation.blocks: 2000 → 8",
        "evaluation.every: 5000 → 7",
        "evaluation.keep: None → 'best'",
    )
    every = load_recipe("jsb").evaluation.every
    assert changes("pope_2", "evaluation.every=7") == (f"evaluation.every: {every} → 7",)


# --- a real run

TINY = {
    "training.steps": 4,
    "training.warmup_steps": 1,
    "training.batch_size": 4,
    "data.test_samples": 8,
    "evaluation.every": 2,
    "evaluation.blocks": 8,
}


def test_interrupted_table_goes_on(tmp_path, monkeypatch, capsys):
    sets = [argument for key, value in TINY.items() for argument in ("--set", f"{key}={value}")]
    arguments = ["pope_1", "--small", "--seeds", "1", *sets, "--output", str(tmp_path)]
    train_step = TrainingRun.train_step

    def interrupted(self, batch):
        if self.recipe.model["position_encoding"] == "pope" and self.step == 1:
            signal.raise_signal(signal.SIGTERM)
        return train_step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "train_step", interrupted)
        with pytest.raises(SystemExit) as caught:
            cli.main(["reproduce", *arguments])
    assert caught.value.code == 128 + signal.SIGTERM
    again = shlex.join(["whatwhere", "reproduce", *arguments])
    assert f"with a checkpoint. Continue with: {again}\n" in capsys.readouterr().err
    assert not (tmp_path / "pope_1_small.json").exists()

    script.main([*arguments, "--dry-run"])
    listed = capsys.readouterr().out
    assert f"  done      {tmp_path}/indirect_indexing_small/rope-seed0\n" in listed
    assert f"  interrupted after step 2  {tmp_path}/indirect_indexing_small/pope-seed0\n" in listed
    assert "  rope, accuracy: 1 of 1\n  pope, accuracy: 0 of 1\n1 of 2 runs are done." in listed
    assert re.search(r"about [\d.]+ (s|min) for 1 runs that are not done", listed)

    made = []
    train = runs.train

    def noted(run, data_dir):
        made.append(run.folder.name)
        train(run, data_dir)

    monkeypatch.setattr(runs, "train", noted)
    script.main(arguments)
    assert made == ["pope-seed0"]
    found = json.loads((tmp_path / "pope_1_small.json").read_text())
    assert [len(cell["ours"]["seeds"]) for cell in found["cells"]] == [1, 1]
    results = json.loads((tmp_path / "indirect_indexing_small" / "pope-seed0" / "results.json").read_text())
    value = 100 - 100 * results["metrics"]["test_sets"]["in_distribution"]["token_error"]
    assert found["cells"][1]["ours"]["mean"] == pytest.approx(value)
    assert "--resume" in results["command"]
    script.main(arguments)
    assert len(made) == 1


OWN = """
tables:
  tiny:
    title: Tiny
    unit: perplexity per token
    notes: []
    seeds: 1
    columns:
      test: {label: Test, recipe: demo_rope, measure: perplexity}
      1x: {label: 1x, recipe: demo_rope, measure: length 1}
      2x: {label: 2x, recipe: demo_rope, measure: length 2}
      outside: {label: delta outside, recipe: demo_rope, measure: deltas outside}
    rows:
      absolute: {label: Absolute, system: [encoding absolute], figures: "? | ? | ? |"}
      pope: {label: PoPE, system: ["encoding pope {delta_init: uniform}"]}
"""


def test_lengths_are_measured_after_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "tables.yaml").write_text(OWN)
    monkeypatch.setitem(TABLES, "tiny", load_tables(tmp_path / "tables.yaml")["tiny"])
    monkeypatch.setattr(whatwhere_cli.reproduce, "read_yaml", lambda _: {"tables": {"tiny": {"title": "of this test"}}})
    (tmp_path / "data" / "pg19" / "test").mkdir(parents=True)
    for index in range(3):
        (tmp_path / "data" / "pg19" / "test" / f"{index}.txt").write_text("it was a dark and stormy night; " * 8)
    tiny = {
        "data.sequence_length": 32,
        "model.hidden_size": 16,
        "model.num_hidden_layers": 1,
        "training.steps": 2,
        "training.warmup_steps": 1,
        "evaluation.blocks": 2,
        "evaluation.final_blocks": 2,
    }
    sets = [argument for key, value in tiny.items() for argument in ("--set", f"{key}={value}")]
    arguments = ["tiny", *sets, "--output", str(tmp_path), "--data-dir", str(tmp_path / "data")]
    script.main(arguments)
    assert "| Absolute | 1 of 1 | " in (text := capsys.readouterr().out)
    path = tmp_path / "demo_rope" / "pope-seed0" / "length_pg19.json"
    cells = {cell["length"]: cell for cell in read_json(path)["checkpoints"][0]["cells"]}
    assert list(cells) == [32, 64]
    found = json.loads((tmp_path / "tiny.json").read_text())["cells"]
    values = {(cell["row"], cell["column"]): cell["ours"]["mean"] for cell in found}
    assert (values["pope", "1x"], values["pope", "2x"]) == (cells[32]["perplexity"], cells[64]["perplexity"])
    assert 0 <= values["pope", "outside"] <= 100
    assert values["absolute", "2x"] is None
    assert text.count("not supported") == 2

    # Complete measurements are used as they are, also with more lengths; a missing length is added.
    before = path.read_bytes()
    content = json.loads(before)
    entry = content["checkpoints"][0]
    entry["cells"].append({**entry["cells"][1], "length": 96, "multiple": 3.0})
    path.write_text(json.dumps(content))
    with monkeypatch.context() as patch:
        patch.setattr(measures.length, "main", None)
        script.main(arguments)
    assert json.loads(path.read_text()) == content
    del entry["cells"][0]
    path.write_text(json.dumps(content))
    script.main([*arguments, "--report-only"])
    assert "| PoPE | 1 of 1 | " in (text := capsys.readouterr().out)
    script.main(arguments)
    measured = read_json(path)["checkpoints"][0]["cells"]
    assert [(cell["length"], cell["perplexity"]) for cell in measured[:2]] == [
        (length, cell["perplexity"]) for length, cell in cells.items()
    ]
    content["data"]["text_tokens"] = 7
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"is of another text .*text_tokens: 7 → 20480"):
        cli.main(["reproduce", *arguments, "--report-only"])
