"""Run by torchrun: ZeRO-3 on two ranks learns what one process learns. See test_engines_training.py."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import copy
import sys

import deepspeed
import torch
import torch.distributed as dist

from tiny import tiny_model, tokens

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # It clips to 1 by default.
    "gradient_clipping": 1e9,
}


def main() -> None:
    # DeepSpeed would compile an all-reduce of its own, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    ids = tokens(4, 20)
    own = ids[2 * dist.get_rank() :][:2]
    for encoding in sys.argv[1:]:
        torch.manual_seed(0)
        plain = tiny_model("llama", encoding)
        model = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        sharded = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, config=SETTINGS, optimizer=sharded)
        for _ in range(2):
            plain(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(own, labels=own).loss)
            engine.step()
        for (name, one), other in zip(plain.named_parameters(), engine.module.parameters(), strict=True):
            assert other.numel() == 0, f"{encoding} {name} is not sharded"
            with deepspeed.zero.GatheredParameters(other):
                torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=f"{encoding} {name}")
        if dist.get_rank() == 0:
            print("agrees:", encoding, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
