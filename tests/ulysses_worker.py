"""Run by torchrun: DeepSpeed's Ulysses gives the logits and gradients of one process. See test_engines.py."""

import os
import re

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.comm
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import whatwhere
from engine_matrix import ENGINES
from tiny import FAMILIES, tiny_model, tokens
from whatwhere.attention_choice import supported_implementations


def gradients(model, logits):
    """Gradients of a function of all logits, by name."""
    (logits.double() ** 2).sum().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def main():
    # DeepSpeed would compile an all-reduce of its own, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed(dist_backend="gloo")
    torch.set_num_threads(1)
    for family in FAMILIES:
        for encoding in whatwhere.list_position_encodings():
            works = ENGINES["ulysses"].cell(encoding) == "works"
            agrees(family, encoding) if works else refused(family, encoding)
            if dist.get_rank() == 0:
                print(f"{'agrees' if works else 'refused'}: {family} {encoding}", flush=True)
    dist.destroy_process_group()


def register(model):
    """Does what accelerate does: DeepSpeed puts a function in the place of Transformers' own."""
    parallel_state_sp._release_sequence_parallel_groups()
    UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)


def run(model, ids):
    """The logits of this process's tokens."""
    part = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    try:
        return part, model(ids[:, part], position_ids=torch.arange(16)[None, part]).logits
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


def agrees(family, encoding):
    torch.manual_seed(0)
    model, ids = tiny_model(family, encoding, "sdpa"), tokens(1, 16)
    expected = model(ids).logits
    expected_gradients = gradients(model, expected)
    register(model)
    part, logits = run(model, ids)
    torch.testing.assert_close(logits, expected[:, part])
    for name, gradient in gradients(model, logits).items():
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, expected_gradients[name], msg=lambda text, name=name: f"{name}: {text}")


def refused(family, encoding):
    model = tiny_model(family, encoding)
    if "sdpa" not in supported_implementations(model.config):
        with pytest.raises(ValueError, match=re.escape(f"position_encoding={encoding!r}") + ".*Allowed"):
            model.set_attn_implementation("sdpa")
        return
    model.set_attn_implementation("sdpa")
    register(model)
    message = "An engine replaced attn_implementation='sdpa'.*" + re.escape(f"position_encoding={encoding!r}") + ".*Use"
    with pytest.raises(ValueError, match=message):
        run(model, tokens(1, 16))


if __name__ == "__main__":
    main()
