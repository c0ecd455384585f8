"""`whatwhere reproduce`: makes a table of the papers or of ours; see `reproduction/runs.py` and `report.py` there."""

from whatwhere_cli.reproduce import OWN, parser

from ..evaluation.results import provenance
from ..processes import is_first_process
from ..progress import describe_seconds
from ..reproduction import measures, report, runs
from ..reproduction.runs import PlannedRun
from ..reproduction.tables import TABLES, Table
from ..training.plan import estimate_seconds
from ..writing import check_writable


def estimate(planned: dict[tuple[str, str], list[PlannedRun]]) -> str:
    """Returns a message with the estimated time of the unfinished runs."""
    missing = [run for run in runs.unique(planned) if run.state() != "done"]
    if not missing:
        return "All runs are done."
    # Runs that differ in the seed take the same time.
    systems = [str({**run.recipe.resolved(), "seed": None}) for run in missing]
    seconds = {system: estimate_seconds(run.recipe) for system, run in dict(zip(systems, missing)).items()}
    known = [value for system in systems if (value := seconds[system]) is not None]
    parts = [f"about {describe_seconds(sum(known))} for {len(known)} runs that are not done"] if known else []
    if unknown := len(missing) - len(known):
        parts.append(f"{unknown} runs are not estimated, because their models are too large")
    return f"Time on this machine, in one process: {'; '.join(parts)}."


def listing(planned: dict[tuple[str, str], list[PlannedRun]], left_out: dict[str, str]) -> str:
    """Lists every run with its state and command, the cells, and the columns that are left out."""
    states, lines = {}, ["Runs:"]
    for run in runs.unique(planned):
        states[run.folder] = run.state()
        lines += [f"  {states[run.folder]:<8}  {run.folder}", f"  {'':<8}  {run.command()}"]
    lines.append("Cells (row, column, finished seeds):")
    for (row, column), cell in planned.items():
        done = sum(states[run.folder] == "done" for run in cell)
        lines.append(f"  {row}, {column}: {done} of {len(cell)}")
    lines += [f"  {label}: left out, {recipe} has no small version for it" for label, recipe in left_out.items()]
    done = sum(state == "done" for state in states.values())
    return "\n".join([*lines, f"{done} of {len(states)} runs are done."])


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    options = parser().parse_args(arguments)
    # All processes of torchrun or accelerate launch train, and the first prints.
    is_first = is_first_process()
    if options.table in OWN:
        # Need peft.
        from ..reproduction import conversion_table, pretrained_table

        chosen_table = conversion_table if options.table == "conversion" else pretrained_table
        chosen_table.main(options, arguments)
        return
    table = TABLES[options.table]
    chosen = {"small": options.small, "seeds": options.seeds, "rows": options.rows, "sets": options.set}
    planned = runs.plan(table, output=options.output, **chosen)
    if options.dry_run:
        if is_first:
            print(listing(planned, report.left_out(table) if options.small else {}), flush=True)
            print(estimate(planned))
        return
    # An empty report must not replace an earlier one.
    if options.report_only and not any(run.state() == "done" for run in runs.unique(planned)):
        raise ValueError(
            f"--report-only is not valid: no run of {table.name} is finished in {str(options.output)!r}. "
            "--dry-run lists the folders."
        )
    check_writable(options.output)
    name = report.name_of({"table": table.name, "small": options.small})
    if options.cards:
        wanted = [run for run in runs.unique(planned) if not options.report_only or run.state() == "done"]
        report.check_replaces(options.cards / name / "results.json", wanted)
    if not options.report_only:
        train_all(table, planned, options.data_dir, is_first)
    if is_first:
        found = report.collect(table, planned, small=options.small) | provenance("reproduce", arguments)
        text = report.markdown(found)
        written = [report.write(found, text, options.output / f"{name}.md", f"{name}.json")]
        if options.cards:
            readme = options.cards / name / "README.md"
            written.append(report.write(found, report.markdown(found, card=True), readme, "results.json"))
        print(text)
        print(f"Written: {', '.join(map(str, written))}")


def train_all(
    table: Table, planned: dict[tuple[str, str], list[PlannedRun]], data_dir: str | None, is_first: bool
) -> None:
    """Trains all runs that are not done, and measures each at the lengths of the table."""
    wanted = runs.unique(planned)
    for number, run in enumerate(wanted, 1):
        state = run.state()
        if is_first:
            print(f"run {number} of {len(wanted)}, {state}: {run.folder}", flush=True)
        if state != "done":
            runs.train(run, data_dir)
        measures.measure_lengths(run.folder, table.multiples, data_dir)
