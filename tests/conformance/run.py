"""Runs the common model tests of the installed Transformers on every encoding of both families.

    make conformance
    make conformance CONFORMANCE="--encodings cope pope --families llama -k save_load"
    make conformance CONFORMANCE="--encodings cope --families llama -k 'test_tp_ or fsdp2_save' --distributed"

The tests are not in the installed package: the source distribution of the same version is fetched once, by pip, and
kept in `.conformance/`. They run for the stock models too. A test that the stock model of the family passes must not
fail for ours: the table counts those that do, and the exit code is 1 if there are any. The lines after the table name
what failed, and what is skipped (the RoPE tests skip a model that does not rotate). The report is also
written to `.conformance/report.md`, pytest's output to `.conformance/log.txt`.

Not run, because the distribution does not hold them: the generation, export and pipeline tests.
"""

import argparse
import collections
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree

import transformers

import whatwhere

HERE = pathlib.Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".conformance"
FAMILIES = ("llama", "gpt2")
# Outcomes of a subject's tests: {test: (outcome, reason)}.
Outcomes = dict[str, tuple[str, str]]


def fetch_tests(version: str) -> pathlib.Path:
    """Returns a folder with the tests as the package `transformers_tests`; downloads them if necessary."""
    folder = CACHE / f"transformers-{version}"
    package = folder / "transformers_tests"
    if not package.is_dir():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "--no-build-isolation",
        ]
        subprocess.run([*command, "--dest", str(CACHE), f"transformers=={version}"], check=True)
        partial = folder / "partial"
        partial.mkdir(parents=True, exist_ok=True)
        with tarfile.open(CACHE / f"transformers-{version}.tar.gz") as archive:
            for member in archive:
                if re.fullmatch(r"transformers-[^/]*/tests/test_\w+\.py", member.name):
                    content = archive.extractfile(member)
                    assert content is not None, f"{member.name} is not a file"
                    (partial / pathlib.Path(member.name).name).write_bytes(content.read())
        partial.rename(package)
    shutil.copytree(HERE / "stand_ins", package, dirs_exist_ok=True)
    return folder


def run_tests(folder: pathlib.Path, subjects: list[str], options: argparse.Namespace) -> dict[str, Outcomes]:
    """Runs the tests of the subjects; returns their outcomes."""
    report = CACHE / "report.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "CONFORMANCE_SUBJECTS": " ".join(subjects),
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        "CONFORMANCE_DISTRIBUTED": "1" if options.distributed else "",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(HERE / "suite.py"),
        "-q",
        "--tb=short",
        "--durations=25",
        "-n",
        str(options.workers),
    ]
    # Warnings of the tests themselves are not ours.
    command += [f"--junitxml={report}", "-o", "filterwarnings=", "-o", "addopts=", "--disable-warnings"]
    command += ["-k", options.keyword] if options.keyword else []
    with open(CACHE / "log.txt", "w", encoding="utf-8") as log:
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
    if code not in (0, 1):
        raise SystemExit(f"pytest failed (exit code {code}); see {log.name}")
    outcomes: dict[str, Outcomes] = {subject: {} for subject in subjects}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        subject = case.get("classname", "").rpartition("suite.")[2]
        outcome, reason = "passed", ""
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                outcome = "skipped" if child.tag == "skipped" else "failed"
                reason = " ".join((child.get("message") or "").split())
        # A test with subtests may be listed more than once.
        if outcomes[subject].get(case.get("name", ""), ("", ""))[0] != "failed":
            outcomes[subject][case.get("name", "")] = (outcome, reason)
    return outcomes


def make_report(outcomes: dict[str, Outcomes]) -> tuple[str, int]:
    """Returns the report, in Markdown, and the number of tests that fail for ours and pass for stock."""
    rows = ["| family | encoding | passed | failed | skipped | stock passes, ours fails | stock passes, ours skips |"]
    rows += ["|---|---|--:|--:|--:|--:|--:|"]
    failures, skips = [], collections.defaultdict(list)
    worse = 0
    for subject, tests in outcomes.items():
        family, encoding = subject.split(":")
        stock = outcomes[f"{family}:stock"]
        count = collections.Counter(outcome for outcome, _ in tests.values())
        against = collections.Counter()
        for name, (outcome, reason) in sorted(tests.items()):
            if stock[name][0] == "passed":
                against[outcome] += 1
            if outcome == "failed":
                failures.append(f"- {subject} `{name}` (stock {stock[name][0]}): {reason[:300]}")
            elif outcome == "skipped" and stock[name][0] == "passed":
                skips[f"`{name}`: {reason[:200]}"].append(subject)
        worse += against["failed"]
        numbers = (count["passed"], count["failed"], count["skipped"], against["failed"], against["skipped"])
        rows.append(f"| {family} | {encoding} | {' | '.join(map(str, numbers))} |")
    title = f"Common model tests of transformers {transformers.__version__}, whatwhere {whatwhere.__version__}"
    parts = [title, "", *rows]
    if failures:
        parts += ["", "Failed:", "", *failures]
    if skips:
        parts += ["", "Skipped, though the stock model passes it:", ""]
        parts += [f"- {test} ({', '.join(subjects)})" for test, subjects in skips.items()]
    return "\n".join(parts), worse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = whatwhere.list_position_encodings()
    parser.add_argument("--encodings", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("-k", dest="keyword", help="run the tests whose name matches, as in pytest")
    parser.add_argument("-n", dest="workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--distributed", action="store_true", help="also the tests that start several processes (slow)")
    options = parser.parse_args()
    folder = fetch_tests(transformers.__version__)
    subjects = [f"{family}:{name}" for family in options.families for name in ("stock", *options.encodings)]
    report, worse = make_report(run_tests(folder, subjects, options))
    (CACHE / "report.md").write_text(report + "\n", encoding="utf-8")
    print(report)
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
