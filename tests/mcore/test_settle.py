"""``--distflash-schedule auto`` on a command line."""

from argparse import Namespace

import pytest

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.mcore.settle import settle_on_command_line, settle_schedule

AUTO = DistFlashConfig(schedule="auto", comm="torch")


def arguments(**changes) -> Namespace:
    values = {
        "context_parallel_size": 8,
        "tensor_model_parallel_size": 1,
        "seq_length": 8 * 8192,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "group_query_attention": True,
        "world_size": 8,
    }
    return Namespace(**values | changes)


def settled(monkeypatch, ranks_per_node: int, **changes) -> str:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_per_node))
    return settle_schedule(arguments(**changes), AUTO).schedule


def test_inside_a_node_the_sequence_stays_in_order(monkeypatch):
    assert settled(monkeypatch, 8) == "balanced"


def test_between_nodes_few_kv_heads_are_sent_instead_of_queries(monkeypatch):
    assert settled(monkeypatch, 4, num_query_groups=4) == "zigzag"
    assert settled(monkeypatch, 4, group_query_attention=False) == "balanced"


def test_tensor_parallel_ranks_share_the_node(monkeypatch):
    wide = {"tensor_model_parallel_size": 2, "world_size": 16, "num_query_groups": 4}
    assert settled(monkeypatch, 8, **wide) == "zigzag"
    assert settled(monkeypatch, 16, **wide) == "balanced"


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"])
def test_other_launchers_say_how_large_a_node_is(monkeypatch, name):
    for other in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "4")
    assert settle_schedule(arguments(num_query_groups=4), AUTO).schedule == "zigzag"


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("3", 0)])
def test_without_a_launcher_there_is_one_node_and_a_line_says_so(monkeypatch, caplog, rank, lines):
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", rank)
    assert settle_schedule(arguments(num_query_groups=4), AUTO).schedule == "balanced"
    assert caplog.text.count("takes all 8 ranks to be in one node") == lines


def test_a_length_that_zigzag_cannot_cut_stays_in_order(monkeypatch):
    assert settled(monkeypatch, 4, num_query_groups=4, seq_length=8 * 8191) == "balanced"


def test_a_named_schedule_is_kept():
    named = DistFlashConfig(schedule="ring")
    assert settle_schedule(arguments(), named) is named


@pytest.mark.parametrize("missing", ["seq_length", "num_attention_heads"])
def test_a_model_that_is_not_known_yet_is_refused(missing):
    with pytest.raises(ValueError, match="auto needs --seq-length and --num-attention-heads"):
        settle_schedule(arguments(**{missing: None}), AUTO)


@pytest.mark.parametrize("groups", [4, 32])
def test_a_command_line_is_settled_as_its_arguments_are(monkeypatch, groups):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags = "--lr 1e-3 --context-parallel-size 8 --num-attention-heads 32 --group-query-attention"
    argv = [*flags.split(), "--num-query-groups", str(groups), "--seq-length", str(8 * 8192)]
    wanted = settle_schedule(arguments(num_query_groups=groups), AUTO)
    assert settle_on_command_line(argv, AUTO) == wanted
    assert wanted.schedule == {4: "zigzag", 32: "balanced"}[groups]
