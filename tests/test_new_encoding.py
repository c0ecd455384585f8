"""Follows CONTRIBUTING's steps for a new encoding in a copy of the tree: the contract and the tests of tables pass."""

import pathlib
import re
import shutil
import textwrap

from processes import python

ROOT = pathlib.Path(__file__).parent.parent
# Step 4: the row after that of the encoding before.
ROW = (
    "| `log_distance` | learned penalty of the logarithm of the distance | Chi et al. 2022 (2205.09921) "
    "| blockwise, sdpa, flex_attention, eager |\n"
)


def test_the_example_of_contributing_holds_the_contract(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"   ```python\n(.*?)   ```\n", text, flags=re.DOTALL)
    code = textwrap.dedent(code)
    assert len(code.splitlines()) <= 60
    package = tmp_path / "whatwhere"
    ignored = shutil.ignore_patterns("__pycache__")
    for name, place in (("modeling", "whatwhere"), ("docs", "docs"), ("tests", "tests")):
        shutil.copytree(ROOT / name, tmp_path / place, ignore=ignored)
    for name in ("configuration", "scripts"):
        (package / name).symlink_to(ROOT / name)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (package / "position_log_distance.py").write_text(code, encoding="utf-8")
    registry = package / "position_registry.py"
    source = registry.read_text(encoding="utf-8")
    source = source.replace(
        "from .position_none import", "from .position_log_distance import LogDistance\nfrom .position_none import"
    ).replace("        ALiBi,\n", "        ALiBi,\n        LogDistance,\n")
    registry.write_text(source, encoding="utf-8")
    page = tmp_path / "docs" / "encodings.md"
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    (before,) = (index for index, line in enumerate(lines) if line.startswith("| `alibi` |"))
    page.write_text("".join([*lines[: before + 1], ROW, *lines[before + 1 :]]), encoding="utf-8")

    options = {"env": {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    python(tmp_path / "tests" / "engine_matrix.py", **options)
    tests = [tmp_path / "tests" / name for name in ("test_contract.py", "test_docs.py")]
    chosen = ["-p", "no:cacheprovider", "-m", "not slow", "-k", "log_distance or the_table"]
    said = python("-m", "pytest", "-q", *chosen, *tests, **options)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 30
