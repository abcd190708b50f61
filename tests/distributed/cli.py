"""Runs bft-sft in this process, one of those that `accelerate launch` started, with an output folder of its rank's own."""

import os
import sys

import torch

from bft_hf.recipes.sft import main
from distributed import leave

if __name__ == "__main__":
    torch.set_num_threads(1)
    status = main([*sys.argv[2:], "--output_dir", os.path.join(sys.argv[1], f"rank{os.environ['RANK']}")])
    leave(status)
