"""Run by torchrun, on GPUs: context parallelism, as accelerate sets it up, gives the logits of one process."""

import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from engine_matrix import PLAIN
from tiny import tiny_model, tokens


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for encoding in (*PLAIN, "pope"):
        torch.manual_seed(0)
        model = tiny_model("llama", encoding, "sdpa", max_position_embeddings=128).cuda()
        ids = tokens(2, 128).cuda()
        positions = torch.arange(128, device="cuda").expand(2, -1).contiguous()
        with torch.no_grad():
            expected = model(ids).logits
            _attach_context_parallel_hooks(model)
            with context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
                shard = model(ids, position_ids=positions).logits
                (logits,) = context_parallel_unshard(mesh, [shard], [1])
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        if dist.get_rank() == 0:
            print(f"agrees: {encoding}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
