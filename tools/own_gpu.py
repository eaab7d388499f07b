"""The GPU of a process that torchrun or something like it started."""

import os
import sys

import torch


def own_gpu() -> torch.device:
    """This rank's GPU, made the current device; ranks share GPUs where there are more ranks than
    GPUs. Ends the process with one sentence where there are none, or nobody said which rank it is.
    """
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU, and this moves GPU memory.")
    if "RANK" not in os.environ:
        sys.exit("RANK is not set: start one process per rank, with torchrun.")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
