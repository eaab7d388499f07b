"""Time block attention on one GPU: our kernels with and without accumulation, and the libraries.

    python tools/bench_attention.py                         # the standard table
    python tools/bench_attention.py --shapes 128x16384 --masks causal --json out/attention.json
    python tools/bench_attention.py --replay                # one rank's plan against its share
    python tools/bench_attention.py --tune                  # rewrite the table that "auto" reads

Rows are shapes and masks, forward and backward. Columns:
    ours+state  our kernel, merging into (adding to) an fp32 state
    ours        our forward writing 16-bit output directly (a backward always adds)
    cudnn, fa2  torch's own kernels, which overwrite their outputs
    fa4         flash-attn-4, where it can be imported
    lib+merge   cuDNN followed by our separate merge (forward) or three additions (backward)
    ours-det    our deterministic backward
Every column of a row computes the same attention and is compared with cuDNN before it is timed. The
columns of a row take turns, so that clocks and heat are alike; a cell is the median TFLOP/s with
its spread (lowest to highest turn), causal counted half. With --kv-heads torch's kernels get keys
and values repeated for each query head, outside of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from bench_attention_replay import Replay
from bench_attention_tune import tune
from bench_timing import Run, time_columns
from torch import Tensor

from megatron_distflash.runtime.blocks import TABLE
from megatron_distflash.runtime.cuda_kernels import LIBRARY, CudaKernels, load
from megatron_distflash.runtime.cuda_tasks import BackwardTask, ForwardTask, Mask

SHAPES = ("128x16384", "128x32768", "128x8192", "128x4096", "64x16384")
FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10  # times queries x keys x heads x head dimension
# 16-bit outputs of two correct kernels differ by their roundings: bf16 2e-3 each, gradients 2.5e-3.
TOLERANCE = 8e-3


class Case:
    """Fresh random inputs [s, 1, h, d] of one row and the state that the kernels update."""

    def __init__(self, head_dim: int, seq: int, heads: int, kv_heads: int, causal: bool, dtype):
        def normal(num_heads: int) -> Tensor:
            return torch.randn(seq, 1, num_heads, head_dim, device="cuda", dtype=dtype)

        self.causal, self.scale = causal, head_dim**-0.5
        self.q, self.dout = normal(heads), normal(heads)
        self.k, self.v = normal(kv_heads), normal(kv_heads)
        self.mask = Mask("causal" if causal else "full")
        self.pairs_flops = seq * seq * heads * head_dim / (2 if causal else 1)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(1, heads, seq, device="cuda")
        self.out_acc = torch.zeros(self.q.shape, device="cuda")
        self.acc_lse = torch.full_like(self.lse, -math.inf)
        self.sums = [torch.zeros(x.shape, device="cuda") for x in (self.q, self.k, self.v)]

        self.library_qkv = [self.library_view(x) for x in (self.q, self.k, self.v)]

    def library_view(self, x: Tensor) -> Tensor:
        """[1, h, s, d] as torch's kernels take it; a view, or with KV heads repeated."""
        repeat = self.q.shape[2] // x.shape[2]
        view = x.permute(1, 2, 0, 3)
        return view if repeat == 1 else view.repeat_interleave(repeat, 1)


def library_backward(case: Case, backend: str) -> Callable[[], tuple[Tensor, ...]]:
    """Gradients of one of torch's kernels, [1, h, s, d] each."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    inputs = [x.detach().requires_grad_() for x in case.library_qkv]
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=case.causal, scale=case.scale
        )
    dout = case.library_view(case.dout)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def cudnn_forward(case: Case) -> tuple[Tensor, Tensor]:
    """(out [s, 1, h, d], lse [1, h, s])."""
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *case.library_qkv, None, True, 0.0, case.causal, False, scale=case.scale
    )
    return result[0].permute(2, 0, 1, 3), result[1].squeeze(-1)


def fa2_forward(case: Case) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(
        *case.library_qkv, 0.0, case.causal, False, scale=case.scale
    )[0]


def fa4_forward(case: Case) -> Callable[[], Tensor] | None:
    """flash-attn-4 on [1, s, h, d], or None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    q, k, v = (x.transpose(0, 1) for x in (case.q, case.k, case.v))
    return lambda: flash_attn_func(q, k, v, softmax_scale=case.scale, causal=case.causal)[0]


