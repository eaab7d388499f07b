"""``dist_flash_attention``: exact attention over a sequence that is split over the ranks of a
group.

One custom op for the forward and one for the backward, so that torch.compile and activation
checkpointing see two opaque calls. The ops take plain values and look their plan up in the
builders' cache.
"""

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distflash.plan import Mask, Plan, build, build_backward
from megatron_distflash.plan.choice import choose_schedule
from megatron_distflash.runtime import comm as transports
from megatron_distflash.runtime import reference, tape
from megatron_distflash.runtime.program import choose_for
from megatron_distflash.runtime.state import empty_rows, heads_first, state_dtype

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dist_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: Sequence[int] = (),
    softmax_scale: float | None = None,
    schedule: str = "balanced",
    kernel: str = "auto",
    chunk_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    kept: tuple[Tensor, Tensor] | None = None,
    comm: str = "auto",
    timeout_s: float = transports.DEFAULT_TIMEOUT_S,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the whole sequence; every rank of the group calls it.

    Args:
        q: [s_local, b, heads, d], float64, float32, bfloat16 or float16; any strides.
        k, v: [s_local, b, kv_heads, d]; heads is a multiple of kv_heads.
        group: the ranks that share the sequence, in token order (but see ``schedule``); None: this
            rank holds all of it.
        causal: a token sees no later token.
        window: sliding window in tokens, the token itself included; causal, schedule ring or
            zigzag.
        documents: boundaries (0, …, sequence length) of packed documents, which do not see each
            other; schedule ring or zigzag.
        softmax_scale: default 1 / sqrt(d).
        schedule: ``balanced``, ``paper``, ``ring``, ``auto`` (``balanced``, or ``ring`` where that
            cannot balance the mask), or ``zigzag``, for which the sequence is 2P chunks and rank r
            holds the chunks r and 2P - 1 - r.
        kernel: block attention: ``auto`` or a name from ``blocks.KERNELS``.
        chunk_lengths: how many tokens each rank holds; default: all as many as this one.
        return_lse: also return the LSE.
        kept: (out, lse) that an earlier call with the same arguments returned. They are the result
            again: nothing is computed or moved, and the backward is that of the earlier call. For
            activation recomputation.
        comm: what carries transfers: ``auto``, ``nccl``, ``copy`` (copy engines) or ``torch``; see
            ``runtime.comm``.
        timeout_s: how long a step's transfers may take once they can start; not for ``torch``,
            whose process group has a timeout of its own.

    Returns:
        out [s_local, b, heads, d] in q's dtype; with ``return_lse`` (out, lse), lse
        [s_local, b, heads] in float32 (float64 for float64), through which no gradient flows.

    Raises:
        ValueError: on every rank of the group alike; says which rank's input is wrong and why.
        RuntimeError: ``comm`` cannot be used, on every rank alike; or ranks lost each other, and
            then the message names rank, peer, step, transfer and bytes.
    """
    num_ranks = 1 if group is None else dist.get_world_size(group)
    num_tokens, head_dim = (q.shape[0], q.shape[-1]) if q.dim() else (0, 0)  # 0 is refused below
    lengths = [num_tokens] * num_ranks if chunk_lengths is None else list(chunk_lengths)
    scale = max(1, head_dim) ** -0.5 if softmax_scale is None else float(softmax_scale)
    left, right = None if window is None else window - 1, 0 if causal else None
    request = (lengths, schedule, kernel, left, right, list(documents), scale)
    request = (*request, comm, float(timeout_s))
    name = "" if group is None else group.group_name
    if kept is None:
        out, lse = _attention(q, k, v, name, *request)
    else:
        _check_kept(q, *kept)
        out, lse = _Resume.apply(q, k, v, *kept, name, *request)
    return (out, lse) if return_lse else out


# ---- checks: inside the op, so that torch.compile has nothing to trace; before anything is
# computed, with the same outcome on every rank ---------------------------------------------------

_REQUEST = (
    "chunk lengths",
    "schedule",
    "kernel",
    "left",
    "right",
    "documents",
    "softmax scale",
    "comm",
    "timeout",
)
_agreed: WeakKeyDictionary[dist.ProcessGroup, set] = WeakKeyDictionary()
_MAX_AGREED = 4096  # requests; packed documents make ever new ones


def _agree(group: dist.ProcessGroup | None, request: tuple, tensors: tuple[Tensor, ...]) -> None:
    """Raise ValueError on every rank if one has a problem or asks for something else.

    A rank with a problem must not leave the others waiting, so problems travel too. The ranks talk
    the first time that each of them sees a request, not again: a rank that changes its mind alone
    in a later call is only stopped by the group's timeout.
    """
    rank = 0 if group is None else dist.get_rank(group)
    if group is None:
        problem = _problem(rank, 1, request, tensors)
        if problem:
            raise ValueError(problem)
        return
    values = (tuple(value) if isinstance(value, list) else value for value in request)
    signature = (*values, *((x.shape, x.dtype, x.device.type) for x in tensors))
    seen = _agreed.setdefault(group, set())
    if signature in seen:
        return
    asked = dict(zip(_REQUEST, request, strict=True))
    for name, x in zip("qkv", tensors, strict=True):
        asked[name] = f"[*, {', '.join(map(str, x.shape[1:]))}] {x.dtype} on {x.device.type}"
    num_ranks = dist.get_world_size(group)
    answers: list = [None] * num_ranks
    answer = (_problem(rank, num_ranks, request, tensors), asked)
    dist.all_gather_object(answers, answer, group=group)
    _compare(answers)
    if len(seen) == _MAX_AGREED:  # on every rank in the same call: they add together
        seen.clear()
    seen.add(signature)


def _compare(answers: list[tuple[str | None, dict]]) -> None:
    who = "rank {} of the context-parallel group"
    for rank, (problem, _) in enumerate(answers):
        if problem:
            raise ValueError(f"{who.format(rank)}: {problem}")
    for rank, (_, asked) in enumerate(answers):
        for name, wanted in answers[0][1].items():
            if asked[name] != wanted:
                difference = f"has {name} {asked[name]}, but rank 0 has {wanted}"
                raise ValueError(f"{who.format(rank)} {difference}; all ranks must agree")


def _problem(rank: int, num_ranks: int, request: tuple, tensors: tuple[Tensor, ...]) -> str | None:
    """What is wrong with this rank's call, in one sentence."""
    q, k, v = tensors
    lengths, _, _, left, right, _, scale, comm, timeout_s = request
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        return f"q, k, v must be [tokens, batch, heads, head dim], k and v alike, not {shapes}"
    if (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        return f"q, k and v must have the same tokens, batch and head dim, not {shapes}"
    if q.shape[3] < 1 or not 0 < scale < math.inf:
        return f"head dim and softmax_scale must be positive, not {q.shape[3]} and {scale}"
    if k.shape[2] < 1 or q.shape[2] % k.shape[2]:
        return f"the query heads must be a multiple of the KV heads, not {shapes}"
    if len({x.dtype for x in tensors}) > 1 or q.dtype not in _DTYPES:
        return (
            "q, k, v must share one of float64, float32, bfloat16 and float16, not "
            f"{q.dtype}, {k.dtype}, {v.dtype}"
        )
    if _devices_problem(tensors):
        return _devices_problem(tensors)
    if left is not None and (left < 0 or right is None):
        return f"a window must be causal and at least 1 token, not {left + 1} tokens"
    if len(lengths) != num_ranks or lengths[rank] != q.shape[0]:
        return (
            f"chunk_lengths {lengths} do not fit {num_ranks} ranks and {q.shape[0]} tokens here; "
            "pass how many tokens each rank holds"
        )
    return transports.problem_with(comm, timeout_s, q.device) or _plan_problem(rank, request, q, k)


def _devices_problem(tensors: tuple[Tensor, ...]) -> str | None:
    devices = [str(x.device) for x in tensors]
    one = len(set(devices)) == 1
    return None if one else f"q, k, v must be on one device, not {', '.join(devices)}"


def _check_kept(q: Tensor, out: Tensor, lse: Tensor) -> None:
    """The earlier call was agreed upon by all ranks; this rank only has to fit it."""
    wanted = (q.shape, q.dtype, q.shape[:-1], state_dtype(q.dtype))
    if (out.shape, out.dtype, lse.shape, lse.dtype) != wanted:
        raise ValueError(
            f"kept is out {list(out.shape)} {out.dtype}, lse {list(lse.shape)} {lse.dtype}, which "
            f"no call with q {list(q.shape)} {q.dtype} returned"
        )


def _plan_problem(rank: int, request: tuple, q: Tensor, k: Tensor) -> str | None:
    """Why no plan can be built, or no kernel computes one of its blocks."""
    lengths, schedule, kernel, left, right, documents, *_ = request
    try:
        plan = _plan(q, k, lengths, schedule, left, right, documents)
        for step in plan.steps[rank]:
            for task in step.tasks:
                choose_for(plan, task, kernel, q)
    except ValueError as error:
        return str(error)
    return None


# ---- the two ops: results have the strides of the fake ones, which compiled code counts on,
# whatever a kernel that made them by itself chose ----------------------------------------------


@torch.library.custom_op("distflash::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_name: str,
    lengths: list[int],
    schedule: str,
    kernel: str,
    left: int | None,
    right: int | None,
    documents: list[int],
    scale: float,
    comm: str,
    timeout_s: float,
) -> tuple[Tensor, Tensor]:
    group = _group(group_name)
    request = (lengths, schedule, kernel, left, right, documents, scale, comm, timeout_s)
    _agree(group, request, (q, k, v))
    plan = _plan(q, k, lengths, schedule, left, right, documents)
    rank, transport = _place(group, comm, timeout_s, plan, k)
    q, k, v = map(_inner_contiguous, (q, k, v))
    out, lse = tape.forward(plan, rank, q, k, v, scale=scale, kernel=kernel, transport=transport)
    return out.contiguous(), _tokens_innermost(lse)


@_attention.register_fake
def _(q, k, v, *_request):
    problem = _devices_problem((q, k, v))  # one on "meta" brings the others here
    if problem:
        raise ValueError(problem)
    return q.new_empty(q.shape), empty_rows(q)


@torch.library.custom_op("distflash::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    group_name: str,
    lengths: list[int],
    schedule: str,
    kernel: str,
    left: int | None,
    right: int | None,
    documents: list[int],
    scale: float,
    comm: str,
    timeout_s: float,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(q, k, lengths, schedule, left, right, documents, builder=build_backward)
    rank, transport = _place(_group(group_name), comm, timeout_s, plan, k)
    dout, q, k, v, out = map(_inner_contiguous, (dout, q, k, v, out))
    grads = tape.backward(
        plan, rank, dout, q, k, v, out, lse, scale=scale, kernel=kernel, transport=transport
    )
    dq, dk, dv = (grad.contiguous() for grad in grads)
    return dq, dk, dv


@_attention_backward.register_fake
def _(dout, q, k, v, out, lse, *_request):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx, inputs, output) -> None:
    q, k, v, *ctx.request = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx, dout, _dlse):
    nothing = (None,) * len(ctx.request)
    if dout is None:
        return None, None, None, *nothing
    q, k, v, out, lse = ctx.saved_tensors
    return *_attention_backward(dout, q, k, v, out, lse, *ctx.request), *nothing


