"""The cases of `whatwhere gpu-check`, each against full matrices in float64: a GPU's where there is one."""

import pytest
import torch

pytest.importorskip("triton")

from whatwhere.scripts.commands.gpu_check import groups_on_cpu, groups_on_gpu

CASES = [
    pytest.param(group, one, id=f"{group.name}: {one}")
    for group in (groups_on_gpu if torch.cuda.is_available() else groups_on_cpu)()
    for one in group.cases
]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "one"), CASES)
def test_equals_float64(group, one, device):
    """Twice the same, new memory is NaN, all tiles or the first ones."""
    if device.type == "cpu" and torch.cuda.is_available():
        pytest.skip("the cases are a GPU's: unset TRITON_INTERPRET")
    group.check(one, device, group.all_tiles)
