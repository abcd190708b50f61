"""What the processes run that test_distributed.py launches."""

import os
import sys

import torch


def leave(status: int = 0) -> None:
    """End a process of a group, after the others have come as far, without tearing its interpreter down.

    Threads of gloo and of autograd outlive the group; one that asks for the GIL while the interpreter goes away now and then
    aborts the process ("terminate called without an active exception", pytorch #90549), whatever the process had done.
    """
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
