"""Run by torchrun: the kernels under DDP and FSDP on two ranks give the gradients of one (test_kernel_parallel.py)."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import conftest  # noqa: F401  (makes the interpreter faster)
from tiny import tiny_model, tokens


def build(encoding):
    torch.manual_seed(0)
    model = tiny_model("llama", encoding, "triton", num_attention_heads=2, num_key_value_heads=1).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "delta" in name:
                # Outside its bounds, which gradients of delta pass depends on their sign, on each rank.
                parameter.clamp_(-6.0, -0.1)
    return model


def gradients(model, module, ids):
    module(ids, labels=ids).loss.backward()
    return {
        name.removeprefix("module."): one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
        for name, one in model.named_parameters()
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # Two ranks with a row each; one process with both.
    both = tokens(2, 12)
    own = both[dist.get_rank()][None]
    for encoding in ("cope", "pope"):
        model = build(encoding)
        expected = gradients(model, model, both)
        replica = build(encoding)
        sharded = build(encoding)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        for kind, found in (
            ("DDP", gradients(replica, DistributedDataParallel(replica), own)),
            ("FSDP", gradients(sharded, sharded, own)),
        ):
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)
            if dist.get_rank() == 0:
                print("agrees:", encoding, kind, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
