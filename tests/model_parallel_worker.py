"""Run by torchrun: every case on two ranks gives the logits and gradients of one. See test_model_parallel.py.

Ranks share heads (tensor parallelism), layers (pipeline parallelism) or parameters (`fully_shard`).
"""

import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers.distributed import DistributedConfig

import whatwhere
from tiny import tiny_model, tokens

OPTIONS = {"output_gate": True, "output_norm": True, "qk_norm": True}
# Every encoding; plans by layers, and the options of the attention block.
CASES = {
    **{name: (name, {}) for name in whatwhere.list_position_encodings()},
    "cope,rope": (["cope", "rope"], {}),
    "pope,alibi:options": (["pope", "alibi"], OPTIONS),
    "fox:options": ("fox", {**OPTIONS, "key_value_shift": True}),
}


def same_gradients(model: torch.nn.Module, expected: torch.nn.Module, case: str) -> None:
    for (name, one), other in zip(expected.named_parameters(), model.parameters()):
        gradient = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        torch.testing.assert_close(gradient, one.grad, rtol=1e-3, atol=1e-4, msg=f"{case} {name}")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ids = tokens(2, 20)
    for case, (encoding, fields) in CASES.items():
        torch.manual_seed(0)
        model = tiny_model("llama", encoding, **fields)
        if dist.get_rank() == 0:
            model.save_pretrained(folder / case)
        dist.barrier()
        parallel = type(model).from_pretrained(folder / case, distributed_config=DistributedConfig(tp_size=2)).eval()
        expected, outputs = model(ids, labels=ids), parallel(ids, labels=ids)
        torch.testing.assert_close(outputs.logits, expected.logits, rtol=1e-4, atol=1e-4)
        expected.loss.backward()
        outputs.loss.backward()
        same_gradients(parallel, model, case)
        stages = type(model).from_pretrained(folder / case, distributed_config=DistributedConfig(pp_size=2)).eval()
        with torch.no_grad():
            torch.testing.assert_close(stages(ids, use_cache=False).logits, expected.logits, rtol=1e-4, atol=1e-4)
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        assert torch.equal(stages.generate(ids[:, :9], **options), model.generate(ids[:, :9], **options)), case
        sharded = type(model).from_pretrained(folder / case).eval()
        for part in (*sharded.model.layers, sharded):
            fully_shard(part)
        own = ids[dist.get_rank() :][:1]
        outputs = sharded(own, labels=own)
        torch.testing.assert_close(outputs.logits, expected.logits[dist.get_rank() :][:1], rtol=1e-4, atol=1e-4)
        outputs.loss.backward()
        same_gradients(sharded, model, case)
        if dist.get_rank() == 0:
            print("agrees:", case, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
