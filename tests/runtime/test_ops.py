"""The two ops as torch sees them: checked by torch itself, compiled, checkpointed, resumed."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron_distflash.runtime import attention
from megatron_distflash.runtime.attention import dist_flash_attention
from tests.runtime.ranks import NAMES, Case, attend_on_rank

FORWARD = torch.ops.distflash.attention.default
BACKWARD = torch.ops.distflash.attention_backward.default


class OpCounter(TorchDispatchMode):
    """How often each of our ops runs."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {FORWARD: 0, BACKWARD: 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.counts:
            self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def op_arguments(case: Case, group=None) -> tuple:
    """The op's arguments after q, k, v, as ``dist_flash_attention`` gives them."""
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is FORWARD:
                seen.append(args[3:])
            return func(*args, **(kwargs or {}))

    q, k, v, _ = case.inputs()
    with Record():
        dist_flash_attention(q, k, v, group=group, **case.options)
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["qkv", "v", ""])
def test_opcheck(seed, dtype, wanted):
    """Schema, fake tensors, autograd registration and tracing, as torch itself checks them."""
    case = Case(seed, (7,), batch=2, dtype=dtype)
    *inputs, dout = case.inputs()
    leaves = [x.requires_grad_(name in wanted) for name, x in zip("qkv", inputs, strict=True)]
    arguments = op_arguments(case)
    torch.library.opcheck(FORWARD, (*leaves, *arguments))
    inputs = [x.detach() for x in leaves]
    out, lse = FORWARD(*inputs, *arguments)
    torch.library.opcheck(BACKWARD, (dout, *inputs, out, lse, *arguments))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("documents", [(), (0, 3, 7)], ids=["alone", "two blocks"])
@pytest.mark.parametrize("batch", [1, 2])
def test_results_have_the_strides_that_compiled_code_counts_on(seed, batch, documents, dtype):
    """Also where one block is all there is, and a kernel made the results by itself."""
    case = Case(seed, (7,), (4, 2), documents=documents, batch=batch, dtype=dtype)
    *inputs, dout = case.inputs()
    arguments = op_arguments(case)

    def run(q, k, v, dout) -> list[torch.Tensor]:
        out, lse = FORWARD(q, k, v, *arguments)
        return [out, lse, *BACKWARD(dout, q, k, v, out, lse, *arguments)]

    with FakeTensorMode() as mode:
        promised = run(*map(mode.from_tensor, (*inputs, dout)))
    for x, wanted in zip(run(*inputs, dout), promised, strict=True):
        assert _moves(x) == _moves(wanted)


def _moves(x: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride, where there is more than one place to be."""
    return [(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]


def test_gradcheck(seed):
    """Against finite differences: needs no reference implementation."""
    case = Case(seed, (4,), (2, 1), head_dim=3)
    leaves = [x.requires_grad_() for x in case.inputs()[:3]]
    assert torch.autograd.gradcheck(partial(dist_flash_attention, **case.options), leaves)


def test_no_second_derivative(seed):
    """There is none, and that is said instead of a wrong one given."""
    case = Case(seed, (4,))
    q, k, v, dout = (x.requires_grad_() for x in case.inputs())
    out = dist_flash_attention(q, k, v, **case.options)
    (dq,) = torch.autograd.grad(out, q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_backward"):
        dq.sum().backward()


# ---- torch.compile ------------------------------------------------------------------------------


def block(q, k, v, group, options):
    """What stands around attention in a model, in small."""
    out, lse = dist_flash_attention(q * 2, k, v + 1, group=group, return_lse=True, **options)
    return out.sin(), lse


def attend_compiled(rank, group, cases: list[Case], dynamic: bool) -> list[dict]:
    """Whether compiled and eager ``block`` agree; and how many graphs were compiled so far."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    answers = []
    for case in cases:
        results = []
        for function in (block, compiled):
            q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out, lse = function(*leaves, group, case.options)
            out.backward(dout)
            results.append((out.detach(), lse, *(x.grad for x in leaves)))
        pairs = zip(NAMES, *results, strict=True)
        equal = {name: torch.allclose(*pair, rtol=1e-13, atol=1e-13) for name, *pair in pairs}
        answers.append(equal | {"graphs": len(graphs)})
    return answers


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_compiled_is_eager_and_one_graph(ranks, seed, num_ranks):
    case = Case(seed, (6,) * num_ranks)
    for answers in ranks.run(attend_compiled, [case], False, world=num_ranks, timeout_s=200):
        assert answers == [dict.fromkeys(NAMES, True) | {"graphs": 1}]


def test_compiled_for_any_length(ranks, seed):
    """Other lengths, which are new plans, compile nothing anew."""
    cases = [Case(seed, (n, n + 1)) for n in (6, 9, 11)]
    for answers in ranks.run(attend_compiled, cases, True, world=2, timeout_s=200):
        num_graphs = answers[0]["graphs"]
        assert answers == [dict.fromkeys(NAMES, True) | {"graphs": num_graphs}] * 3


# ---- activation checkpointing -------------------------------------------------------------------


def keep_attention(context, op, *args, **kwargs) -> CheckpointPolicy:
    kept = op is FORWARD
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)}


