"""The check that a GPU's kernels must pass, run here by Triton's interpreter: it passes, and it can fail."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from tiny import slow_but
from whatwhere import kernel_cope, kernel_pope
from whatwhere.scripts import gpu_check
from whatwhere.scripts.benchmark import references
from whatwhere.scripts.benchmark.measure import CheckFailed
from whatwhere.scripts.benchmark.references import visible
from whatwhere.scripts.gpu_check import Case, Group, check_case, groups_on_cpu, groups_on_gpu, ranges_of

SMALL = Case(20, 24, batch=1, heads=2, groups=1, positions=8)


@pytest.mark.slow
def test_everything_that_needs_no_gpu(capsys):
    assert gpu_check.main(["--device", "cpu"]) == 0
    assert " 0 cases failed" in capsys.readouterr().out


@pytest.mark.parametrize("what", slow_but(["pope"], ["cope", "pope"]))
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


def scaled_sums(monkeypatch):
    """The gradient of gates, and what the table's is made of."""
    right = kernel_cope._running_sums
    monkeypatch.setattr(kernel_cope, "_running_sums", lambda *given: right(*given) * 1.001)


def scaled_steps(monkeypatch):
    """Interpolation between positions."""
    right = kernel_cope._interpolate

    def interpolate(*given):
        floor, fraction, below, step = right(*given)
        return floor, fraction, below, step * 1.001

    monkeypatch.setattr(kernel_cope, "_interpolate", interpolate)


def wrong_levels(monkeypatch):
    """The gradient of the table at floor and ceiling of each position are swapped."""
    right = kernel_cope._window_gradients

    def gradients(*given):
        *others, fraction = right(*given)
        return *others, 1.0 - fraction

    monkeypatch.setattr(kernel_cope, "_window_gradients", gradients)


def shifted_count(monkeypatch):
    """Positions of the backward pass are off by a thousandth."""
    right = kernel_cope._Pass.window_backward

    def backward(self, grad, delta, window):
        return right(self, grad, delta, window._replace(total=window.total + (1 << 21) // 1000))

    monkeypatch.setattr(kernel_cope._Pass, "window_backward", backward)


def one_row(monkeypatch):
    """The gradient of one row of one head."""
    right = kernel_cope._Pass.window_backward

    def backward(self, *given):
        results = right(self, *given)
        results[0][0, 1, 7] *= 1.02
        return results

    monkeypatch.setattr(kernel_cope._Pass, "window_backward", backward)


@pytest.mark.parametrize(
    "mutate", slow_but([scaled_steps, one_row], [scaled_sums, scaled_steps, wrong_levels, shifted_count, one_row])
)
def test_finds_small_mistakes_in_the_kernels(monkeypatch, mutate):
    mutate(monkeypatch)
    with pytest.raises(CheckFailed, match="is off by"):
        check_case(Group("cope", "float32", 16), SMALL, torch.device("cpu"))


def test_rounding_at_integers_is_no_mistake(monkeypatch):
    """Positions just above an integer may be taken for just below, where the slope is another one."""

    def kernel(query, key, value, table, *, gate_key, ranges, scaling, position_scale):
        seen = visible(query.shape[2], key.shape[2], torch.arange(query.shape[2]))
        logits = query @ key.transpose(2, 3) * scaling
        gates = torch.sigmoid(logits) * seen
        positions = gates.flip(-1).cumsum(-1).flip(-1)
        last = table.shape[1] - 1
        z = query @ table * position_scale
        floor = (positions.detach() - 4e-5).clamp(0, last).long()
        step = z.diff(dim=-1, append=z[..., -1:])
        logits = logits + z.gather(-1, floor) + (positions.clamp(max=last) - floor) * step.gather(-1, floor)
        return torch.softmax(logits.masked_fill(~seen, -1e30), -1) @ value

    monkeypatch.setattr(kernel_cope, "cope_attention", kernel)
    group, case = Group("cope", "float32", 16), Case(200, 200)
    assert check_case(group, case, torch.device("cpu"))[1] <= 1
    # Compared with these rows, it would be one.
    monkeypatch.setattr(references, "NEAR", 0.0)
    with pytest.raises(CheckFailed, match="is off by"):
        check_case(group, case, torch.device("cpu"))


def test_a_case_with_few_rows_to_compare_is_refused(monkeypatch):
    monkeypatch.setattr(references, "NEAR", 0.01)
    with pytest.raises(CheckFailed, match="rows are not compared: choose other inputs"):
        check_case(Group("cope", "float32", 16), Case(100, 100, batch=1, heads=1, groups=1), torch.device("cpu"))


@pytest.mark.parametrize("gates", ["key", "separate"])
def test_undecided_rows(gates):
    """Positions near integers from 1 to the last, of keys that the row sees."""
    query, key = torch.zeros(1, 1, 4, 1, dtype=torch.float64), torch.ones(1, 1, 4, 1, dtype=torch.float64)
    # Every gate of a row is alike: 1/2, nearly 1/2, 0.3, nearly 0.
    wanted = torch.tensor([0.5, 0.5 + 1e-7, 0.3, 1e-7], dtype=torch.float64)
    query[0, 0, :, 0] = wanted.logit()
    given = (query, key) if gates == "key" else (query, torch.zeros_like(key), key)
    options = {"scaling": 1.0, "num_positions": 3}
    found = references.undecided_rows(*given, rows=torch.arange(4), **options)
    # The first row sees one key, up to 0.5.
    assert found.tolist() == [[[False, True, False, False]]]
    ranges = torch.tensor([[0, 4]] * 4 + [[1, 0]] * 4, dtype=torch.int32)[None, None]
    found = references.undecided_rows(*given, rows=torch.arange(4), ranges=ranges, **options)
    assert found.tolist() == [[[True, True, False, False]]]


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
    ranges = ranges_of(mask, 2, queries, keys, torch.device("cpu"))
    seen = visible(queries, keys, torch.arange(queries), ranges=ranges)
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
        ranges_of("stripes", 1, 4, 4, torch.device("cpu"))


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
    case = Case(24, 24, batch=2, heads=1, groups=1, mask="padding", positions=8)
    checks, share = check_case(Group("cope", "float32", 16, (case,)), case, torch.device("cpu"))
    assert checks == 6
    assert share <= 1
