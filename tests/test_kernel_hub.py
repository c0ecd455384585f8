"""`whatwhere kernel-hub`: what it writes, and that the package `kernels` loads it without whatwhere."""

import ast
import importlib.util
import re
import sys

import pytest
import torch

pytest.importorskip("triton")

from processes import python
from test_kernel_cope import inputs as cope_inputs
from test_kernel_cope import reference as cope_reference
from test_kernel_pope import inputs as pope_inputs
from test_kernel_pope import reference as pope_reference
from whatwhere.scripts import cli

FUNCTIONS = ["cope_attention", "plain_attention", "pope_attention"]
PACKAGE = "torch-ext/whatwhere_attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Everything that the command writes."""
    path = tmp_path_factory.mktemp("hub") / "attention"
    cli.main(["kernel-hub", str(path), "--repo-id", "someone/attention", "--build"])
    return path


def test_files(folder):
    assert {path.name for path in folder.iterdir()} == {
        *("build", "build.toml", "CARD.md", "flake.nix", "README.md", "torch-ext")
    }
    build = (folder / "build.toml").read_text()
    assert "edition = 5" in build
    assert "[torch-noarch]" in build
    assert 'repo-id = "someone/attention"' in build
    # kernel-builder writes this file itself.
    assert not (folder / PACKAGE / "_ops.py").exists()
    for variant in (folder / "build").iterdir():
        for source in (folder / PACKAGE).iterdir():
            assert (variant / source.name).read_text() == source.read_text()


def test_sources_fit_the_hub(folder):
    """Relative imports, the standard library, PyTorch and Triton only; operators have the prefix of the build."""
    operators = 0
    for path in (folder / PACKAGE).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
                assert roots <= {*sys.stdlib_module_names, "torch", "triton"}, path.name
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 1 or node.module.split(".")[0] in sys.stdlib_module_names, path.name
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.library.custom_op":
                operators += 1
                name = ast.unparse(node.args[0])
                assert re.fullmatch(r"add_op_namespace_prefix\(f'{name}_\w+'\)", name), path.name
    assert operators == 3


def test_the_folder_must_be_empty(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        cli.main(["kernel-hub", str(tmp_path)])
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# A process in which whatwhere cannot be imported: arguments of the functions in, outputs and gradients out.
WORKER = """
import pathlib, sys

sys.modules["whatwhere"] = None

import kernels, torch
from kernels._rust import Build, Digest, DigestAlgorithm

torch.set_num_threads(1)
folder, cases = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
assert len(Build.open(folder).general.backends) == 2
kernel = kernels.get_local_kernel(folder, backend="cpu")
(loaded,) = kernels.get_loaded_kernels()
loaded.metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder / "build" / "torch-cpu"))
for operator in ("cope_forward", "plain_forward", "pope_forward"):
    assert hasattr(getattr(torch.ops, loaded.metadata.id), operator)
found = {"__all__": kernel.__all__}
for name, (arguments, leaves, grad, options) in torch.load(cases).items():
    out = getattr(kernel, name)(*arguments, **options)
    found[name] = (out.detach(), *torch.autograd.grad(out, leaves, grad))
torch.save(found, cases)

# The example of the README, on the CPU.
kernels.get_kernel = lambda *_, **__: kernel
example = (folder / "README.md").read_text().split("```python")[1].split("```")[0]
exec(example.replace('device="cuda"', 'device="cpu"').replace("4, 128, 64", "1, 16, 64"))
"""


def plain_reference(query, key, value, scaling):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )


def test_loads_and_computes(folder, tmp_path):
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("the package `kernels` is not installed: pip install kernels")
    cope = cope_inputs(1, 2, 1, 16, 16, 16, positions=6)[:4]
    pope = pope_inputs((1, 2, 1, 16, 16, 16, 8))
    cases = {
        "cope_attention": (cope, cope, torch.randn(1, 2, 16, 16), {"scaling": 0.25, "position_scale": 1.0}),
        "plain_attention": (cope[:3], cope[:3], torch.randn(1, 2, 16, 16), {"scaling": 0.25}),
        "pope_attention": (pope, [*pope[:3], pope[3][4]], torch.randn(1, 2, 16, 16), {"scaling": 0.4}),
    }
    file = tmp_path / "cases.pt"
    torch.save(cases, file)
    python("-c", WORKER, folder, file, cwd=tmp_path, env={"TRITON_INTERPRET": "1"})
    found = torch.load(file)
    assert found.pop("__all__") == FUNCTIONS
    assert list(found) == list(cases)
    for name, (_, leaves, grad, options) in cases.items():
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        if name == "cope_attention":
            expected = cope_reference(*exact, **options)
        elif name == "plain_attention":
            expected = plain_reference(*exact, **options)
        else:
            expected = pope_reference(*exact[:3], (*pope[3][:4], exact[3]), None, **options)
        wanted = [expected, *torch.autograd.grad(expected, exact, grad.double())]
        for ours, truth in zip(found[name], wanted):
            error = (ours.double() - truth).norm() / torch.maximum(truth.norm(), 0.1 * grad.norm())
            assert error <= 2e-5, f"{name}: {error:.2g}"
