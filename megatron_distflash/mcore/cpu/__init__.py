"""CPU ranks for Megatron: train on a machine without a GPU, over gloo.

``enable()`` before the training script is imported is all it takes, with megatron-core's wheel and
with an unmodified Megatron-LM checkout: data, tensor, sequence, pipeline and context parallelism
are the real ones, through Megatron's own schedules, optimizer and checkpoints. It is for demos,
tests and for debugging a parallel configuration on a laptop; its timings mean nothing.
"""

from __future__ import annotations

import logging
import os

import torch

__all__ = ["enable", "needed"]

logger = logging.getLogger(__name__)
_enabled = False


def needed() -> bool:
    """Whether Megatron has to run on CPU ranks here, because torch sees no GPU."""
    return not torch.cuda.is_available()


def enable() -> None:
    """Make Megatron in this process run on the CPU. Calling it again does nothing.

    Call it before the training script (or anything of Megatron) is imported, with ``sys.path``
    already set so that ``import megatron`` finds the Megatron that shall run.

    Raises:
        RuntimeError: there is a GPU, so Megatron runs as it is.
    """
    global _enabled
    if _enabled:
        return
    if not needed():
        raise RuntimeError("CPU ranks were asked for, but torch sees a GPU: run Megatron as it is.")
    from megatron_distflash.mcore.cpu.device import install_device
    from megatron_distflash.mcore.cpu.patches import install_patches
    from megatron_distflash.mcore.cpu.rng import install_rng

    install_device()
    install_rng()
    # Megatron's fused pointwise functions are torch.compile'd; compiling them for the CPU takes
    # longer than the runs this is for.
    torch.compiler.set_stance("force_eager")
    install_patches()
    _enabled = True
    if int(os.environ.get("RANK", "0")) == 0:
        logger.warning(
            "No GPU was found: Megatron runs on CPU ranks over gloo. Timings mean nothing."
        )
