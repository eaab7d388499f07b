"""Starting the ranks of a benchmark, and what happens when one of them is lost."""

import os
import time
from pathlib import Path

import bench_ranks
import pytest
from bench_ranks import Node, Ranks, RanksFailed

WORKER = """
import os, sys, threading, time
sys.path.insert(0, {tools!r})
import bench_ranks

def answer(request):
    if request.get("sleep") == os.environ["RANK"]:
        time.sleep(60)
    if request.get("die") == os.environ["RANK"]:
        print("a last word")
        os._exit(7)
    if request.get("raise") == os.environ["RANK"]:
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise KeyError("unforeseen")
    if request.get("fall silent") == os.environ["RANK"]:
        os.closerange(3, 100)
        time.sleep(60)
    if request.get("fail") == os.environ["RANK"]:
        return {{"status": "out of memory", "message": "too long"}}
    if "fail" in request:
        time.sleep(60)  # as in a collective that the failed rank never enters
    print("not an answer")
    return {{"rank": os.environ["RANK"], "got": request}}

bench_ranks.serve(lambda: answer)
"""


@pytest.fixture
def ranks(tmp_path: Path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER.format(tools=str(Path(bench_ranks.__file__).parent)))
    made = Ranks([str(script)], Node(0).environments(3), timeout_s=3.0)
    yield made
    made.close()


def test_every_rank_answers(ranks: Ranks) -> None:
    assert [a["rank"] for a in ranks.ask({"x": 1})] == ["0", "1", "2"]
    answers = ranks.ask_each([{"x": n} for n in range(3)])
    assert [a["got"]["x"] for a in answers] == [0, 1, 2]


def test_a_dead_rank_is_named_with_its_last_words(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"rank 1 died \(exit code 7\)(.|\n)*a last word"):
        ranks.ask({"die": "1"})


def test_a_silent_rank_is_not_waited_for_forever(ranks: Ranks) -> None:
    ranks.wait_ready()
    begun = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 2 gave no answer in 3 s"):
        ranks.ask({"sleep": "2"})
    assert time.monotonic() - begun < 20


def test_others_are_not_waited_for_where_one_rank_failed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "FAILED_GRACE_S", 0.5)
    ranks.wait_ready()
    begun = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 failed \(too long\)") as failure:
        ranks.ask({"fail": "1"}, timeout_s=30.0)
    assert time.monotonic() - begun < 20
    assert [answer["status"] for answer in failure.value.answers] == ["out of memory"]


def test_an_error_ends_a_rank_at_once(ranks: Ranks) -> None:
    """Also where something keeps the interpreter from ending."""
    with pytest.raises(RanksFailed, match=r"rank 1 died \(exit code 1\)(.|\n)*unforeseen"):
        ranks.ask({"raise": "1"})


def test_a_rank_that_hangs_with_its_output_closed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ranks, "GRACE_S", 0.5)
    ranks.wait_ready()
    begun = time.monotonic()
    with pytest.raises(RanksFailed, match="rank 0 closed its output and did not end"):
        ranks.ask({"fall silent": "0"})
    assert time.monotonic() - begun < 20


def test_one_gpu_is_shared() -> None:
    environments = Node(1, nccl_library="/x/libnccl.so.2").environments(4)
    assert [e["RANK"] for e in environments] == ["0", "1", "2", "3"]
    for environment in environments:
        assert environment["LOCAL_RANK"] == "0" and environment["WORLD_SIZE"] == "4"
        assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        assert environment["LD_PRELOAD"] == "/x/libnccl.so.2"
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert len({e["MASTER_PORT"] for e in environments}) == 1
    assert Node(1).alone()["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


def test_several_gpus_are_not() -> None:
    environments = Node(4).environments(4)
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "2", "3"]
    assert not any("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in e for e in environments)
    with pytest.raises(ValueError, match="8 ranks need as many GPUs"):
        Node(4).environments(8)


def test_visible_devices_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "")
    assert Node.here().num_gpus == 0
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", "0,3")
    assert Node.here().num_gpus == 2


CONTROL = """#!/bin/bash
folder=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -d ]; then
    sleep 100 >/dev/null 2>&1 & echo $! > $folder/nvidia-cuda-mps-control.pid
    sleep 100 >/dev/null 2>&1 & echo $! > $folder/server
    exit
fi
read command
case $command in
    get_server_list) cat $folder/server ;;
    quit*) {quit} ;;
esac
"""
END_ALL = "kill $(cat $folder/nvidia-cuda-mps-control.pid $folder/server)"


@pytest.mark.parametrize("quit_command", [END_ALL, "exec sleep 100"])
def test_the_service_ends_also_if_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quit_command: str
) -> None:
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(CONTROL.format(quit=quit_command))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(bench_ranks, "MPS_ANSWER_S", 1.0)
    with bench_ranks.Mps(True):
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        names = ("nvidia-cuda-mps-control.pid", "server")
        pids = [int((folder / name).read_text()) for name in names]
        assert all(is_running(pid) for pid in pids)
    end = time.monotonic() + 5.0
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
    assert not folder.exists() and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ


def is_running(pid: int) -> bool:
    """Also a process whose end nobody has asked for yet has ended."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_no_service_where_none_is_needed() -> None:
    with bench_ranks.Mps(False):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
