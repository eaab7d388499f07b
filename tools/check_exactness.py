"""Check distributed attention against float64 on this machine: forward and gradients, every
schedule and mask.

    torchrun --nproc-per-node 4 tools/check_exactness.py [--tokens 1000 --heads 8 --kv-heads 2]
    torchrun --nproc-per-node 8 tools/check_exactness.py --kernel cuda --comm nccl

Uses NCCL and bf16 where there are GPUs, gloo and float64 elsewhere. Every rank computes plain
attention over the whole sequence in float64 and compares its own chunk. In 16 bits the error is
also shown as a multiple of what torch's attention makes on one rank. Exits with 1 if a line fails.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_distflash.plan import SCHEDULES, Mask  # noqa: E402
from megatron_distflash.plan.plan import contiguous, zigzag  # noqa: E402
from megatron_distflash.runtime.attention import dist_flash_attention  # noqa: E402
from megatron_distflash.runtime.blocks import KERNELS  # noqa: E402
from megatron_distflash.runtime.comm import COMMS  # noqa: E402

NAMES = ("out", "dq", "dk", "dv")
# 16-bit error may be at most this multiple of torch's own on one rank and the same inputs.
MAX_RATIO = 1.3


def main() -> None:
    args = _arguments()
    rank, num_ranks, device = _join()
    args.seed = _same_seed(args.seed)
    try:
        failed = _check(args, rank, num_ranks, device)
    except ValueError as error:  # on every rank alike
        sys.exit(f"check_exactness: {error}" if rank == 0 else 2)
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


def _check(args: argparse.Namespace, rank: int, num_ranks: int, device: torch.device) -> bool:
    """Prints a line for each case; returns whether one failed."""
    failed = False
    if rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        shape = f"{args.tokens} tokens, batch {args.batch}, {args.heads}/{args.kv_heads} heads"
        print(
            f"{num_ranks} ranks on {where}, torch {torch.__version__}, kernel {args.kernel}, "
            f"comm {args.comm}"
        )
        print(f"{shape}, head dim {args.head_dim}, seed {args.seed}")
    for name in args.dtype or ["bfloat16" if device.type == "cuda" else "float64"]:
        dtype = getattr(torch, name)
        for schedule in SCHEDULES:
            for mask in _masks(args, schedule, num_ranks):
                errors, own = _errors(args, schedule, mask, dtype, rank, num_ranks, device)
                failed |= _report(schedule, mask, errors, own, dtype, rank)
    return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=1000, help="whole sequence; may be uneven")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    dtypes = ("float64", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", nargs="+", choices=dtypes)
    parser.add_argument("--window", type=int, default=230, help="of the sliding window masks")
    parser.add_argument("--kernel", choices=KERNELS, default="auto")
    parser.add_argument("--comm", choices=COMMS, default="torch", help="what carries transfers")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3), "big"))
    args = parser.parse_args()
    for name in ("tokens", "batch", "heads", "kv_heads", "head_dim", "window"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}")
    return args


def _join() -> tuple[int, int, torch.device]:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.get_world_size(), device


def _same_seed(seed: int) -> int:
    """Rank 0's seed: every rank must draw the same whole sequence."""
    seeds = [seed]
    dist.broadcast_object_list(seeds)
    return seeds[0]


def _masks(args, schedule: str, num_ranks: int) -> list[Mask]:
    """Balanced schedules balance causal and full masks only."""
    masks = [Mask.causal(), Mask.full()]
    windows = num_ranks == 1 or schedule in ("ring", "zigzag")
    return masks + ([Mask.sliding_window(args.window)] if windows else [])


