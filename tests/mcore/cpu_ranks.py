"""Importing this makes a process ready to be a CPU rank: for the template of the harness's pool."""

from megatron_distflash.mcore import cpu

cpu.enable()

# Not part of megatron.training itself; without it, the first case of every rank would import it.
import megatron.training.argument_utils  # noqa: E402, F401
