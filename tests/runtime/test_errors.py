"""Every mistake is a ValueError, with the same sentence on every rank, and leaves no rank waiting.

Each case makes a right call after the wrong one: the group must still be usable.

Ranks compare their calls the first time they see them, so each test has a softmax scale of its own.
"""

import math
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_distflash.runtime.attention import dist_flash_attention

TOKENS = 6
Q, KV = (TOKENS, 1, 4, 8), (TOKENS, 1, 2, 8)  # of one rank


def attend_with(group, changes: dict, scale: float = 1.0) -> torch.Tensor:
    """A right call but for ``changes``: shapes and dtypes by tensor name, and options."""
    options = {"softmax_scale": scale} | changes
    shapes = {"q": options.pop("q", Q), "k": options.pop("k", KV), "v": options.pop("v", KV)}
    dtypes, devices = options.pop("dtypes", {}), options.pop("devices", {})
    wanted = options.pop("requires_grad", False)
    inputs = {
        name: torch.ones(
            shape,
            dtype=dtypes.get(name, torch.float32),
            device=devices.get(name, "cpu"),
            requires_grad=wanted,
        )
        for name, shape in shapes.items()
    }
    return dist_flash_attention(**inputs, group=group, **options)


def attend_wrongly(rank: int, group, changes: list[dict], scale: float) -> str:
    """What this rank, which makes the call ``changes[rank]``, is told; then a right call."""
    message = "no error"
    try:
        attend_with(group, changes[rank], scale)
    except ValueError as error:
        message = str(error)
    torch.testing.assert_close(attend_with(group, {}, scale), torch.ones(Q))
    return message


@pytest.fixture
def tell(ranks, seed):
    """``tell(changes of each rank)``: what each rank is told."""
    scale = 1 + seed / 2**33

    def run(changes: list[dict]) -> list[str]:
        return ranks.run(attend_wrongly, changes, scale, world=len(changes), timeout_s=100)

    return run


ALL = dict.fromkeys("qkv", torch.complex64)
# What is wrong with one call, whatever the other ranks do; with two ranks of TOKENS tokens.
MISTAKES = {
    "q of no dims": ({"q": ()}, "q, k, v must be [tokens, batch, heads, head dim]"),
    "q of three dims": ({"q": Q[1:]}, "q, k, v must be [tokens, batch, heads, head dim]"),
    "k of three dims": ({"k": Q[1:]}, "q, k, v must be [tokens, batch, heads, head dim]"),
    "k and v differ": ({"v": (TOKENS, 1, 2, 4)}, "k and v alike"),
    "tokens differ": ({"q": (TOKENS + 1, 1, 4, 8)}, "must have the same tokens"),
    "batch differs": ({"q": (TOKENS, 2, 4, 8)}, "must have the same tokens, batch"),
    "head dim differs": ({"q": (TOKENS, 1, 4, 4)}, "the same tokens, batch and head dim"),
    "no head dim": (dict.fromkeys("qkv", (TOKENS, 1, 2, 0)), "head dim and softmax_scale must be"),
    "scale of zero": ({"softmax_scale": 0.0}, "must be positive, not 8 and 0.0"),
    "negative scale": ({"softmax_scale": -0.5}, "must be positive, not 8 and -0.5"),
    "scale of nan": ({"softmax_scale": math.nan}, "must be positive, not 8 and nan"),
    "no KV heads": (dict.fromkeys("kv", (TOKENS, 1, 0, 8)), "must be a multiple of the KV heads"),
    "heads do not share": ({"q": (TOKENS, 1, 3, 8)}, "must be a multiple of the KV heads"),
    "dtypes differ": (
        {"dtypes": {"k": torch.float64}},
        "must share one of float64, float32, bfloat16 and float16, not torch",
    ),
    "complex numbers": (
        {"dtypes": ALL},
        "must share one of float64, float32, bfloat16 and float16, not torch.complex64",
    ),
    "window of none": ({"window": 0, "schedule": "ring"}, "at least 1 token, not 0 tokens"),
    "window ahead": ({"window": 3, "causal": False}, "a window must be causal"),
    "too few chunks": ({"chunk_lengths": ()}, "chunk_lengths [] do not fit"),
    "another chunk": ({"chunk_lengths": (7, 7)}, "chunk_lengths [7, 7] do not fit 2 ranks and 6"),
    "unknown schedule": ({"schedule": "fastest"}, "unknown schedule 'fastest'; choose one of"),
    "unknown kernel": ({"kernel": "fastest"}, "unknown kernel 'fastest'; choose one of"),
    "kernel of GPUs": ({"kernel": "cudnn"}, "CUDA tensors only"),
    "unknown comm": ({"comm": "pigeons"}, "comm must be one of"),
    "comm of GPUs": ({"comm": "nccl"}, "the tensors are on cpu"),
    "no patience": ({"timeout_s": 0.0}, "the timeout must be more than 0 seconds"),
    "window in balanced": ({"window": 3}, "use 'ring' or 'zigzag'"),
    "documents in paper": ({"documents": (0, 5, 12), "schedule": "paper"}, "cannot balance a mask"),
    "documents end early": ({"documents": (0, 5), "schedule": "ring"}, "ends at token 5"),
    "documents go back": ({"documents": (0, 7, 7, 12), "schedule": "ring"}, "must ascend from 0"),
}


