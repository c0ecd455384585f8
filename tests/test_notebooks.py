"""The notebooks of docs/ run from top to bottom, and are kept with their outputs."""

import json
import pathlib

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
notebooks = pytest.mark.parametrize("path", sorted(DOCS.glob("*.ipynb")), ids=lambda path: path.stem)


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@notebooks
def test_outputs_are_kept(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    kinds = {output.get("name", output["output_type"]) for output in outputs}
    # Printed numbers and a figure, but no warning or error.
    assert kinds == {"stdout", "display_data"}
    assert path.stat().st_size < 100_000


@pytest.mark.slow
@notebooks
def test_runs(path):
    names = {"__name__": "__main__"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
    if path.stem == "compare_encodings":
        results = names["results"]
        # Beyond the trained length rope gets worse, and cope stays where it was.
        assert results["rope"][-1] > results["rope"][0] + 0.5
        assert results["cope"][-1] < results["cope"][0] + 0.3
    else:
        assert names["maps"].layers == [0, 1]
