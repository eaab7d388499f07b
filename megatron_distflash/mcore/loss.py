"""Loss averages that do not depend on how a sequence's unmasked tokens fall on ranks.

Stock Megatron divides each context-parallel rank's loss by that rank's own number of unmasked
tokens and then averages over ranks. That is the mean over the sequence only if every rank has as
many; a prompt that is masked and lies on rank 0 alone weighs the others' tokens too little. Here
the count of the whole group is used, so that gradients equal those of a run without context
parallelism. With ``--calculate-per-token-loss`` Megatron already counts over all ranks; only the
multi-token-prediction loss is wrong there too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def exact_calc_loss(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``schedules.forward_step_calc_loss`` to count a micro-batch's tokens over its group.

    Only loss functions that return (loss sum, number of tokens, report) are concerned. Those that
    return (mean, report) average over the group themselves, by stock's contract.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        counted = not given["collect_non_loss_data"] and given["loss_func"] is not None
        if counted and not given["config"].calculate_per_token_loss:
            group = _schedule_group(given["cp_group_size"])
            if group.size() > 1:
                given["loss_func"] = _mean_over_group(given["loss_func"], group)
        return stock(*call.args, **call.kwargs)

    return forward_step_calc_loss


def _mean_over_group(loss_func: Callable[..., Any], group: ProcessGroup) -> Callable[..., Any]:
    """``loss_func`` with its sum and count scaled such that the mean of the group's quotients,
    which is what data-parallel gradient reduction forms, is the group's sum over its count."""

    def scaled(output: Tensor) -> Any:
        outputs = loss_func(output)
        if len(outputs) != 3:
            return outputs
        loss, num_tokens, report = outputs
        loss *= group.size()
        return loss, _sum_over_group(num_tokens, group), report

    return scaled


class GroupMask(torch.Tensor):
    """A loss mask whose ``sum()`` is the mean count per rank of the whole group.

    ``process_mtp_loss`` divides by sums of its mask. Counting over the group inside ``sum`` makes
    those quotients right without a copy of that function. Any other operation gives plain tensors.
    (That function clamps a count below one to one, so a micro-batch with fewer unmasked tokens than
    ranks still gets a smaller gradient than it should.)
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    group: ProcessGroup

    @staticmethod
    def over(mask: Tensor, group: ProcessGroup) -> GroupMask:
        """Give ``mask`` [b, n] that ``sum`` over ``group``."""
        counted = mask.as_subclass(GroupMask)
        counted.group = group
        return counted

    def sum(self, *args: Any, **kwargs: Any) -> Tensor:
        assert not args and not kwargs, "a loss mask is counted as a whole"
        total = _sum_over_group(super().sum(), self.group)
        return total / self.group.size()


def exact_mtp_loss(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``process_mtp_loss`` to count its tokens over the context-parallel group."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def process_mtp_loss(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        group = given["cp_group"]
        if group is not None and group.size() > 1:
            mask = given["loss_mask"]
            if mask is None:
                tokens = given["input_ids"] if given["labels"] is None else given["labels"]
                mask = None if tokens is None else torch.ones_like(tokens)
            if mask is not None:
                given["loss_mask"] = GroupMask.over(mask, group)
        return stock(*call.args, **call.kwargs)

    return process_mtp_loss


def exact_roll(stock: Callable[..., Any], roll: Callable[..., Tensor] | None) -> Callable[..., Any]:
    """Wrap ``roll_tensor`` to keep a ``GroupMask`` one, and to roll the contiguous layout.

    Args:
        stock: Megatron's function, returning (rolled, its sum or None).
        roll: what rolls one rank's chunk by one place, (tensor, dim, group) -> tensor; None keeps
            stock's zigzag roll.
    """
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        tensor, group = given["tensor"], given["cp_group"]
        if tensor is None or group is None or group.size() == 1:
            return stock(*call.args, **call.kwargs)
        if given["packed_seq_params"] is not None:
            raise ValueError(
                "Multi-token prediction on packed sequences is not supported with "
                "--distflash-attn: train on unpacked sequences."
            )
        if given["shifts"] != -1:
            raise ValueError(f"roll_tensor rolls by one place to the left, got {given['shifts']}.")
        if roll is None:
            rolled, _ = stock(*call.args, **call.kwargs)
        else:
            rolled = roll(tensor, given["dims"], group)
        if isinstance(tensor, GroupMask):
            rolled = GroupMask.over(rolled, group)
        return rolled, rolled.sum() if given.get("return_sum", True) else None

    return roll_tensor


def _sum_over_group(count: Tensor, group: ProcessGroup) -> Tensor:
    total = count.detach().clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def _schedule_group(cp_group_size: int | None) -> ProcessGroup:
    """Megatron's context-parallel group, checked against the size the schedule was given."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    if cp_group_size not in (None, group.size()):
        raise ValueError(
            f"The pipeline schedule runs with context parallel size {cp_group_size}, but "
            f"Megatron's context-parallel group has {group.size()} ranks: build the model on it."
        )
    return group
