"""Activation recomputation that never runs attention's forward a second time.

With full recomputation, stock Megatron runs every layer twice, attention's forward and its
communication included. Here the first pass keeps what attention returned, (out, lse), and the
recomputation resumes from it: queries, keys and values are recomputed, attention is not
(DISTFLASHATTN, arXiv 2310.03294, section 3.3). The gradients are the same bits. Per layer and
micro-batch in flight it costs n·b·h·d values of the model's dtype and n·b·h of fp32.

How: Megatron's own checkpoint functions stay in charge of random states, distributed activations
and fp8 phases. They are only handed a ``Region`` in place of the function they run, and the region
owns what was kept in it. So a store belongs to one call, however many micro-batches and virtual
pipeline stages are in flight; it lives exactly as long as the autograd node that will recompute;
and when an iteration fails, or a graph is dropped, it goes with that node.

PyTorch's selective activation checkpointing, with the op in MUST_SAVE, does the same to a small
model, but needs its non-reentrant checkpoint. That hands the backward of a linear layer a detached
copy of its weight: Megatron's and Transformer Engine's fused gradient accumulation leave their
notes for data parallelism (``main_grad``, ``grad_added_to_main_grad``) on the parameter itself and
would silently lose them. It cannot distribute saved activations either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.mcore.kept import HostShelf, Kept, KeptOutputs
from megatron_distflash.mcore.patching import Patches
from megatron_distflash.runtime.attention import dist_flash_attention

# The region that this thread is running, if any. Backward passes have threads of their own.
_running: ContextVar[Region | None] = ContextVar("distflash_running_region", default=None)


def attend(q: Tensor, k: Tensor, v: Tensor, *, caller: object, **request: Any) -> Tensor:
    """``dist_flash_attention``, or in a recomputation what it returned the first time.

    Args:
        caller: the layer; a recomputation must call the same ones in the same order.
        request: the other arguments of ``dist_flash_attention``.

    Returns:
        out [n, b, h, d].

    Raises:
        RuntimeError: a recomputation does not call attention as the first pass did.
    """
    out, _ = _attend(_running.get(), caller, q, k, v, request)
    return out


def _attend(
    region: Region | None, caller: object, q: Tensor, k: Tensor, v: Tensor, request: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    if region is None:
        return dist_flash_attention(q, k, v, **request, return_lse=True)
    if region.recomputing:
        kept = region.take(caller)
        return dist_flash_attention(q, k, v, **request, return_lse=True, kept=kept)
    out, lse = _attend(region.outer, caller, q, k, v, request)
    region.kept.put(Kept(caller, out, lse))
    return out, lse


class Region:
    """The function of one checkpoint call, and what attention returned in it.

    Checkpoint functions call it without gradients in the forward pass and with them in the backward
    pass, which tells the first pass from the recomputation. One that calls it with gradients right
    away does not checkpoint at all, and nothing is kept.

    Attributes:
        kept: the outputs between the two passes.
        recomputing: whether the pass that runs is the second.
        outer: the region in which the first pass runs. If that one is recomputing, there are kept
            outputs for this one's first pass to resume from.
    """

    def __init__(self, function: Callable[..., Any], kept: KeptOutputs) -> None:
        self.kept = kept
        self.recomputing = False
        self.outer: Region | None = None
        self._function = function
        self._passed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._first_pass(*args, **kwargs)
        if self._passed:
            return self._recompute(*args, **kwargs)
        return self._function(*args, **kwargs)

    def take(self, caller: object) -> tuple[Tensor, Tensor]:
        """(out, lse) of this layer's call in the first pass."""
        if not self.kept:
            raise _differs("calls attention more often than the first pass did")
        kept = self.kept.take()
        if kept.caller is not caller:
            raise _differs("calls the layers in another order than the first pass did")
        return kept.out, kept.lse

    def _first_pass(self, *args: Any, **kwargs: Any) -> Any:
        self.outer = _running.get()
        try:
            return self._run(*args, **kwargs)
        finally:
            self.outer = None
            self._passed = True

    def _recompute(self, *args: Any, **kwargs: Any) -> Any:
        self.recomputing = True
        self.kept.expect()
        try:
            result = self._run(*args, **kwargs)
        finally:
            self.recomputing = False
        if self.kept:
            raise _differs("calls attention less often than the first pass did")
        return result

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        token = _running.set(self)
        try:
            return self._function(*args, **kwargs)
        except BaseException:
            self.kept.clear()  # The exception's traceback may keep this region alive.
            raise
        finally:
            _running.reset(token)


def _differs(how: str) -> RuntimeError:
    return RuntimeError(
        f"The recomputation of a checkpointed region {how}, so attention's kept outputs do not fit "
        "it (was backward called twice, with retain_graph=True?): pass --no-distflash-remat to run "
        "attention again instead."
    )


def keep_outputs(patches: Patches, options: DistFlashConfig) -> None:
    """Hand Megatron's checkpoint functions regions, if the options want that.

    Raises:
        ValueError: the options cannot work on this machine.
    """
    if not options.remat:
        return
    if options.offload and not torch.cuda.is_available():
        raise ValueError(
            "--distflash-offload frees GPU memory, but torch sees no GPU: leave it out."
        )
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import random

    new_store = HostShelf().new_store if options.offload else KeptOutputs
    patches.replace(random.checkpoint, with_regions(random.checkpoint, new_store))
    if transformer_engine.HAVE_TE:  # Its checkpoint function serves layers in fp8.
        stock = transformer_engine.te_checkpoint
        patches.replace(stock, with_regions(stock, new_store))


def with_regions(
    stock: Callable[..., Any], new_store: Callable[[], KeptOutputs]
) -> Callable[..., Any]:
    """A checkpoint function, whose first argument is the function it runs, that keeps outputs.

    Called without gradients, nobody will recompute: evaluation keeps nothing, and in the first pass
    of an outer region that one keeps.
    """

    @functools.wraps(stock)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            function = Region(function, new_store())
        return stock(function, *args, **kwargs)

    return checkpoint
