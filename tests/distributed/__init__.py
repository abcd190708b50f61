"""What the processes run that test_distributed.py launches."""

import os
import sys

from torch import distributed


def leave(status: int = 0) -> None:
    """End a process of a group, after the others have come as far, without tearing anything down.

    Threads of gloo and of autograd outlive the group. Now and then they abort a process that destroys its group or tears its
    interpreter down ("terminate called without an active exception", pytorch #90549; "malloc(): unaligned fastbin chunk
    detected" while the other waited in gloo's barrier), whatever the process had done. So the processes meet at the store,
    which is their launcher's, and end at once.
    """
    store = distributed.distributed_c10d._get_default_store()
    if store.add("left", 1) == distributed.get_world_size():
        store.set("all left", "yes")
    store.wait(["all left"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
