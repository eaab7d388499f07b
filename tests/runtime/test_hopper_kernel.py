"""Attention through our own kernels: on the CPU with kernels that follow the same contract, which
finds a wrong mask, a state that is read before it is written, or rows written twice at once; on a
Hopper GPU with the kernels themselves."""

from unittest import mock

import pytest
import torch

from megatron_distflash.plan import SCHEDULES, build, build_backward
from megatron_distflash.runtime import blocks
from megatron_distflash.runtime.attention import dist_flash_attention
from megatron_distflash.runtime.cuda_tasks import Mask
from megatron_distflash.runtime.hopper_kernel import TILES_PER_SHIFT, Hopper, mask_of
from megatron_distflash.runtime.kernel import Band
from megatron_distflash.runtime.library_kernels import Cpu
from tests.runtime.fake_kernels import forget_kernels, on_the_cpu
from tests.runtime.ranks import NAMES, Case, check, gather

UNBALANCED = ("ring", "zigzag")


def attend_on_fakes(rank, group, case: Case) -> tuple[dict[str, torch.Tensor], list[int]]:
    """``NAMES`` of the rank's own tokens, and how many tasks each launch had."""
    q, k, v, dout = (x[case.tokens_of(rank)] for x in case.inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with on_the_cpu() as fake:
        out, lse = dist_flash_attention(
            *leaves, group=group, return_lse=True, kernel="cuda", **case.options
        )
        out.backward(dout)
    results = out.detach(), lse, *(x.grad for x in leaves)
    assert all(fake.deterministic)
    return dict(zip(NAMES, results, strict=True)), fake.launches


def attend(ranks, case: Case) -> list[list[int]]:
    """Checks the results; returns the launches of each rank."""
    parts = ranks.run(attend_on_fakes, case, world=case.num_ranks)
    check(case, gather(case, [results for results, _ in parts]))
    return [launches for _, launches in parts]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8])
def test_every_schedule(ranks, seed, num_ranks, schedule, causal):
    attend(ranks, Case(seed, (9,) * num_ranks, (4, 2), schedule, causal, batch=2))


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("lengths", [(7, 1, 12), (0, 5, 9, 2), (8, 0, 0, 3)], ids=str)
def test_uneven_chunks(ranks, seed, lengths, schedule):
    attend(ranks, Case(seed, lengths, (6, 2), schedule))


@pytest.mark.parametrize("schedule", UNBALANCED)
@pytest.mark.parametrize(
    ("causal", "window", "documents"),
    [(True, 5, ()), (True, None, (0, 3, 20, 32)), (False, None, (0, 9, 32)), (True, 4, (0, 7, 32))],
)
def test_windows_and_documents(ranks, seed, schedule, causal, window, documents):
    attend(ranks, Case(seed, (8, 8, 11, 5), (4, 2), schedule, causal, window, documents))


@pytest.mark.parametrize("schedule", ["balanced", "zigzag"])
def test_a_step_is_one_launch(ranks, seed, schedule):
    case = Case(seed, (8,) * 4, (4, 2), schedule)
    heads = {"num_heads": 4, "num_kv_heads": 2, "mask": case.mask}
    plans = [make(schedule, case.lengths, **heads) for make in (build, build_backward)]
    for rank, launches in enumerate(attend(ranks, case)):
        steps = [step for plan in plans for step in plan.steps[rank]]
        assert launches == [len(step.tasks) for step in steps if step.tasks]
        assert schedule == "balanced" or max(launches) > 1


def shifts_on_fakes(rank, group, case: Case) -> list[int]:
    leaves = [x[case.tokens_of(rank)].requires_grad_() for x in case.inputs()[:3]]
    with on_the_cpu() as fake, mock.patch.dict(TILES_PER_SHIFT, forward=3, backward=5):
        dist_flash_attention(*leaves, group=group, kernel="cuda", **case.options).sum().backward()
    return fake.shifts


@pytest.mark.parametrize("schedule", ["balanced", "zigzag"])
def test_launches_give_way_to_transfers(ranks, seed, schedule):
    case = Case(seed, (8,) * 4, (4, 2), schedule)
    for shifts in ranks.run(shifts_on_fakes, case, world=4):
        assert shifts == sorted(shifts) and set(shifts) == {3, 5}


def test_one_rank_has_nothing_to_give_way_to(seed):
    assert shifts_on_fakes(0, None, Case(seed, (40,), (4, 2))) == [0, 0]


def test_documents_of_one_rank_are_one_launch(seed):
    case = Case(seed, (40,), (4, 2), documents=(0, 3, 20, 32, 40))
    results, launches = attend_on_fakes(0, None, case)
    check(case, results)
    assert launches == [4, 4]