def attend_checkpointed(rank, group, case: Case) -> dict:
    """``NAMES`` and op counts of ``block``: without, with full and with selective checkpointing."""
    results = {}
    for name, options in (("none", None), ("full", {}), ("selective", SELECTIVE)):
        q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        run = partial(block, *leaves, group, case.options)
        with OpCounter() as counter:
            out, lse = run() if options is None else checkpoint(run, use_reentrant=False, **options)
            out.backward(dout)
        tensors = (out.detach(), lse, *(x.grad for x in leaves))
        results[name] = dict(zip(NAMES, tensors, strict=True))
        results[name]["counts"] = list(counter.counts.values())
    return results


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_selective_checkpointing_runs_the_forward_once(ranks, seed, num_ranks):
    case = Case(seed, (5,) * num_ranks, dtype=torch.bfloat16)
    for results in ranks.run(attend_checkpointed, case, world=num_ranks):
        assert [results[name].pop("counts") for name in results] == [[1, 1], [2, 1], [1, 1]]
        for name in ("full", "selective"):
            assert all(torch.equal(results[name][x], results["none"][x]) for x in NAMES), name


# ---- a kept result ------------------------------------------------------------------------------


def attend_resumed(rank, group, case: Case) -> dict:
    """``NAMES`` of a call that got the result of an earlier one; it runs the backward only."""
    q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
    with torch.no_grad():
        kept = dist_flash_attention(q, k, v, group=group, return_lse=True, **case.options)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with OpCounter() as counter:
        out, lse = dist_flash_attention(
            *leaves, group=group, kept=kept, return_lse=True, **case.options
        )
        out.backward(dout)
    assert list(counter.counts.values()) == [0, 1]
    return dict(zip(NAMES, (out.detach(), lse, *(x.grad for x in leaves)), strict=True))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_kept_result_is_the_result(ranks, seed, num_ranks):
    case = Case(seed, (5,) * num_ranks, dtype=torch.bfloat16)
    resumed = ranks.run(attend_resumed, case, world=num_ranks)
    whole = ranks.run(attend_on_rank, case, world=num_ranks)
    for ours, theirs in zip(resumed, whole, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in NAMES)


@pytest.mark.parametrize("which", [0, 1])
def test_a_kept_result_must_fit(seed, which):
    case = Case(seed, (5,))
    q, k, v, _ = case.inputs()
    kept = list(dist_flash_attention(q, k, v, return_lse=True))
    for wrong in (kept[which][:-1], kept[which].to(torch.bfloat16)):
        changed = [*kept[:which], wrong, *kept[which + 1 :]]
        with pytest.raises(ValueError, match="which no call with q .* returned"):
            dist_flash_attention(q, k, v, kept=tuple(changed))


# ---- agreement ----------------------------------------------------------------------------------


def count_agreements(rank, group, case: Case) -> list[int]:
    """How often the ranks talked about the call: after one, two and three calls."""
    q, k, v, _ = (x[case.tokens_of(rank)] for x in case.inputs())
    counts = []
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as talk:
        for causal in (True, True, False):
            dist_flash_attention(q, k, v, group=group, **(case.options | {"causal": causal}))
            counts.append(talk.call_count)
    return counts


def test_ranks_compare_a_call_once(ranks, seed):
    case = Case(seed, (5, 6), scale=1 + seed / 2**33)
    assert ranks.run(count_agreements, case, world=2) == [[1, 1, 2]] * 2


def count_agreements_with_little_memory(rank, group, case: Case) -> list[int]:
    q, k, v, _ = (x[case.tokens_of(rank)] for x in case.inputs())
    counts = []
    attention._agreed.pop(group, None)
    with (
        mock.patch.object(attention, "_MAX_AGREED", 2),
        mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as talk,
    ):
        for scale in (1.0, 2.0, 1.0, 3.0, 3.0, 1.0):
            options = case.options | {"softmax_scale": scale}
            dist_flash_attention(q, k, v, group=group, **options)
            counts.append(talk.call_count)
    return counts


def test_agreements_are_forgotten_on_all_ranks_alike(ranks, seed):
    case = Case(seed, (5, 6))
    wanted = [1, 2, 2, 3, 3, 4]  # the third request makes room: only it is remembered
    assert ranks.run(count_agreements_with_little_memory, case, world=2) == [wanted] * 2
