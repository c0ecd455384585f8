"""Follows CONTRIBUTING's steps for a new encoding in a copy of the tree; the contract tests must pass for it."""

import pathlib
import re
import shutil
import textwrap

from processes import python

ROOT = pathlib.Path(__file__).parent.parent
# Of the contract: what uses each implementation, caches, saving and gradients.
TESTS = "implementations_agree or cached_decoding or causality or save_and_load or every_parameter or left_padding"


def test_the_example_of_contributing_holds_the_contract(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"   ```python\n(.*?)   ```\n", text, flags=re.DOTALL)
    code = textwrap.dedent(code)
    assert len(code.splitlines()) <= 60
    package = tmp_path / "whatwhere"
    shutil.copytree(ROOT / "modeling", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("configuration", "scripts"):
        (package / name).symlink_to(ROOT / name)
    (package / "position_log_distance.py").write_text(code, encoding="utf-8")
    registry = package / "position_registry.py"
    source = registry.read_text(encoding="utf-8")
    source = source.replace(
        "from .position_none import", "from .position_log_distance import LogDistance\nfrom .position_none import"
    ).replace("        ALiBi,\n", "        ALiBi,\n        LogDistance,\n")
    registry.write_text(source, encoding="utf-8")

    options = ["-p", "no:cacheprovider", "-m", "slow or not slow", "-k", f"log_distance and ({TESTS})"]
    tests = ROOT / "tests" / "test_contract.py"
    said = python("-m", "pytest", "-q", *options, tests, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 12
