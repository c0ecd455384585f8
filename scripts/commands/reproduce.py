"""`whatwhere reproduce`: makes a table of the papers; see `reproduction/runs.py` and `reproduction/report.py`."""

import argparse
import os
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING

from ..evaluation.results import check_writable, provenance
from ..training.errors import reported
from .common import command_parser

if TYPE_CHECKING:
    from ..reproduction.runs import Run

TABLES = {
    "CoPE (2405.18719)": "cope_2, cope_3, cope_4, cope_5, cope_7, cope_8, cope_9, cope_10",
    "PoPE (2509.10534)": "pope_1, pope_2, pope_3, pope_4, pope_8, pope_indexing",
}
DESCRIPTION = f"""Train what a table of the papers needs, and print our figures beside the paper's.

On a laptop:  whatwhere reproduce cope_2 --small
On GPUs:      accelerate launch -m whatwhere reproduce cope_2

{chr(10).join(f"{paper}: {names}" for paper, names in TABLES.items())}

Each run is one of `whatwhere train` in OUTPUT/<recipe>/<row>[-<variant>]-seed<k>. Finished runs are reused, interrupted
ones continue. The report goes to OUTPUT/<TABLE>[_small].md and .json."""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = command_parser("reproduce", "TABLE [OPTIONS]", DESCRIPTION)
    tables = ", ".join(TABLES.values()).split(", ")
    result.add_argument("table", choices=tables, metavar="TABLE", help="cope_<n> or pope_<n>: the number in the paper")
    result.add_argument("--small", action="store_true", help="the small recipes")
    result.add_argument("--seeds", type=int, metavar="N", help="runs per system; default: as in the paper")
    result.add_argument("--rows", nargs="+", metavar="ROW", help="only these rows; --dry-run shows their names")
    result.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a recipe key that the table does not decide",
    )
    result.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs"), metavar="DIR", help="default runs")
    result.add_argument("--data-dir", metavar="DIR", help="the folder of local data; default $WHATWHERE_DATA_DIR")
    result.add_argument("--cards", type=pathlib.Path, metavar="DIR", help="copy the report there, as a model card")
    mode = result.add_mutually_exclusive_group()
    mode.add_argument("--report-only", action="store_true", help="train nothing")
    mode.add_argument("--dry-run", action="store_true", help="train and write nothing, list what is done and missing")
    return result


def estimate(planned: "dict[tuple[str, str], list[Run]]") -> str:
    """Returns a line with the estimated time of the unfinished runs: as finished ones of the same recipe, or timed."""
    from ..reproduction import runs
    from ..training.estimate import describe_seconds, estimate_seconds

    wanted = runs.unique(planned)

    def system(run: "Run") -> str:
        return str({**run.recipe.resolved(), "seed": None})

    done = {system(run): float(results["seconds"]) for run in wanted if (results := run.results()) is not None}
    missing = [run for run in wanted if run.state() != "done"]
    seconds: dict[str, float | None] = dict(done)
    for run in missing:
        if system(run) not in seconds:
            seconds[system(run)] = estimate_seconds(run.recipe)
    known = [value for run in missing if (value := seconds[system(run)]) is not None]
    if not missing:
        return "Nothing is missing."
    unknown = len(missing) - len(known)
    parts = [f"about {describe_seconds(sum(known))} for {len(known)} runs that are not done"] if known else []
    parts += [f"{unknown} runs are not estimated: their models are too large to be timed here"] if unknown else []
    return f"Time on this machine, in one process: {'; '.join(parts)}."


def listing(planned: "dict[tuple[str, str], list[Run]]", left_out: dict[str, str]) -> str:
    """Returns a line for every run, with its state and its command, and one for every cell and column left out."""
    from ..reproduction import runs

    states = {run.folder: run.state() for run in runs.unique(planned)}
    lines = ["Runs:"]
    for run in runs.unique(planned):
        lines.append(f"  {states[run.folder]:<8}  {run.folder}")
        lines.append(f"  {'':<8}  {run.command()}")
    lines.append("Cells (row, column, finished seeds):")
    for (row, column), cell in planned.items():
        done = sum(states[run.folder] == "done" for run in cell)
        lines.append(f"  {row}, {column}: {done} of {len(cell)}")
    lines += [f"  {label}: left out, {recipe} has no small version for it" for label, recipe in left_out.items()]
    done = sum(state == "done" for state in states.values())
    return "\n".join([*lines, f"{done} of {len(states)} runs are done."])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(arguments)
    # Set by torchrun and accelerate launch: every process trains, one speaks.
    speaks = int(os.environ.get("RANK", "0")) == 0
    with reported(lambda: f"Continue with the same command:\n\n    whatwhere reproduce {shlex.join(arguments)}"):
        from ..reproduction import report, runs
        from ..reproduction.tables import TABLES

        table = TABLES[options.table]
        chosen = {"small": options.small, "seeds": options.seeds, "rows": options.rows, "sets": options.set}
        planned = runs.plan(table, output=options.output, **chosen)
        if options.dry_run:
            if speaks:
                print(listing(planned, report.left_out(table) if options.small else {}), flush=True)
                print(estimate(planned))
            return
        # A report of nothing must not take the place of an earlier one.
        if options.report_only and not any(run.state() == "done" for run in runs.unique(planned)):
            raise runs.ReproduceError(
                f"--report-only is not valid: no run of {table.name} is finished in {str(options.output)!r}. "
                "--dry-run shows where they are looked for."
            )
        check_writable(options.output)
        if not options.report_only:
            train_all(planned, options.data_dir, speaks)
        if speaks:
            found = report.collect(table, planned, small=options.small) | provenance("reproduce", arguments)
            written = [report.write(found, options.output)]
            if options.cards:
                written.append(report.write_card(found, options.cards))
            print(report.markdown(found))
            print(f"Written: {', '.join(map(str, written))}")


def train_all(planned: "dict[tuple[str, str], list[Run]]", data_dir: str | None, speaks: bool) -> None:
    """Trains every run that is not done."""
    from ..reproduction import runs

    wanted = runs.unique(planned)
    last = [run for run in wanted if run.state() != "done"][-1:]
    for number, run in enumerate(wanted, 1):
        state = run.state()
        if speaks:
            print(f"run {number} of {len(wanted)}, {state}: {run.folder}", flush=True)
        if state != "done":
            runs.train(run, data_dir, end=run in last)
