"""Measures the peak of resident memory of training steps above what the process had before it built the model.

    python tests/memory_worker.py RECIPE [--set KEY=VALUE] [--layout one|ddp|fsdp]

Under torchrun for two processes, with gloo. Prints one line of JSON: bytes of each process.
"""

import argparse
import contextlib
import json
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from whatwhere.scripts.training.model import build_config, build_model, build_optimizer
from whatwhere.scripts.training.recipe import load_recipe


def resident(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--layout", default="one", choices=("one", "ddp", "fsdp"))
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, options.set)
    training = recipe.training
    processes, bf16 = 1, training.mixed_precision == "bf16"
    if options.layout != "one":
        dist.init_process_group("gloo")
        processes = dist.get_world_size()
        dist.all_reduce(torch.ones(1))
    # What the first steps of any model load.
    warm = torch.nn.Linear(4, 4)
    warm(torch.ones(1, 4)).sum().backward()
    optimizer, _ = build_optimizer(warm, training)
    optimizer.step()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    model = build_model(recipe, build_config(recipe)).train()
    if options.layout == "ddp":
        model = DistributedDataParallel(model)
    if options.layout == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        settings = {"mp_policy": policy} if bf16 else {}
        base = model.base_model
        for layer in base.layers if hasattr(base, "layers") else base.h:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
    optimizer, _ = build_optimizer(model, training)
    # Building needs more than training, when the model was whole before it was sharded.
    built = resident("VmHWM") - before
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    rows, length = training.micro_batch_size or training.batch_size // processes, recipe.data.sequence_length
    parts = training.batch_size // processes // rows
    vocabulary = recipe.model["vocab_size"]
    for _ in range(options.steps):
        for part in range(parts):
            tokens = torch.randint(vocabulary, (rows, length))
            last = part == parts - 1
            waits = contextlib.nullcontext()
            if options.layout == "ddp" and not last:
                waits = model.no_sync()
            if options.layout == "fsdp":
                model.set_requires_gradient_sync(last)
            with waits:
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model(
                        input_ids=tokens, labels=tokens, num_items_in_batch=tokens.numel(), use_cache=False
                    ).loss
                loss.backward()
                del loss
        optimizer.step()
        optimizer.zero_grad()
    found = [None] * processes
    mine = {"peak": resident("VmHWM") - before, "built": built}
    if options.layout == "one":
        found = [mine]
    else:
        dist.all_gather_object(found, mine)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found))
    if options.layout != "one":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