def _errors(args, schedule, mask, dtype, rank, num_ranks, device):
    """Relative errors over the whole sequence: (distributed attention, torch on one rank)."""
    whole = _inputs(args, dtype, device)
    exact = _plain(*(x.double() for x in whole), mask)
    lengths = [args.tokens // num_ranks + (r < args.tokens % num_ranks) for r in range(num_ranks)]
    layout = (zigzag if schedule == "zigzag" else contiguous)(tuple(lengths))

    def cut(x: Tensor) -> Tensor:
        return torch.cat([x[c.tokens.start : c.tokens.stop] for c in layout.chunks_of(rank)])

    window = None if mask.left is None else mask.left + 1
    options = {"causal": mask.right == 0, "window": window, "schedule": schedule}
    options |= {"kernel": args.kernel, "comm": args.comm}
    ours = _run(*map(cut, whole), group=dist.group.WORLD, chunk_lengths=lengths, **options)
    single = _torch_attention(*whole, mask)
    distances = torch.tensor(
        [
            [_square(a, b), _square(cut(c), b), b.double().square().sum()]
            for a, b, c in zip(ours, map(cut, exact), single, strict=True)
        ],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(distances)
    ours_error, single_error, size = distances.sqrt().unbind(1)
    return (ours_error / size).tolist(), (single_error / size).tolist()


def _inputs(args, dtype, device) -> list[Tensor]:
    """(dout, q, k, v) of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(args.seed)
    heads = (args.heads, args.heads, args.kv_heads, args.kv_heads)
    shapes = [(args.tokens, args.batch, count, args.head_dim) for count in heads]
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def _run(dout, q, k, v, **options) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = dist_flash_attention(q, k, v, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _torch_attention(dout, q, k, v, mask) -> list[Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    visible = None if mask.left is None else ~_hidden(q, mask)
    out = scaled_dot_product_attention(
        *heads_first,
        attn_mask=visible,
        is_causal=visible is None and mask.right == 0,
        enable_gqa=True,
    )
    out = out.permute(2, 0, 1, 3)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _hidden(q: Tensor, mask: Mask) -> Tensor:
    """[tokens, tokens] which keys a query does not see."""
    position = torch.arange(len(q), device=q.device)
    ahead = position[None] - position[:, None]
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if mask.right is not None:
        hidden |= ahead > mask.right
    if mask.left is not None:
        hidden |= ahead < -mask.left
    return hidden


def _plain(dout, q, k, v, mask) -> list[Tensor]:
    """Attention by its definition, one batch entry and KV head at a time, in the inputs' dtype."""
    parts = [torch.empty_like(x) for x in (q, q, k, v)]
    group = q.shape[2] // k.shape[2]
    hidden = _hidden(q, mask)
    for batch in range(q.shape[1]):
        for head in range(k.shape[2]):
            heads = slice(head * group, (head + 1) * group)
            inputs = (q[:, batch, heads], k[:, batch, head], v[:, batch, head])
            x, y, z = (tensor.detach().requires_grad_() for tensor in inputs)
            scores = torch.einsum("qhd,kd->hqk", x, y) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = torch.einsum("hqk,kd->qhd", weights, z)
            grads = torch.autograd.grad(out, (x, y, z), dout[:, batch, heads])
            for part, value in zip(parts, (out.detach(), *grads), strict=True):
                part[:, batch, heads if value.dim() == 3 else head] = value
    return parts


def _square(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() - b.double()).square().sum()


def _report(schedule, mask, errors, own, dtype, rank) -> bool:
    if dtype.itemsize == 2:
        good = all(error <= MAX_RATIO * base for error, base in zip(errors, own, strict=True))
    else:
        good = all(error <= (1e-12 if dtype is torch.float64 else 1e-5) for error in errors)
    if rank == 0:
        cells = [
            f"{name} {error:.1e} ({error / base if base else 0:.2f}×)"
            for name, error, base in zip(NAMES, errors, own, strict=True)
        ]
        kind = f"{str(dtype).removeprefix('torch.'):9} {schedule:9}{mask!s:15}"
        print(f"{kind}{'  '.join(cells)}  {'ok' if good else 'FAILED'}", flush=True)
    return not good


if __name__ == "__main__":
    main()
