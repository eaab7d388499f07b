"""The kernels on a Hopper GPU, against float64 on the same inputs.

Tolerances: an error is held to 1.1 times cuDNN's own where cuDNN has the case, else to 4e-3 (bf16)
and 5e-4 (fp16): rounding P and the output to 16 bit costs 2.2e-3 and 2.8e-4 on normal inputs.
Gradients of large blocks cost 1.9e-3 and 2.4e-4 (cuDNN 2.5e-3 and 3.1e-4); those of blocks with a
few visible pairs cancel and lose more, hence twice the limit. fp32 row kernels: 1e-6.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_distflash.runtime.cuda_kernels import load
from megatron_distflash.runtime.cuda_tasks import HEAD_DIMS, BackwardTask, ForwardTask, Mask
from tests.kernels.reference import attention, error, from_bhsd, to_bhsd

KERNELS, REASON = load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason=f"no CUDA kernels: {REASON}")

DTYPES = (torch.bfloat16, torch.float16)
LIMIT = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
MANY = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def in_layout(b, h, s, d, layout, dtype=torch.bfloat16):
    sizes = {"b": b, "h": h, "s": s, "d": d}
    return normal(*(sizes[axis] for axis in layout), dtype=dtype)


def poisoned(like, dtype=None):
    return torch.full_like(like, math.nan, dtype=dtype)


def cudnn(q, k, v, scale, causal):
    """cuDNN on [s, b, h, d] tensors."""
    repeat = q.shape[2] // k.shape[2]
    views = (
        x.permute(1, 2, 0, 3).repeat_interleave(n, 1) for x, n in ((q, 1), (k, repeat), (v, repeat))
    )
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *views, None, True, 0.0, causal, False, scale=scale
    )
    return result[0].permute(2, 0, 1, 3)


def check_state(out, lse, expected_out, expected_lse, limit):
    seen = torch.isfinite(expected_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert error(lse[seen], expected_lse[seen]) < 1e-6
    assert error(out, expected_out) < limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "mask",
    [Mask(), Mask("causal", 0), Mask("causal", -211), Mask("causal", 300), Mask("window", 90, 77)],
)
def test_forward_in_16_bit_and_as_state(head_dim, dtype, mask):
    scale = head_dim**-0.5
    q, k, v = (
        normal(517, 2, 6, head_dim, dtype=dtype),
        *(normal(700, 2, 2, head_dim, dtype=dtype) for _ in range(2)),
    )
    expected, expected_lse = attention(q, [(k, v, mask)], scale)
    out, state = poisoned(q), poisoned(q, torch.float32)
    lse = poisoned(expected_lse, torch.float32)
    KERNELS.forward_accumulate([ForwardTask(q, k, v, lse, out=out, mask=mask)], softmax_scale=scale)
    check_state(out, lse, expected, expected_lse, LIMIT[dtype])
    lse.fill_(math.nan)
    KERNELS.forward_accumulate([ForwardTask(q, k, v, lse, state, mask=mask)], softmax_scale=scale)
    check_state(state, lse, expected, expected_lse, LIMIT[dtype])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_is_as_exact_as_cudnn(head_dim, causal):
    scale = head_dim**-0.5
    q, k, v = (normal(1024, 1, 4, head_dim) for _ in range(3))
    mask = Mask("causal" if causal else "full")
    expected, expected_lse = attention(q, [(k, v, mask)], scale)
    out, lse = poisoned(q), poisoned(expected_lse, torch.float32)
    KERNELS.forward_accumulate([ForwardTask(q, k, v, lse, out=out, mask=mask)], softmax_scale=scale)
    assert error(out, expected) <= 1.1 * error(cudnn(q, k, v, scale, causal), expected)


@st.composite
def task_lists(draw):
    """Sizes and masks of a few blocks over one query range, in a random layout."""
    num_queries = draw(st.integers(1, 400))
    masks = st.one_of(
        st.just(Mask()),
        st.builds(Mask, st.just("causal"), st.integers(-400, 400)),
        st.builds(Mask, st.just("window"), st.integers(-400, 400), st.integers(1, 500)),
    )
    blocks = draw(st.lists(st.tuples(st.integers(0, 300), masks), min_size=1, max_size=20))
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 1)]))
    return {
        "num_queries": num_queries,
        "blocks": blocks,
        "heads": heads,
        "batch": draw(st.integers(1, 2)),
        "layout": draw(st.sampled_from(["sbhd", "bshd", "bhsd"])),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "one_launch": draw(st.booleans()),
        "num_sms": draw(st.sampled_from([0, 1, 5])),  # few: blocks go through many tiles
        "tiles_per_shift": draw(st.sampled_from([0, 1, 2, 7])),
    }


def make_blocks(case):
    h, g = case["heads"]
    d, layout, dtype, b = case["head_dim"], case["layout"], case["dtype"], case["batch"]
    q = in_layout(b, h, case["num_queries"], d, layout, dtype)
    segments = [
        (in_layout(b, g, n, d, layout, dtype), in_layout(b, g, n, d, layout, dtype), mask)
        for n, mask in case["blocks"]
    ]
    return q, segments


@MANY
@given(task_lists())
def test_blocks_accumulate_to_one_attention(case):
    q, segments = make_blocks(case)
    layout, scale = case["layout"], case["head_dim"] ** -0.5
    expected, expected_lse = attention(q, segments, scale, layout)
    out, state = poisoned(q), poisoned(q, torch.float32)
    lse = poisoned(expected_lse, torch.float32)
    one = case["one_launch"]
    last = len(segments) - 1
    tasks = [
        ForwardTask(q, k, v, lse, state, out if one or i == last else None, mask, not one and i > 0)
        for i, (k, v, mask) in enumerate(segments)
    ]
    for launch in [tasks] if one else [[task] for task in tasks]:
        KERNELS.forward_accumulate(
            launch,
            softmax_scale=scale,
            layout=layout,
            num_sms=case["num_sms"],
            tiles_per_shift=case["tiles_per_shift"],
        )
    check_state(out, lse, expected, expected_lse, LIMIT[case["dtype"]])
    assert (out[(expected == 0).all(-1)] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_blocks", [2, 16])
def test_launch_by_launch_is_as_exact_as_one(head_dim, dtype, num_blocks):
    """A state that goes through many launches loses nothing against one pass over all keys."""
    scale = head_dim**-0.5
    q = normal(333, 1, 4, head_dim, dtype=dtype)
    segments = [
        (*(normal(170, 1, 2, head_dim, dtype=dtype) for _ in range(2)), Mask())
        for _ in range(num_blocks)
    ]
    expected, expected_lse = attention(q, segments, scale)
    results = []
    for together in (True, False):
        state, lse = poisoned(q, torch.float32), poisoned(expected_lse, torch.float32)
        tasks = [
            ForwardTask(q, k, v, lse, state, mask=mask, accumulate=not together and i > 0)
            for i, (k, v, mask) in enumerate(segments)
        ]
        for launch in [tasks] if together else [[task] for task in tasks]:
            KERNELS.forward_accumulate(launch, softmax_scale=scale)
        check_state(state, lse, expected, expected_lse, LIMIT[dtype])
        results.append(error(state, expected))
    assert results[1] <= 1.05 * results[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward_is_safe_at_any_gap(head_dim, dtype):
    """Old states that weigh nothing, everything and what lies between, on rows with and without
    new keys."""
    scale, mask = head_dim**-0.5, Mask("causal", -100)  # the first 100 rows see no key
    q, k, v = (normal(*size, head_dim, dtype=dtype) for size in ((400, 1, 4), *[(300, 1, 4)] * 2))
    part, part_lse = attention(q, [(k, v, mask)], scale)
    old_lses = torch.tensor(
        [-math.inf, -1e4, -90.0, -9.0, 0.0, 7.0, 14.0, 90.0, 1e4], device="cuda"
    )
    choice = torch.randint(len(old_lses), (1, 4, 400), device="cuda")
    lse, state = old_lses[choice], normal(400, 1, 4, head_dim, dtype=torch.float32)
    new = torch.logaddexp(lse.double(), part_lse)
    base = new.masked_fill(new == -math.inf, 0.0)
    weights = [(x - base).exp().permute(2, 0, 1)[..., None] for x in (lse.double(), part_lse)]
    expected = state.double() * weights[0] + part * weights[1]
    state[lse.permute(2, 0, 1) == -math.inf] = math.nan  # may hold anything
    task = ForwardTask(q, k, v, lse, state, mask=mask, accumulate=True)
    KERNELS.forward_accumulate([task], softmax_scale=scale)
    unseen = new == -math.inf
    assert (lse[unseen] == -math.inf).all() and (state[unseen.permute(2, 0, 1)] == 0).all()
    for i in range(len(old_lses)):
        for sees in (False, True):
            rows = (choice == i) & ~unseen & ((part_lse > -math.inf) == sees)
            if not rows.any():
                continue
            # An LSE of 1e4 has a unit of 1e-3 in its last place.
            assert (lse[rows] - new[rows]).abs().max() < 1e-5 + 3e-7 * new[rows].abs().max()
            at = rows.permute(2, 0, 1)
            # rounding a block's probabilities costs nothing where the block weighs nothing
            limit = LIMIT[dtype] if sees and old_lses[i] < 90 else 1e-6
            assert error(state[at], expected[at]) < limit


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_no_number_stays_in_its_rows(head_dim, poison):
    """Key h of head h makes scores of nan or inf: rows before it do not see it, later ones are no
    numbers, and the next block of numbers does not hide that."""
    heads, scale, mask = 64, head_dim**-0.5, Mask("causal")
    q, k, v = (normal(200, 1, heads, head_dim) for _ in range(3))
    q[..., 0].abs_()
    clean = attention(q, [(k, v, mask), (k, v, mask)], scale)
    poisoned_k = k.clone()
    for head in range(heads):
        poisoned_k[head, 0, head, 0] = poison
    state, lse = poisoned(q, torch.float32), torch.empty(1, heads, 200, device="cuda")
    for keys, accumulate in ((poisoned_k, False), (k, True)):
        task = ForwardTask(q, keys, v, lse, state, mask=mask, accumulate=accumulate)
        KERNELS.forward_accumulate([task], softmax_scale=scale)
        hit = torch.arange(200, device="cuda")[:, None, None] >= torch.arange(heads, device="cuda")
        assert state[hit].isnan().all() and lse.permute(2, 0, 1)[hit].isnan().all()
        assert torch.isfinite(state[~hit]).all()
    assert error(state[~hit], clean[0][~hit]) < LIMIT[torch.bfloat16]
    assert error(lse.permute(2, 0, 1)[~hit], clean[1].permute(2, 0, 1)[~hit]) < 1e-6


@MANY
@given(task_lists())
def test_gradients_of_blocks_add_up(case):
    q, segments = make_blocks(case)
    layout, scale, dtype = case["layout"], case["head_dim"] ** -0.5, case["dtype"]
    leaves = [x.double().requires_grad_() for x in (q, *(x for s in segments for x in s[:2]))]
    exact = [
        (leaves[1 + 2 * i], leaves[2 + 2 * i], mask) for i, (_, _, mask) in enumerate(segments)
    ]
    out, lse = attention(leaves[0], exact, scale, layout)
    dout = torch.randn_like(q)
    out.backward(dout.double())
    lse = lse.detach().float()
    delta = poisoned(lse)
    KERNELS.delta(out.detach().to(dtype), dout, delta, layout=layout)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in leaves]
    KERNELS.backward_accumulate(
        [
            BackwardTask(q, k, v, dout, lse, delta, sums[0], sums[1 + 2 * i], sums[2 + 2 * i], mask)
            for i, (k, v, mask) in enumerate(segments)
        ],
        softmax_scale=scale,
        layout=layout,
        num_sms=case["num_sms"],
        tiles_per_shift=case["tiles_per_shift"],
        deterministic=case["one_launch"],
    )
    size = max(x.grad.norm().item() for x in leaves)
    for total, leaf in zip(sums, leaves, strict=True):
        # A nearly empty gradient (one visible key) is all cancellation: measured against the rest.
        distance = (total.double() - leaf.grad).norm().item()
        assert distance <= 2 * LIMIT[dtype] * max(leaf.grad.norm().item(), 0.2 * size)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_sms", "tiles_per_shift"), [(0, 0), (7, 0), (0, 1), (7, 3)])
def test_gradients_of_many_queries_on_few_keys(head_dim, num_sms, tiles_per_shift):
    """The last round of key tiles is cut along the queries; see that nothing is lost or doubled."""
    q, k, v, dout = (
        normal(3001, 1, 6, head_dim),
        *(normal(300, 1, 3, head_dim) for _ in range(2)),
        normal(3001, 1, 6, head_dim),
    )
    scale = head_dim**-0.5
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(leaves[0], [(leaves[1], leaves[2], Mask())], scale)
    out.backward(dout.double())
    delta = torch.empty_like(lse, dtype=torch.float32)
    KERNELS.delta(out.detach().to(q.dtype), dout, delta)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    task = BackwardTask(q, k, v, dout, lse.detach().float(), delta, *sums)
    KERNELS.backward_accumulate(
        [task], softmax_scale=scale, num_sms=num_sms, tiles_per_shift=tiles_per_shift
    )
    for total, leaf in zip(sums, leaves, strict=True):
        assert error(total, leaf.grad) < LIMIT[q.dtype]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_results_repeat_bitwise(head_dim):
    q, k, v, dout = (normal(900, 1, heads, head_dim) for heads in (8, 2, 2, 8))
    scale, mask = head_dim**-0.5, Mask("causal")
    results = []
    for tiles_per_shift in (0, 0, 1, 2, 7):  # who computes what must not matter either
        out, lse = poisoned(q), torch.empty(1, 8, 900, device="cuda")
        KERNELS.forward_accumulate(
            [ForwardTask(q, k, v, lse, out=out, mask=mask)],
            softmax_scale=scale,
            tiles_per_shift=tiles_per_shift,
        )
        delta = torch.empty_like(lse)
        KERNELS.delta(out, dout, delta)
        sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        task = BackwardTask(q, k, v, dout, lse, delta, *sums, mask=mask)
        KERNELS.backward_accumulate(
            [task], softmax_scale=scale, tiles_per_shift=tiles_per_shift, deterministic=True
        )
        results.append([out, lse, *sums])
    for again in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], again, strict=True))


NUM_LAUNCHES = 4200  # more than there are tile counters: each must be left as it was found
SHIFTS = [(0, 0), (0, 1), (0, 2), (0, 7), (5, 1), (5, 2), (5, 7), (1, 7)]


@pytest.mark.parametrize(("num_sms", "tiles_per_shift"), SHIFTS)
def test_every_forward_takes_every_tile(num_sms, tiles_per_shift):
    q, k, v = normal(3000, 1, 32, 128), normal(60, 1, 32, 128), normal(60, 1, 32, 128)
    lse = torch.empty(1, 32, 3000, device="cuda")
    task = ForwardTask(q, k, v, lse, out=torch.empty_like(q))
    KERNELS.forward_accumulate([task], softmax_scale=0.1)
    expected, num_wrong = lse.clone(), torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(NUM_LAUNCHES):
        lse.fill_(math.nan)
        KERNELS.forward_accumulate(
            [task], softmax_scale=0.1, num_sms=num_sms, tiles_per_shift=tiles_per_shift
        )
        num_wrong += (lse != expected).sum()
    assert num_wrong.item() == 0


@pytest.mark.parametrize(("num_sms", "tiles_per_shift"), SHIFTS)
def test_every_backward_takes_every_tile_once(num_sms, tiles_per_shift):
    """All probabilities are 1 and their gradients -1, so that sums are whole numbers, exactly."""
    zeros, ones = torch.zeros, torch.ones
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    q, dout = zeros(60, 1, 32, 128, **kind), ones(60, 1, 32, 128, **kind)
    k, v = ones(3000, 1, 32, 128, **kind), zeros(3000, 1, 32, 128, **kind)
    lse, delta = zeros(1, 32, 60, device="cuda"), ones(1, 32, 60, device="cuda")
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    task = BackwardTask(q, k, v, dout, lse, delta, dq, dk, dv)
    for _ in range(NUM_LAUNCHES):
        KERNELS.backward_accumulate(
            [task], softmax_scale=1.0, num_sms=num_sms, tiles_per_shift=tiles_per_shift
        )
    assert (dq == -3000 * NUM_LAUNCHES).all()
    assert (dk == 0).all()
    assert (dv == 60 * NUM_LAUNCHES).all()


def test_blocks_that_leave_let_other_kernels_begin():
    """A kernel of high priority, posted while attention runs, ends well before attention does."""
    q, k, v = (normal(16384, 1, 16, 128) for _ in range(3))
    lse, out = torch.empty(1, 16, 16384, device="cuda"), torch.empty_like(q)
    urgent, flag = torch.cuda.Stream(priority=-1), torch.zeros(1, device="cuda")
    task = ForwardTask(q, k, v, lse, out=out)

    def share_waited(tiles_per_shift):
        begin, end, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        begin.record()
        KERNELS.forward_accumulate([task], softmax_scale=0.1, tiles_per_shift=tiles_per_shift)
        end.record()
        with torch.cuda.stream(urgent):
            flag.add_(1)
            done.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(done) / begin.elapsed_time(end)

    share_waited(1)
    if max(share_waited(0) for _ in range(3)) <= 0.8:
        pytest.skip("nobody has to wait: this GPU's time is shared with other processes")
    assert min(share_waited(8) for _ in range(3)) < 0.5


def test_head_ranges_and_padded_rows_are_left_alone():
    """A task over a slice of heads and rows reads and writes nothing beside it."""
    q = normal(300, 2, 8, 128)
    k, v = normal(260, 2, 4, 128), normal(260, 2, 4, 128)
    state = poisoned(q, torch.float32)
    lse = torch.full((2, 8, 300), math.nan, device="cuda")
    rows, heads, kv_heads = slice(17, 250), slice(2, 6), slice(1, 3)
    part = (q[rows, :, heads], k[:, :, kv_heads], v[:, :, kv_heads])
    KERNELS.forward_accumulate(
        [ForwardTask(*part, lse[:, heads, rows], state[rows, :, heads])], softmax_scale=0.1
    )
    expected, expected_lse = attention(part[0], [(*part[1:], Mask())], 0.1)
    check_state(state[rows, :, heads], lse[:, heads, rows], expected, expected_lse, 4e-3)
    state[rows, :, heads] = math.nan
    lse[:, heads, rows] = math.nan
    assert state.isnan().all() and lse.isnan().all()


def test_misaligned_tensors_are_refused():
    q, k, v = (normal(64, 1, 2, 68)[..., 2:66] for _ in range(3))
    lse = torch.empty(1, 2, 64, device="cuda")
    with pytest.raises(RuntimeError, match="16-byte aligned"):
        KERNELS.forward_accumulate(
            [ForwardTask(q, k, v, lse, out=torch.empty_like(q))], softmax_scale=1.0
        )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("layout", ["sbhd", "bhsd"])
def test_merge_is_safe_at_any_gap(head_dim, dtype, layout):
    state = in_layout(2, 3, 70, head_dim, layout, torch.float32)
    part = in_layout(2, 3, 70, head_dim, layout, dtype)
    lses = torch.tensor([-math.inf, -1e4, -3.0, 0.0, 2.0, 88.0, 1e4], device="cuda")
    state_lse, part_lse = (lses[torch.randint(7, (2, 3, 70), device="cuda")] for _ in range(2))
    to_bhsd(state, layout)[state_lse == -math.inf] = math.nan  # may hold anything
    new = torch.logaddexp(state_lse.double(), part_lse.double())
    base = new.masked_fill(new == -math.inf, 0.0)
    weights = [(x.double() - base).exp()[..., None] for x in (state_lse, part_lse)]
    known = to_bhsd(state, layout).nan_to_num().double()
    expected = known * weights[0] + to_bhsd(part, layout).double() * weights[1]
    finished, finished_lse = poisoned(part), state_lse.clone()
    if dtype != torch.float32:
        KERNELS.merge(state, finished_lse, part, part_lse, out=finished, layout=layout)
    KERNELS.merge(state, state_lse, part, part_lse, layout=layout)
    seen = new > -math.inf
    if dtype != torch.float32:
        assert torch.equal(finished_lse, state_lse)
        exact = torch.where(seen[..., None], to_bhsd(state, layout), 0).to(dtype)
        assert torch.equal(to_bhsd(finished, layout), exact)
    assert torch.equal(state_lse > -math.inf, seen)
    assert error(state_lse[seen], new[seen]) < 1e-6
    assert error(to_bhsd(state, layout)[seen], expected[seen]) < 1e-6


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["sbhd", "bhsd"])
def test_delta_accumulate_and_cast(head_dim, dtype, layout):
    x, y = (in_layout(2, 3, 77, head_dim, layout, dtype) for _ in range(2))
    delta = torch.full((2, 3, 77), math.nan, device="cuda")
    KERNELS.delta(x, y, delta, layout=layout)
    assert error(delta, to_bhsd(x.double() * y.double(), layout).sum(-1)) < 1e-6
    total = in_layout(2, 3, 77, head_dim, layout, torch.float32)
    expected = total.double() + x.double()
    KERNELS.accumulate(total, x, layout=layout)
    assert error(total, expected) < 1e-6
    result = poisoned(x)
    KERNELS.cast(result, total, layout=layout)
    assert torch.equal(result, total.to(dtype))


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_stand_in_output(head_dim, dtype, size):
    if dtype == torch.float16 and not 1e-8 < size < 1e5:
        pytest.skip("float16 has no such numbers")
    dout = (normal(77, 2, 3, head_dim, dtype=torch.float32).clamp(-4, 4) * size).to(dtype)
    dout[5, 1] = 0
    delta = normal(2, 3, 77, dtype=torch.float32) * size
    out = poisoned(dout)
    KERNELS.stand_in(dout, delta, out)
    assert (out[5, 1] == 0).all()
    expected = delta.permute(2, 0, 1).double().clone()
    expected[5, 1] = 0
    found = (out.double() * dout.double()).sum(-1)
    # the output's rounding, and where it is a subnormal of float16 an absolute one
    tiny = 6e-8 * dout.double().abs().sum(-1) if dtype == torch.float16 else 0
    assert ((found - expected).abs() <= expected.abs() * torch.finfo(dtype).eps * 2 + tiny).all()


def test_layouts_agree():
    q, k, v = (normal(1, 4, 130, 64) for _ in range(3))
    results = []
    for layout in ("sbhd", "bshd", "bhsd"):
        part = [from_bhsd(x, layout).contiguous() for x in (q, k, v)]
        out, lse = poisoned(part[0]), torch.empty(1, 4, 130, device="cuda")
        KERNELS.forward_accumulate(
            [ForwardTask(*part, lse, out=out)], softmax_scale=0.2, layout=layout
        )
        results.append(to_bhsd(out, layout))
    assert all(torch.equal(results[0], other) for other in results[1:])
