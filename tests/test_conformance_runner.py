"""The runner of Transformers' common tests (`make conformance`), without the tests themselves."""

import importlib.util
import io
import pathlib
import subprocess
import tarfile

import pytest

spec = importlib.util.spec_from_file_location(
    "conformance_run", pathlib.Path(__file__).parent / "conformance" / "run.py"
)
run = importlib.util.module_from_spec(spec)
spec.loader.exec_module(run)


def test_report_counts_what_stock_passes_and_ours_does_not():
    stock = {"test_a": ("passed", ""), "test_b": ("passed", ""), "test_c": ("failed", "also stock")}
    ours = {"test_a": ("failed", "wrong\nlogits"), "test_b": ("skipped", "no RoPE"), "test_c": ("failed", "also stock")}
    report, worse = run.make_report({"llama:stock": stock, "llama:cope": ours})
    assert worse == 1
    assert "| llama | stock | 2 | 1 | 0 | 0 | 0 |" in report
    assert "| llama | cope | 0 | 2 | 1 | 1 | 1 |" in report
    assert "- llama:cope `test_a` (stock passed): wrong" in report
    assert "- `test_b`: no RoPE (llama:cope)" in report
    assert run.make_report({"llama:stock": stock, "llama:rope": stock})[1] == 0


def test_tests_are_fetched_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def pip(command, check):
        calls.append(command)
        with tarfile.open(tmp_path / "transformers-1.2.tar.gz", "w:gz") as archive:
            for name in ("tests/test_modeling_common.py", "tests/models/test_deep.py", "src/other.py"):
                member = tarfile.TarInfo(f"transformers-1.2/{name}")
                archive.addfile(member, io.BytesIO())

    monkeypatch.setattr(run, "CACHE", tmp_path)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        package = run.fetch_tests("1.2") / "transformers_tests"
    assert len(calls) == 1
    assert calls[0][-1] == "transformers==1.2"
    found = {path.relative_to(package).as_posix() for path in package.rglob("*.py")}
    stand_ins = {"distributed_testing_utils.py", "exporters/test_export.py", "generation/test_utils.py"}
    assert found == {"test_modeling_common.py"} | stand_ins
