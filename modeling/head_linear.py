"""A projection of the hidden states to numbers of each head."""

from torch import nn
from transformers import initialization as init


class HeadLinear(nn.Linear):
    """A projection of the hidden states to numbers of each head; under tensor parallelism, to those of local heads."""

    tensor_parallel_style = "colwise"

    def __init__(self, inputs: int, outputs: int, std: float, bias: float | None = None) -> None:
        super().__init__(inputs, outputs, bias=bias is not None)
        self.std, self.bias_init = std, bias

    def reset(self) -> None:
        init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias_init is not None:
            init.constant_(self.bias, self.bias_init)