@pytest.mark.parametrize("left", [None, 0, 3, 100])
@pytest.mark.parametrize("right", [None, -7, 0, 4, 50])
@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (4, 12), (12, 5)])
def test_masks_say_the_same_as_bands(rows, columns, left, right):
    if right is None and left is not None or left is not None and left + right < 0:
        pytest.skip("no mask of ours")
    mask = mask_of(Band(left, right))
    for i in range(rows):
        for j in range(columns):
            wanted = (left is None or j >= i - left) and (right is None or j <= i + right)
            assert sees(mask, i, j) == wanted, (mask, i, j)


def sees(mask: Mask, i: int, j: int) -> bool:
    """As kernels/api.h says it."""
    if mask.kind == "full":
        return True
    window = mask.kind == "window"
    return j <= i + mask.offset and (not window or j > i + mask.offset - mask.window)


def test_refusals():
    x = torch.empty(0, 128, dtype=torch.bfloat16)
    assert "CUDA tensors only" in Hopper().refusal(x, "full", "forward")


def attend_where_the_backward_is_refused(rank, group, case: Case) -> None:
    leaves = [x[case.tokens_of(rank)].requires_grad_() for x in case.inputs()[:3]]
    out = dist_flash_attention(*leaves, group=group, kernel="cpu", **case.options)
    answer = mock.patch.object(Cpu, "refusal", lambda *_: "not backward")
    forget_kernels()
    with answer, pytest.raises(ValueError, match="cpu: not backward.; choose another kernel"):
        out.sum().backward()
    forget_kernels()
    out.sum().backward()


def test_a_refused_backward_moves_nothing(ranks, seed):
    """All ranks are told alike, and the next call finds no transfer of the one before."""
    ranks.run(attend_where_the_backward_is_refused, Case(seed, (5,) * 4), world=4)


def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    refusal = Hopper().refusal(torch.empty(0, 128, device="cuda").half(), "full", "forward")
    if refusal:
        pytest.skip(refusal)
    return torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims_and_dtypes_that_it_refuses(dtype):
    device = gpu()
    assert Hopper().refusal(torch.empty(0, 80, device=device, dtype=dtype), "full", "forward")
    assert Hopper().refusal(torch.empty(0, 128, device=device), "full", "forward")


def tensors_on(device, case: Case):
    return [x.to(device) for x in case.inputs()]


def run_on(device, case: Case, kernel: str) -> dict[str, torch.Tensor]:
    q, k, v, dout = tensors_on(device, case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dist_flash_attention(*leaves, return_lse=True, kernel=kernel, **case.options)
    out.backward(dout)
    results = out.detach(), lse, *(x.grad for x in leaves)
    return dict(zip(NAMES, (x.cpu() for x in results), strict=True))


@pytest.mark.parametrize("schedule", ["balanced", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_on_a_gpu(seed, schedule, dtype, causal):
    """As near as 16 bits are: twice the rounding of results of size 1 to 4."""
    device = gpu()
    case = Case(seed, (517,), (4, 2), schedule, causal, batch=2, head_dim=128, dtype=dtype)
    check(case, run_on(device, case, "cuda"), tolerance=8 * torch.finfo(dtype).eps)


OTHERS = ("cudnn", "flash", "fa4")


@pytest.mark.parametrize(
    "kernels", [pair for name in OTHERS for pair in (("cuda", name), (name, "cuda"), (name, name))]
)
def test_forward_and_backward_of_different_kernels(seed, monkeypatch, kernels):
    """LSEs are the same number, so gradients are as good as with one kernel."""
    device = gpu()
    q = torch.empty(0, 128, device=device, dtype=torch.bfloat16)
    for name in kernels:
        if blocks._KERNELS[name].refusal(q, "causal", "forward"):
            pytest.skip(f"{name} is not there")
    case = Case(seed, (640,), (4, 4), head_dim=128, dtype=torch.bfloat16)
    names = dict(zip(("forward", "backward"), kernels, strict=True))
    monkeypatch.setattr(blocks, "candidates", lambda direction, *_: [names[direction]])
    forget_kernels()
    try:
        check(case, run_on(device, case, "auto"), tolerance=8 * torch.finfo(case.dtype).eps)
    finally:
        forget_kernels()


def test_deterministic_gradients_are_the_same_bits(seed):
    """Without it they differ in some of these runs; with it they must not."""
    device = gpu()
    case = Case(seed, (2048,), (8, 2), head_dim=128, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [run_on(device, case, kernel) for kernel in ("cuda", "auto") for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    for name in NAMES:
        assert all(torch.equal(runs[0][name], run[name]) for run in runs[1:3]), name
        assert all(torch.equal(runs[3][name], run[name]) for run in runs[4:]), name