def fa4_backward(case: Case) -> Callable[[], tuple[Tensor, ...]] | None:
    """Its gradients, [1, s, h, d] each, or None where it is not installed."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None
    inputs = [x.transpose(0, 1).detach().requires_grad_() for x in (case.q, case.k, case.v)]
    out = flash_attn_func(*inputs, softmax_scale=case.scale, causal=case.causal)[0]
    dout = case.dout.transpose(0, 1)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def difference(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def expect(name: str, x: Tensor, reference: Tensor) -> None:
    error = difference(x, reference)
    if not error < TOLERANCE:
        raise SystemExit(f"{name} differs from cuDNN by {error:.2e} (allowed {TOLERANCE:.0e})")


def forward_columns(kernels: CudaKernels, case: Case) -> dict[str, Run]:
    """Checked ways to compute the forward."""
    tasks = {
        "ours+state": ForwardTask(
            case.q,
            case.k,
            case.v,
            case.acc_lse,
            case.out_acc,
            mask=case.mask,
            accumulate=True,
        ),
        "ours": ForwardTask(case.q, case.k, case.v, case.lse, out=case.out, mask=case.mask),
    }
    columns: dict[str, Run] = {
        name: lambda task=task: kernels.forward_accumulate([task], softmax_scale=case.scale)
        for name, task in tasks.items()
    }
    columns["cudnn"] = lambda: cudnn_forward(case)
    columns["fa2"] = lambda: fa2_forward(case)
    fa4 = fa4_forward(case)
    if fa4 is not None:
        columns["fa4"] = fa4
    columns["lib+merge"] = lambda: kernels.merge(case.out_acc, case.acc_lse, *cudnn_forward(case))

    reference = cudnn_forward(case)[0]
    case.out.fill_(math.nan)
    for run in columns.values():
        case.acc_lse.fill_(-math.inf)
        case.out_acc.zero_()
        run()
        if run is columns["ours+state"] or run is columns["lib+merge"]:
            expect("the state", case.out_acc, reference)
    expect("ours", case.out, reference)
    expect("fa2", fa2_forward(case).permute(2, 0, 1, 3), reference)
    if fa4 is not None:
        expect("fa4", fa4().transpose(0, 1), reference)
    return columns


def backward_columns(kernels: CudaKernels, case: Case) -> dict[str, Run]:
    """Checked ways to compute the backward."""
    kernels.forward_accumulate(
        [ForwardTask(case.q, case.k, case.v, case.lse, out=case.out, mask=case.mask)],
        softmax_scale=case.scale,
    )
    delta = torch.empty_like(case.lse)
    kernels.delta(case.out, case.dout, delta)
    task = BackwardTask(
        case.q, case.k, case.v, case.dout, case.lse, delta, *case.sums, mask=case.mask
    )
    cudnn = library_backward(case, "CUDNN_ATTENTION")

    def ours(deterministic: bool = False) -> None:
        kernels.backward_accumulate([task], softmax_scale=case.scale, deterministic=deterministic)

    def library_and_additions() -> None:
        for total, part in zip(case.sums, cudnn(), strict=True):
            kernels.accumulate(total, part.permute(2, 0, 1, 3))

    columns: dict[str, Run] = {
        "ours+state": ours,
        "cudnn": cudnn,
        "fa2": library_backward(case, "FLASH_ATTENTION"),
        "ours-det": lambda: ours(deterministic=True),
    }
    fa4 = fa4_backward(case)
    if fa4 is not None:
        columns["fa4"] = fa4
    if case.k.shape == case.q.shape:  # with fewer KV heads torch sums over the repeated ones
        columns["lib+merge"] = library_and_additions
    for name in [name for name in ("ours+state", "ours-det", "lib+merge") if name in columns]:
        for total in case.sums:
            total.zero_()
        columns[name]()
        for label, total, part in zip(("dq", "dk", "dv"), case.sums, cudnn(), strict=True):
            reference = part.permute(2, 0, 1, 3).unflatten(2, (total.shape[2], -1)).sum(3)
            expect(f"{name} {label}", total, reference)
    for part, reference in zip(columns["fa2"](), cudnn(), strict=True):
        expect("a gradient of fa2", part, reference)
    if fa4 is not None:
        for total, part in zip(case.sums, fa4(), strict=True):
            expect("a gradient of fa4", part.transpose(0, 1), total)
    return columns


def print_row(label: str, flops: float, times: dict[str, list[float]]) -> None:
    cells = []
    for name, turns in times.items():
        rates = sorted(flops / ms / 1e9 for ms in turns)
        cells.append(f"{name} {statistics.median(rates):.0f} ({rates[0]:.0f}-{rates[-1]:.0f})")
    print(f"{label}: " + "  ".join(cells), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--library", default=str(LIBRARY), help="the kernel library to load")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="head_dim x tokens")
    parser.add_argument("--masks", nargs="+", default=("full", "causal"))
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=None, help="default: as --heads")
    parser.add_argument("--directions", nargs="+", default=("forward", "backward"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--repeats", type=int, default=3, help="runs of a turn")
    parser.add_argument("--json", type=Path, default=None, help="also write the times here")
    parser.add_argument(
        "--tune", type=Path, nargs="?", const=TABLE, help="write the table that auto reads"
    )
    parser.add_argument("--replay", action="store_true", help="time one rank's plan, all ranks")
    parser.add_argument("--ranks", type=int, default=8, help="replay: ranks of the plan")
    parser.add_argument("--tokens", type=int, default=8192, help="replay: tokens of a rank")
    parser.add_argument("--schedule", default="balanced", help="replay: schedule of the plan")
    parser.add_argument("--kernel", default="cuda", help="replay: block kernel")
    return parser.parse_args()


def measure(kernels: CudaKernels, arguments: argparse.Namespace) -> list[dict]:
    """Print the table; its rows as data."""
    columns_of = {"forward": forward_columns, "backward": backward_columns}
    print("TFLOP/s, median (lowest-highest turn)")
    rows = []
    kv_heads = arguments.kv_heads or arguments.heads
    for shape, mask, direction in product(arguments.shapes, arguments.masks, arguments.directions):
        head_dim, seq = (int(number) for number in shape.split("x"))
        dtype = getattr(torch, arguments.dtype)
        case = Case(head_dim, seq, arguments.heads, kv_heads, mask == "causal", dtype)
        columns = columns_of[direction](kernels, case)
        times = time_columns(columns, arguments.turns, arguments.repeats)
        per_pair = FORWARD_FLOPS if direction == "forward" else BACKWARD_FLOPS
        flops = per_pair * case.pairs_flops
        label = f"{direction} d{head_dim} {seq} {arguments.heads}/{kv_heads} {mask}"
        print_row(label, flops, times)
        rows.append({"row": label, "flops": flops, "ms": times})
    return rows


def replay(arguments: argparse.Namespace) -> list[dict]:
    """Replay the plan of d 128; see ``bench_attention_replay``."""
    sizes = arguments.ranks, arguments.tokens, arguments.heads, arguments.kv_heads or 8, 128
    return Replay(*sizes, arguments.schedule, arguments.kernel).report(arguments.turns)


def main() -> None:
    arguments = parse_arguments()
    kernels, reason = load(arguments.library)
    if kernels is None:
        raise SystemExit(f"no kernels to measure: {reason}")
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "command": " ".join(sys.argv),
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()))
    if arguments.tune is not None:
        return tune(arguments.tune, arguments.turns)
    rows = replay(arguments) if arguments.replay else measure(kernels, arguments)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
