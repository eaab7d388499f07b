"""The contiguous layout: rank r of the context-parallel group holds tokens [r·n, (r+1)·n).

Stock Megatron gives every rank two distant chunks (zigzag). These functions stand in for the
places in Megatron that know it, with the same signatures.

Shapes: b micro-batch, s whole sequence, n = s / cp tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# Entries of a batch that are not cut along the sequence.
_METADATA = (
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)


def local_chunk(tensor: Tensor, seq_dim: int, group: ProcessGroup) -> Tensor:
    """This rank's chunk of a tensor that holds the whole sequence along ``seq_dim``; contiguous.

    Raises:
        ValueError: the sequence cannot be cut into equal chunks.
    """
    size, length = group.size(), tensor.shape[seq_dim]
    if length % size:
        raise ValueError(
            f"A sequence of {length} tokens cannot be cut into {size} equal chunks: make it a "
            "multiple of the context parallel size."
        )
    chunk = length // size
    return tensor.narrow(seq_dim, group.rank() * chunk, chunk).contiguous()


def batch_on_this_cp_rank(
    batch: dict[str, Any],
    is_hybrid_cp: bool = False,
    cp_group: ProcessGroup | None = None,
    hybrid_cp_group_func: Callable[[int], ProcessGroup] | None = None,
    use_per_sequence_balancing: bool = False,
) -> dict[str, Any]:
    """Cut a batch to this rank's tokens; stands in for ``get_batch_on_this_cp_rank``.

    Args:
        batch: tensors [b, s, ...] (the attention mask [b, 1, s, s], cut along its query rows),
            metadata and Nones; changed in place, as stock does.
        cp_group: None means Megatron's context-parallel group.
        hybrid_cp_group_func, use_per_sequence_balancing: part of the signature; both only matter
            for what is refused here.

    Raises:
        ValueError: packed sequences or hybrid context parallelism, or a length that does not
            divide.
    """
    del hybrid_cp_group_func, use_per_sequence_balancing
    if is_hybrid_cp:
        raise ValueError(
            "Hybrid context parallelism changes the group from batch to batch, which "
            "--distflash-attn does not support: leave --hybrid-context-parallel out."
        )
    if batch.get("cu_seqlens") is not None:
        raise ValueError(
            "The batch holds packed documents (cu_seqlens), which --distflash-attn does not "
            "support: train on unpacked sequences."
        )
    group = _context_parallel_group() if cp_group is None else cp_group
    if group.size() > 1:
        for key, value in batch.items():
            if key not in _METADATA and value is not None:
                batch[key] = local_chunk(value, 2 if key == "attention_mask" else 1, group)
    return batch


def pos_emb_on_this_cp_rank(pos_emb: Tensor, seq_dim: int, cp_group: ProcessGroup) -> Tensor:
    """This rank's rows of a rotary table; stands in for ``get_pos_emb_on_this_cp_rank``.

    Forgetting this one is silent: the model trains, on wrong positions.

    Args:
        pos_emb: positions of the whole sequence along ``seq_dim``.
    """
    if cp_group is None:
        raise ValueError("cp_group must be given to find this rank's positions.")
    return local_chunk(pos_emb, seq_dim, cp_group)


def roll_left(tensor: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Every token's place gets its right neighbour's value, over all ranks' chunks.

    The last place of rank r gets the first of rank r+1; the sequence's last place gets 0. Like
    stock's ``roll_tensor`` it carries no gradient: it moves labels, masks and token ids.

    Args:
        tensor: [..., n, ...] with this rank's chunk along ``dim``.
    """
    first = tensor.select(dim, 0).contiguous()
    # One value per sequence and rank: gathering all is simpler than a send and a receive whose
    # ends differ on the first and last rank, and costs nothing.
    firsts = [torch.empty_like(first) for _ in range(group.size())]
    torch.distributed.all_gather(firsts, first, group=group)
    rolled = torch.roll(tensor, shifts=-1, dims=dim)
    neighbour = group.rank() + 1
    last_place = rolled.select(dim, -1)
    if neighbour < group.size():
        last_place.copy_(firsts[neighbour])
    else:
        last_place.zero_()
    return rolled


def _context_parallel_group() -> ProcessGroup:
    from megatron.core import parallel_state

    return parallel_state.get_context_parallel_group()
