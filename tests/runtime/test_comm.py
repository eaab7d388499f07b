"""The choice of a transport: what is refused, what falls back, and that both are said."""

import gc
import logging
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.runtime import comm
from megatron_distflash.runtime.native import NativeExecutor
from megatron_distflash.runtime.reference import NoTransport, TorchTransport

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_choices_are_those_of_the_flag() -> None:
    field = DistFlashConfig.__dataclass_fields__["comm"]
    assert set(comm.COMMS) == set(field.metadata["choices"])


@pytest.mark.parametrize(
    ("name", "timeout_s", "device", "problem"),
    [
        ("auto", 1.0, CPU, None),
        ("torch", 1.0, CPU, None),
        ("nccl", 1.0, GPU, None),
        ("nccl", 1.0, CPU, "moves GPU memory"),
        ("copy", 1.0, CPU, "moves GPU memory"),
        ("mpi", 1.0, GPU, "must be one of auto"),
        ("auto", 0.0, GPU, "more than 0 seconds"),
        ("auto", float("nan"), GPU, "more than 0 seconds"),
    ],
)
def test_problems(name: str, timeout_s: float, device: torch.device, problem: str | None) -> None:
    found = comm.problem_with(name, timeout_s, device)
    assert found is None if problem is None else problem in found


def test_cpu_tensors_go_through_torch() -> None:
    k = torch.randn(4, 1, 1, 8)
    assert isinstance(comm.transport_for(None, "auto", 1.0, None, k), NoTransport)
    for name in ("auto", "torch"):
        assert isinstance(comm.transport_for(object(), name, 1.0, None, k), TorchTransport)


def choose(monkeypatch, works: set[str], *, copies_suit: bool, name: str = "auto"):
    """(what was chosen, what was tried), where only ``works`` can be made."""
    tried = []

    def make(group, candidate, timeout_s, device):
        tried.append(candidate)
        if candidate not in works:
            raise RuntimeError(f"rank 3 has no {candidate}")
        return candidate

    def try_out(group, candidate, timeout_s, device):
        tried.append(f"{candidate} for {timeout_s} s")
        if candidate not in works:
            raise RuntimeError(f"rank 3 has no {candidate}")

    monkeypatch.setattr(comm, "_try_out", try_out)
    monkeypatch.setattr(comm, "_make", make)
    monkeypatch.setattr(comm, "_suits_copies", lambda group, device: copies_suit)
    return comm._choose(None, name, 1.0, GPU), tried


def test_auto_prefers_copies_in_one_node(monkeypatch) -> None:
    both = {"nccl", "copy"}
    assert choose(monkeypatch, both, copies_suit=True) == ("copy", ["copy for 1.0 s", "copy"])
    assert choose(monkeypatch, both, copies_suit=False) == ("nccl", ["nccl"])


@pytest.mark.parametrize(
    ("places", "suits"),
    [
        ([("a", "gpu0", True), ("a", "gpu1", True)], True),
        ([("a", "gpu0", True), ("a", "gpu0", True)], False),  # ranks share a GPU
        ([("a", "gpu0", True), ("b", "gpu1", True)], False),  # two nodes
        ([("a", "gpu0", True), ("a", "gpu1", False)], False),  # one queue
    ],
)
def test_where_copies_suit(monkeypatch, places: list, suits: bool) -> None:
    def gather(answers: list, own, group) -> None:
        assert own[2] is False
        answers[:] = places

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(comm.dist, "get_world_size", lambda group: len(places))
    monkeypatch.setattr(comm.dist, "all_gather_object", gather)
    properties = SimpleNamespace(uuid="gpu0")
    monkeypatch.setattr(comm.torch.cuda, "get_device_properties", lambda device: properties)
    assert comm._suits_copies(object(), GPU) is suits


def test_auto_says_why_it_falls_back(monkeypatch, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        tried = ["copy for 1.0 s", "nccl"]
        assert choose(monkeypatch, set(), copies_suit=True) == (None, tried)
    for words in ("rank 3 has no copy", "rank 3 has no nccl", "go through torch.distributed"):
        assert words in caplog.text


def test_what_was_asked_for_is_not_replaced(monkeypatch) -> None:
    with pytest.raises(RuntimeError, match="rank 3 has no copy"):
        choose(monkeypatch, {"nccl"}, copies_suit=True, name="copy")


class FakeGroup:
    """Stands for a process group, which torch holds for us as long as it lives."""


class FakeExecutor:
    closed: ClassVar[list] = []

    def __init__(self, group, comm, device, *, timeout_s) -> None:
        self.comm = comm

    def transport(self, plan, k) -> str:
        return f"transport of {self.comm}"

    def close(self, *, alone: bool = False) -> None:
        self.closed.append((self.comm, alone))


@pytest.fixture
def fake_executors(monkeypatch) -> list:
    monkeypatch.setattr(comm, "NativeExecutor", FakeExecutor)
    monkeypatch.setattr(comm.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(FakeExecutor, "closed", [])
    return FakeExecutor.closed


def test_an_executor_ends_with_its_group(fake_executors) -> None:
    groups = [FakeGroup(), FakeGroup()]
    k = SimpleNamespace(is_cuda=True, device=GPU)
    for group, name in zip(groups, ("nccl", "copy"), strict=True):
        for _ in range(2):
            assert comm.transport_for(group, name, 1.0, None, k) == f"transport of {name}"
    del group, groups[0]
    gc.collect()
    assert fake_executors == [("nccl", True)]
    comm.close(groups[0])
    assert fake_executors[1:] == [("copy", False)]
    assert comm.memory_reserved(groups[0]) == 0
    groups.clear()
    gc.collect()
    assert fake_executors[1:] == [("copy", False)]  # and is forgotten once it is closed


def test_auto_gives_up_copies_that_fail_a_trial(fake_executors, monkeypatch, caplog) -> None:
    def fail(executor) -> None:
        if executor.comm == "copy":
            raise RuntimeError("what rank 1 sent in a trial arrived otherwise")

    monkeypatch.setattr(FakeExecutor, "try_out", fail, raising=False)
    monkeypatch.setattr(comm, "_suits_copies", lambda group, device: True)
    group = FakeGroup()
    assert comm._choose(group, "auto", 1.0, GPU).comm == "nccl"
    assert fake_executors == [("copy", True)]
    assert "no copy transfers: what rank 1 sent in a trial" in caplog.text


def test_a_trial_is_short_and_ends_before_copies_are_made(fake_executors, monkeypatch) -> None:
    made = []

    class Noted(FakeExecutor):
        def __init__(self, group, comm, device, *, timeout_s) -> None:
            super().__init__(group, comm, device, timeout_s=timeout_s)
            made.append((timeout_s, list(fake_executors)))

        def try_out(self) -> None:
            pass

    monkeypatch.setattr(comm, "NativeExecutor", Noted)
    monkeypatch.setattr(comm, "_suits_copies", lambda group, device: True)
    group = FakeGroup()
    assert comm._choose(group, "auto", 600.0, GPU).comm == "copy"
    assert made == [(comm.TRIAL_TIMEOUT_S, []), (600.0, [("copy", False)])]


def native_on_cpu_ranks(rank: int, group) -> str:
    try:
        NativeExecutor(group, "nccl", GPU, timeout_s=5.0)
    except RuntimeError as error:
        return str(error)
    return "made"


def test_native_transports_refuse_on_every_rank_alike(ranks) -> None:
    first, *others = ranks.run(native_on_cpu_ranks, world=3)
    assert first.startswith("rank 0 of the context-parallel group: ")
    assert others == [first, first]
