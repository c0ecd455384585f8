"""The check that a GPU's kernels must pass, run here by Triton's interpreter: it passes, and it can fail."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from whatwhere import kernel_cope, kernel_pope
from whatwhere.scripts import gpu_check
from whatwhere.scripts.benchmark.references import visible
from whatwhere.scripts.gpu_check import Case, Group, check_case, groups_on_cpu, groups_on_gpu, limits_of

SMALL = Case(20, 24, batch=1, heads=2, groups=1, positions=8)


def test_everything_that_needs_no_gpu(capsys):
    assert gpu_check.main(["--device", "cpu"]) == 0
    assert " 0 cases failed" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["cope", "pope"])
@pytest.mark.parametrize("mistake", ["wrong", "not written", "differs", "gradient"])
def test_finds_mistakes(monkeypatch, capsys, what, mistake):
    """Of the output and of a gradient; memory that is not written; results that differ from run to run."""
    module, name = (kernel_cope, "cope_attention") if what == "cope" else (kernel_pope, "pope_attention")
    right = getattr(module, name)

    def kernel(query, *inputs, **options):
        if mistake == "gradient":
            # The value stays, the gradient of the queries doubles.
            return right(2 * query - query.detach(), *inputs, **options)
        out = right(query, *inputs, **options)
        if mistake == "wrong":
            return out * 1.01
        if mistake == "not written":
            hole = torch.empty(3, dtype=out.dtype)
            return torch.cat([out[..., :3] * 0 + hole, out[..., 3:]], -1)
        return out + 1e-6 * torch.rand_like(out)

    monkeypatch.setattr(module, name, kernel)
    monkeypatch.setattr(gpu_check, "groups_on_cpu", lambda: iter([Group(what, "float32", 16, (SMALL,), rotated=8)]))
    assert gpu_check.main(["--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert "1 FAILED" in captured.out
    expected = {"wrong": "output is off", "gradient": "dq is off"}.get(mistake, "differs between two runs")
    assert expected in captured.err


def test_memory_is_poisoned():
    with gpu_check.Poisoned():
        assert torch.empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(capsys, monkeypatch):
    """Nothing is pretended."""
    monkeypatch.delenv("TRITON_INTERPRET")
    for arguments, text in (([], "finds no CUDA device"), (["--device", "cpu"], "TRITON_INTERPRET=1")):
        with pytest.raises(SystemExit) as exit_:
            gpu_check.main(arguments)
        assert exit_.value.code == 2
        assert text in capsys.readouterr().err


def test_only_names_something(capsys):
    assert gpu_check.main(["--device", "cpu", "--only", "nothing"]) == 2


@pytest.mark.parametrize("mask", gpu_check.MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(12, 12), (5, 12), (1, 12)])
def test_masks(mask, queries, keys):
    """Limits, against what they say in words; some rows of padding see nothing."""
    limits = limits_of(mask, 2, queries, keys, torch.device("cpu"))
    seen = visible(queries, keys, torch.arange(queries), limits=limits)
    for entry in range(2):
        for row in range(queries):
            slot = keys - queries + row
            for key in range(keys):
                padded = {
                    "padding": (lambda j, entry=entry: j < keys // 3 if entry == 0 else j >= keys - keys // 4),
                    "holes": (lambda j: j % 7 == 3),
                    "packed": (lambda j: False),
                }[mask]
                starts = [start for start in (0, keys // 5, keys // 2, keys // 2 + 1) if mask == "packed" or not start]
                same = max(s for s in starts if s <= slot) == max(s for s in starts if s <= key)
                expected = key <= slot and same and not padded(key) and not padded(slot)
                assert bool(seen[entry, 0, row, key]) == expected, (entry, row, key)


def test_limits_of_an_unknown_mask():
    with pytest.raises(ValueError, match="'stripes'"):
        limits_of("stripes", 1, 4, 4, torch.device("cpu"))


def test_groups():
    """Every kind of check that a GPU gets is tried here; every mask, type and gate is among a GPU's."""
    gpu, cpu = list(groups_on_gpu()), list(groups_on_cpu())
    assert {group.what for group in gpu} == {*(group.what for group in cpu), "model cope+rope"}
    assert {case.mask for group in gpu for case in group.cases} == {"causal", *gpu_check.MASKS}
    assert {group.dtype for group in gpu} == {"float32", "bfloat16", "float16"}
    assert {group.gate for group in gpu} == {"key", "separate", "value"}
    assert {case.gates for group in gpu for case in group.cases} == {"half", "open", "closed"}
    assert len({str(group) for group in gpu}) == len(gpu)


def test_rows_that_see_nothing():
    """Both references and kernels give 0 there; the check covers it."""
    case = Case(24, 24, batch=2, heads=2, groups=2, mask="padding", positions=8)
    checks, share = check_case(Group("cope", "float32", 16, (case,)), case, torch.device("cpu"))
    assert checks == 6
    assert share <= 1
