"""Run by torchrun, on CPUs too, where DeepSpeed is installed: Ulysses gives the logits and gradients of one process."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine_matrix import PLAIN
from tiny import FAMILIES, tiny_model, tokens


def gradients(model, logits):
    """Gradients of a function of all logits, by name."""
    (logits.double() ** 2).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def main():
    deepspeed.comm.init_distributed(dist_backend="gloo")
    rank, ids = dist.get_rank(), tokens(1, 16)
    part = slice(8 * rank, 8 * rank + 8)
    for family in FAMILIES:
        for encoding in PLAIN:
            torch.manual_seed(0)
            model = tiny_model(family, encoding, "sdpa")
            expected = model(ids).logits
            expected_gradients = gradients(model, expected)
            parallel_state_sp._release_sequence_parallel_groups()
            UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)
            logits = model(ids[:, part], position_ids=torch.arange(16)[None, part]).logits
            torch.testing.assert_close(logits, expected[:, part])
            for name, gradient in gradients(model, logits).items():
                dist.all_reduce(gradient)
                torch.testing.assert_close(
                    gradient, expected_gradients[name], msg=lambda text, name=name: f"{name}: {text}"
                )
            del ALL_ATTENTION_FUNCTIONS["sdpa"]
            if rank == 0:
                print(f"agrees: {family} {encoding}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