_attention.register_autograd(_gradients, setup_context=_keep)


class _Resume(torch.autograd.Function):
    """The op's autograd around a result that is there already."""

    @staticmethod
    def forward(ctx, q, k, v, out, lse, *request):
        output = out.detach(), lse.detach()  # an input returned as it is would count as a view
        _keep(ctx, (q, k, v, *request), output)
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        dq, dk, dv, *nothing = _gradients(ctx, dout, dlse)
        return dq, dk, dv, None, None, *nothing


def _plan(q, k, lengths, schedule, left, right, documents, builder=build) -> Plan:
    mask = Mask(left, right, tuple(documents))
    options = {"num_heads": q.shape[2], "num_kv_heads": k.shape[2], "mask": mask}
    if schedule == "auto":
        schedule = choose_schedule(tuple(lengths), **options)
    return builder(schedule, tuple(lengths), **options)


def _group(name: str) -> dist.ProcessGroup | None:
    return dist.distributed_c10d._resolve_process_group(name) if name else None


def _place(
    group: dist.ProcessGroup | None, comm: str, timeout_s: float, plan: Plan, k: Tensor
) -> tuple[int, reference.Transport]:
    """(this rank, its transport)."""
    rank = 0 if group is None else dist.get_rank(group)
    return rank, transports.transport_for(group, comm, timeout_s, plan, k)


def _tokens_innermost(lse: Tensor) -> Tensor:
    """[n, b, h] over [b, h, n] in memory, as ``empty_rows`` makes it."""
    return heads_first(lse).contiguous().permute(2, 0, 1)


def _inner_contiguous(x: Tensor) -> Tensor:
    """Kernels take any strides but the last; an expanded gradient has none that they could use, and
    on GPUs rows begin at multiples of 16 bytes."""
    strides = x.stride()
    if strides[-1] != 1 or 0 in strides:
        return x.contiguous()
    if x.is_cuda and any(n * x.itemsize % 16 for n in (x.storage_offset(), *strides[:-1])):
        return x.clone(memory_format=torch.contiguous_format)
    return x
