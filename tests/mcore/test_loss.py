"""Loss counts over the context-parallel group (whole runs with uneven masks: test_end_to_end)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.mcore.harness import RankPool, model_parallel
from tests.mcore.test_install import installation


def calc_loss_case(rank: int, world: int, counts: list[int], num_outputs: int) -> float:
    """Stock's function on a loss of (10 per token of this rank); returns the scaled loss."""
    from megatron.core.pipeline_parallel import schedules

    count = torch.tensor(counts[rank], dtype=torch.int)

    def loss_func(output: torch.Tensor) -> tuple:
        outputs = (10.0 * output.sum() * count, count, {"lm loss": count})
        return outputs if num_outputs == 3 else (outputs[0], outputs[2])

    config = SimpleNamespace(calculate_per_token_loss=False, timers=None, num_moe_experts=None)
    with model_parallel(context_parallel_size=world), installation():
        output = torch.ones(1, requires_grad=True)
        loss, _ = schedules.forward_step_calc_loss(
            None, output, loss_func, config, None, False, 2, [], world, True
        )
        assert count == counts[rank]  # The script's own tensor is left alone.
        with pytest.raises(ValueError, match="context parallel size 7.*2 ranks"):
            schedules.forward_step_calc_loss(
                None, output, loss_func, config, None, False, 2, [], 7, True
            )
    return loss.item()


@pytest.mark.parametrize("counts", [[6, 2], [0, 8]])
def test_sum_over_group_divided_by_count_of_group(rank_pool: RankPool, counts: list[int]) -> None:
    losses = rank_pool.run(calc_loss_case, counts, 3, world=2)
    # Two micro-batches share an iteration; data parallelism takes the mean over the two ranks.
    assert sum(losses) / 2 == pytest.approx(10.0 / 2)


def test_loss_functions_with_two_outputs_stay_as_they_are(rank_pool: RankPool) -> None:
    losses = rank_pool.run(calc_loss_case, [6, 2], 2, world=2)
    assert losses == [10.0 * 6 * 2 / 2, 10.0 * 2 * 2 / 2]  # Stock: times cp, over micro-batches.
