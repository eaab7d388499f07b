"""Our own block kernels for Hopper (``kernels/``), which update states and sums themselves."""

import torch
from torch import Tensor

from megatron_distflash.runtime import cuda_kernels
from megatron_distflash.runtime.cuda_kernels import BackwardTask, CudaKernels, ForwardTask, Mask
from megatron_distflash.runtime.kernel import Band


class Hopper:
    """Shapes and dtypes as in ``kernel``."""

    name = "cuda"

    def refusal(self, q: Tensor, shape: str) -> str | None:
        if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
            return "it takes bf16 and fp16 CUDA tensors only"
        if q.shape[-1] not in cuda_kernels.HEAD_DIMS:
            return f"it takes head dims {', '.join(map(str, cuda_kernels.HEAD_DIMS))}"
        kernels, reason = cuda_kernels.load()
        return reason if kernels is None else None

    def forward(self, q, k, v, scale, band, into=None):
        if into is None:
            out, lse = torch.empty_like(q), _empty_rows(q)
            task = ForwardTask(q, k, v, _rows(lse), out=out, mask=_mask(band))
        else:
            out, lse = into
            task = ForwardTask(q, k, v, _rows(lse), out, mask=_mask(band), accumulate=True)
        _kernels().forward_accumulate([task], softmax_scale=scale)
        return out, lse

    def backward(self, dout, q, k, v, rows, scale, band, into=(None, None, None)):
        grads = tuple(
            torch.zeros(x.shape, dtype=torch.float32, device=x.device) if total is None else total
            for x, total in zip((q, k, v), into, strict=True)
        )
        task = BackwardTask(
            q, k, v, dout, _rows(rows.lse), _rows(rows.delta), *grads, mask=_mask(band)
        )
        _kernels().backward_accumulate([task], softmax_scale=scale)
        return grads


def _kernels() -> CudaKernels:
    kernels, reason = cuda_kernels.load()
    assert kernels is not None, reason
    return kernels


def _empty_rows(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _rows(x: Tensor) -> Tensor:
    """[n, b, h] as the kernels name it: [b, h, n]."""
    return x.permute(1, 2, 0)


def _mask(band: Band) -> Mask:
    if band.right is None:
        assert band.left is None, "a band that looks ahead without bound but not back"
        return Mask()
    if band.left is None:
        return Mask("causal", band.right)
    return Mask("window", band.right, band.left + band.right + 1)
