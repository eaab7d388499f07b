"""The CUDA random number generator, played by torch's CPU generator.

Dropout on CPU tensors draws from the CPU generator and from no other. So that generator has to be
the one that Megatron's ``CudaRNGStatesTracker`` forks, seeds per tensor-parallel rank, saves in
checkpoints and replays in recomputation. With ``torch.cuda``'s random functions pointed at it, the
stock tracker and the stock activation checkpointing work as they are.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

_TRACKER_MODULE = "megatron.core.tensor_parallel.random"


def _call_now(callback: Callable[[], Any], **kwargs: Any) -> None:
    """``torch.cuda._lazy_call``: the original queues the call until a GPU is initialised."""
    callback()


def _initialised_already() -> None:
    """``torch.cuda._lazy_init``: the CPU generator needs no initialisation."""


def _current_device() -> int:
    """``torch.cuda.current_device`` as ``torch.cuda.random`` imported it by name."""
    return 0


def _device_count() -> int:
    """``torch.cuda.device_count`` as ``torch.cuda.random`` imported it by name."""
    return 1


class _DeviceGenerator:
    """``torch.cuda.default_generators[0]``: the CPU generator, as the device's.

    Raises ValueError for the state of a GPU's generator, from a checkpoint saved on GPUs.
    """

    def __init__(self) -> None:
        self._state_bytes = torch.default_generator.get_state().numel()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.default_generator, name)

    def set_state(self, state: torch.Tensor) -> None:
        if state.numel() != self._state_bytes:
            raise ValueError(
                "The random state to restore was saved on a GPU and means nothing to CPU ranks: "
                "load the checkpoint with --no-load-rng."
            )
        torch.default_generator.set_state(state)


class _DropSharedGeneratorWarning(logging.Filter):
    """Drops the tracker's warning that the CPU generator moved inside ``fork``.

    The tracker checks that device code leaves the host's generator alone. Here both are one, and
    every dropout would warn.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


def install_rng() -> None:
    """Point ``torch.cuda``'s random functions at the CPU generator.

    ``torch.manual_seed`` then seeds it twice with the same seed, which is harmless.
    """
    torch.cuda.default_generators = (_DeviceGenerator(),)
    for module in (torch.cuda, torch.cuda.random):
        module._lazy_call = _call_now
        module._lazy_init = _initialised_already
    torch.cuda.random.current_device = _current_device
    torch.cuda.random.device_count = _device_count
    tracker_module = sys.modules.get(_TRACKER_MODULE)
    if tracker_module is not None:  # It imports _lazy_call by name, perhaps before we came.
        tracker_module._lazy_call = _call_now
        tracker_module._lazy_init = _initialised_already
    logging.getLogger(_TRACKER_MODULE).addFilter(_DropSharedGeneratorWarning())


def use_own_generator(loader: torch.utils.data.DataLoader) -> None:
    """Give a data loader a generator of its own.

    Each epoch a loader draws a base seed, by default from the CPU generator. Megatron has loaders
    on tensor-parallel rank 0 alone, so that draw would set its dropout apart from its peers'.
    """
    if loader.generator is None:
        loader.generator = torch.Generator()
        loader.generator.manual_seed(torch.initial_seed())
