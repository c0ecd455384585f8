"""The command `whatwhere`; test_docs.py and test_packaging.py run its help and its commands."""

import torch.distributed as dist

import whatwhere_cli as cli


def test_the_process_group_ends_with_the_command(capsys):
    """Without this, gloo sometimes aborts the processes when they exit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cli.main(["plan", "demo_rope"])
    assert "parameters" in capsys.readouterr().out
    assert not dist.is_initialized()
