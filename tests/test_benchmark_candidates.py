"""The benchmark's candidates, run by Triton's interpreter, equal the kernels."""

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.attention.flex_attention as flex

from tiny import slow_but
from whatwhere import kernel_launch
from whatwhere.kernel_cope import cope_attention
from whatwhere.scripts.benchmark import candidates
from whatwhere.scripts.benchmark.attention import Workload
from whatwhere.scripts.benchmark.measure import Shape

pytestmark = pytest.mark.skipif(not kernel_launch.INTERPRETED, reason="runs in the interpreter: TRITON_INTERPRET=1")

SHAPES = {"grouped": (1, 2, 1, 150, 150, 16, 8), "longer-keys": (2, 2, 2, 200, 300, 16, 6)}


@pytest.mark.filterwarnings("ignore:.*flex_attention")
@pytest.mark.parametrize("name", slow_but(["grouped"], SHAPES))
@pytest.mark.parametrize("candidate", [candidates.cope_flex, candidates.cope_on_chip])
def test_cope(name, candidate, monkeypatch):
    # Gradients on a CPU are refused, but exist without compilation.
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    right, launched = candidates.launch, []
    monkeypatch.setattr(candidates, "launch", lambda *given: launched.append(given[0]) or right(*given))
    B, H, G, Q, K, D, P = SHAPES[name]
    inputs = [torch.randn(B, H, Q, D), torch.randn(B, G, K, D), torch.randn(B, G, K, D), torch.randn(D, P)]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    options = {"scaling": 0.25, "position_scale": 0.25}
    found, expected = candidate(*inputs, **options), cope_attention(*inputs, **options)
    assert launched == ([candidates.window_on_chip_kernel] if candidate is candidates.cope_on_chip else [])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(found)
    for one, other in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


ONCE = (("half", 9), ("half", 64), ("open", 33), ("closed", 9))


@pytest.mark.parametrize(("gates", "positions"), ONCE)
def test_decoding_with_cope_by_one_launch(gates, positions, monkeypatch):
    """Windows that end in the newest split, in another, and nowhere."""
    right, launches = candidates.launch, []
    monkeypatch.setattr(
        candidates, "launch", lambda *given, **options: launches.append(given[0]) or right(*given, **options)
    )
    query, key, value = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    if gates != "half":
        query[..., 0], key[..., 0] = 8.0, 4.0 if gates == "open" else -4.0
    options = {"scaling": 0.25, "position_scale": 0.25}
    # Twice: the counters are 0 again.
    for _ in range(2):
        table = torch.randn(16, positions)
        found = candidates.cope_decode_once(query, key, value, table, **options)
        expected = cope_attention(query, key, value, table, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(launches) == 2


@pytest.mark.filterwarnings("ignore:.*flex_attention")
@pytest.mark.parametrize("name", ["cope-once-half", "cope-flex-half", "cope-chip-half"])
def test_candidates_are_providers(name, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    workload = Workload(Shape(1, 2, 70, 16), torch.float32, torch.device("cpu"))
    provider = workload.provider(name)
    workload.check(provider)
    if provider.decode is not None:
        with torch.no_grad():
            workload.check_decoding(provider, provider.decode())