@pytest.mark.parametrize("culprits", [(0, 1), (0,), (1,)], ids=["all", "first", "last"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(tell, mistake, culprits):
    """Of all ranks, or of one alone, which must tell the other."""
    changes, expected = MISTAKES[mistake]
    messages = tell([changes if rank in culprits else {} for rank in range(2)])
    assert expected in messages[0]
    assert messages[0].startswith(f"rank {culprits[0]} of the context-parallel group: ")
    assert messages == messages[:1] * 2


NO_MISTAKE_OF_ONE_RANK = ("documents", "another chunk", "window in balanced")


@pytest.mark.parametrize(
    "mistake", [name for name in MISTAKES if not name.startswith(NO_MISTAKE_OF_ONE_RANK)]
)
def test_mistake_of_one_rank(mistake):
    changes, expected = MISTAKES[mistake]
    with pytest.raises(ValueError) as caught:
        attend_with(None, changes)
    assert expected in str(caught.value)


def test_tensors_on_several_devices():
    with pytest.raises(ValueError, match="must be on one device, not cpu, cpu, meta"):
        attend_with(None, {"devices": {"v": "meta"}})


def test_tensors_without_data():
    """On the meta device, shapes flow: for whoever builds a model without its memory."""
    assert attend_with(None, {"devices": dict.fromkeys("qkv", "meta")}).shape == Q


def test_lengths_nobody_can_have(tell):
    """Each rank's own length fits, but the sequence cannot be."""
    messages = tell([{"chunk_lengths": (TOKENS, -2)}, {}])
    assert messages == ["rank 0 of the context-parallel group: rank 1 cannot hold -2 tokens"] * 2
    nothing = dict.fromkeys("qkv", (0, 1, 2, 8))
    messages = tell([nothing, nothing])
    assert "at least one rank and one token" in messages[0]


# Calls that are right, each by itself, but not the same as {}.
DIFFERENCES = {
    "dtype": ({"dtypes": dict.fromkeys("qkv", torch.float64)}, "q [*, 1, 4, 8] torch.float64"),
    "batch": (
        {"q": (TOKENS, 2, 4, 8), "k": (TOKENS, 2, 2, 8), "v": (TOKENS, 2, 2, 8)},
        "q [*, 2, 4, 8]",
    ),
    "KV heads": (dict.fromkeys("kv", (TOKENS, 1, 4, 8)), "k [*, 1, 4, 8]"),
    "unannounced length": (
        {"q": (5, 1, 4, 8), "k": (5, 1, 2, 8), "v": (5, 1, 2, 8)},
        "chunk lengths [5, 5, 5]",
    ),
    "lengths": ({"chunk_lengths": (6, 6, 7)}, "chunk lengths [6, 6, 7]"),
    "schedule": ({"schedule": "ring"}, "schedule ring, but rank 0 has balanced"),
    "kernel": ({"kernel": "cpu"}, "kernel cpu, but rank 0 has auto"),
    "mask": ({"causal": False}, "right None, but rank 0 has 0"),
    "scale": ({"softmax_scale": 0.25}, "softmax scale 0.25"),
    "timeout": ({"timeout_s": 5.0}, "timeout 5.0"),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_must_agree(tell, difference):
    changes, expected = DIFFERENCES[difference]
    odd_rank = 1 if difference == "lengths" else 2
    messages = tell([changes if rank == odd_rank else {} for rank in range(3)])
    assert messages == messages[:1] * 3
    assert expected in messages[0] and "all ranks must agree" in messages[0]
    assert messages[0].startswith(f"rank {odd_rank} of the context-parallel group has ")


def test_all_ranks_may_differ_together(tell):
    """What is a disagreement from one rank is a right call when all make it."""
    for difference, (changes, _) in DIFFERENCES.items():
        if difference not in ("unannounced length", "lengths"):
            assert tell([changes] * 3) == ["no error"] * 3, difference


def fall_out(rank: int, group) -> float:
    """Seconds until a rank notices that its peer suddenly makes another call."""
    own = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank > 1:
        return 0.0
    attend_with(own, {})
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        attend_with(own, {"schedule": "ring"} if rank == 1 else {})
    return time.monotonic() - start


def test_a_late_disagreement_ends_with_the_groups_timeout(ranks):
    """The call of rank 0 was agreed upon before, so nobody asks rank 0 again."""
    assert max(ranks.run(fall_out, timeout_s=60)) < 30
