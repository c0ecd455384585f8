"""Floating-point operations of a model, and of a device: what model FLOPs utilisation is computed from."""

import copy
import re
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..families import model_class

# Dense bf16 TFLOP/s, from the manufacturers' data sheets. A name has all words of its key; longer keys come first.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX A6000": 155,
    "A10": 125,
    "A10G": 70,
    "A30": 165,
    "A40": 150,
    "A100": 312,
    "A800": 312,
    "L4": 121,
    "L40S": 362,
    "H20": 148,
    "H100": 989,
    "H200": 989,
    "H800": 989,
    "GH200": 989,
    "B200": 2250,
    "GB200": 2500,
    "MI210": 181,
    # PyTorch sees its two halves as two devices.
    "MI250X": 191.5,
    "MI300X": 1307,
}


def peak_flops(device: torch.device | str) -> float | None:
    """Returns the dense bf16 FLOP/s of a device or of a name such as "NVIDIA A100-SXM4-80GB"; None if unknown."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = torch.cuda.get_device_name(device)
    words = set(re.split(r"\W+", device.lower()))
    for name, tflops in PEAK_TFLOPS.items():
        if words.issuperset(name.lower().split()):
            return tflops * 1e12
    return None


def flops_per_token(config: Any, sequence_length: int) -> float:
    """Returns the FLOPs of a forward and backward pass of a model, divided by the tokens of the sequence.

    Counted by `torch.utils.flop_counter` on tensors without memory: all matrix products with a factor of 2 for multiply
    and add, those of attention for all T x T pairs. That is the usual 6 N + 12 L H D T (Chowdhery et al. 2022, Appendix
    B: the causal half is not subtracted, and nothing is added for activation checkpointing), plus the products of the
    position encoding. N does not include embeddings, which are looked up, but the output layer.
    """
    config = copy.deepcopy(config)
    # The other implementations have kernels, whose products the counter does not know.
    config._attn_implementation = "eager"
    with FakeTensorMode():
        model = model_class(config)(config).train()
        tokens = torch.zeros(1, sequence_length, dtype=torch.int64)
        counter = FlopCounterMode(display=False)
        with counter, Scalars(sequence_length - 1):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return counter.get_total_flops() / sequence_length


class Scalars(TorchDispatchMode):
    """Lets code read tensors without memory: any integer is `largest`, and no two tensors are equal.

    Models read positions only, for the largest one.
    """

    def __init__(self, largest: int) -> None:
        super().__init__()
        self.largest = largest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.largest
        if func is torch.ops.aten.equal.default:
            return False
        return func(*args, **(kwargs or {}))
