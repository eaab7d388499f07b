"""Which kernel computes a block."""

from functools import lru_cache

import torch
from torch import Tensor

from megatron_distflash.runtime.kernel import Band, BlockKernel
from megatron_distflash.runtime.library_kernels import Cpu, Cudnn, Flash

_KERNELS: dict[str, BlockKernel] = {kernel.name: kernel for kernel in (Cpu(), Cudnn(), Flash())}
KERNELS = ("auto", *_KERNELS)


def choose(kernel: str, q: Tensor, band: Band, rows: int, columns: int) -> BlockKernel:
    """The kernel for one block.

    Args:
        kernel: a name from ``KERNELS``; ``auto`` takes the first of cudnn, flash (cpu on CPU
            tensors) that can.
        q: any tensor with the queries' device, dtype and head dim.

    Raises:
        ValueError: an unknown name, or no kernel can compute the block; says why.
    """
    if kernel not in KERNELS:
        raise ValueError(f"unknown kernel {kernel!r}; choose one of {', '.join(KERNELS)}")
    names = [kernel] if kernel != "auto" else ["cudnn", "flash"] if q.is_cuda else ["cpu"]
    shape = band.shape(rows, columns)
    refusals = []
    for name in names:
        refusal = _KERNELS[name].refusal(q, shape)
        if refusal is None:
            return _KERNELS[name]
        refusals.append(f"{name}: {refusal}")
    kind = f"{q.dtype} on {q.device.type}, head dim {q.shape[-1]}, {shape} block"
    advice = "" if kernel == "auto" else "; choose another kernel"
    raise ValueError(f"no kernel for {kind} ({'; '.join(refusals)}){advice}")


@lru_cache(maxsize=4096)
def chosen(
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int,
    band: Band,
    rows: int,
    columns: int,
) -> BlockKernel:
    """``choose``, remembered by what it depends on."""
    return choose(kernel, torch.empty(0, head_dim, dtype=dtype, device=device), band, rows, columns)
