"""Where attention's outputs stay between a first pass and its recomputation.

``KeptOutputs`` leaves them where they are. ``HostShelf`` moves them to pinned host memory and back,
on a stream of its own, for sequences whose kept outputs would not fit; it needs a GPU.

Shapes: n tokens of this rank, b micro-batch, h query heads of this rank, d head width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor


class Kept(NamedTuple):
    """What one attention call returned."""

    caller: object  # The layer that called.
    out: Tensor  # [n, b, h, d]
    lse: Tensor  # [n, b, h], fp32 (fp64 for fp64)


class KeptOutputs:
    """What the attention calls of one region returned, first in, first out, on their device."""

    def __init__(self) -> None:
        self._queue: deque[Kept] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, kept: Kept) -> None:
        """Keep one more."""
        self._queue.append(kept)

    def take(self) -> Kept:
        """The oldest one, which is no longer kept here."""
        return self._queue.popleft()

    def expect(self) -> None:
        """Everything here will be taken soon."""

    def clear(self) -> None:
        self._queue.clear()


class HostShelf:
    """Stores whose outputs spend the time between the passes in pinned host memory.

    An output leaves when the next one is kept, so its copy runs under the next layer's compute; the
    last one of a forward pass, which comes back first, does not leave. When a region's
    recomputation begins, the outputs of the region before it (in the order of the forward pass, so
    the next one of the backward pass) start on their way back, a region ahead of their use.

    Device memory is given back in stream order, without the host waiting: the compute stream waits
    for a copy that is long done before it may reuse what the copy read. The shelf refers to outputs
    weakly, so they still live and die with their region. torch's host allocator rounds sizes up to
    powers of two and keeps freed buffers for the next iteration.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._newest: Callable[[], _Parcel | None] = _nothing
        self._leaving: Callable[[], _Parcel | None] = _nothing
        self._newest_store: Callable[[], HostKept | None] = _nothing
        # Targets of copies that nobody took yet. Should their region fail meanwhile, the memory
        # must not be reused while a copy still writes to it.
        self._arriving: list[_Parcel] = []

    def new_store(self) -> HostKept:
        """A store for one region."""
        return HostKept(self)

    def add(self, store: HostKept, parcel: _Parcel) -> HostKept | None:
        """Note the newest output; returns the store that was the newest before ``store``."""
        self._forget_arrived()
        leaving, newest = self._leaving(), self._newest()
        if leaving is not None:
            leaving.free_device()
        if newest is not None:
            newest.leave(self._copies())
        self._leaving, self._newest = self._newest, ref(parcel)
        before, self._newest_store = self._newest_store(), ref(store)
        return before

    def fetch(self, parcel: _Parcel) -> None:
        """Start an output on its way back, if it left."""
        self._forget_arrived()
        if parcel.fetch(self._copies()):
            self._arriving.append(parcel)

    def deliver(self, parcel: _Parcel) -> Kept:
        """The output, for use on the current stream."""
        self.fetch(parcel)
        kept = parcel.open()
        self._arriving = [other for other in self._arriving if other is not parcel]
        return kept

    def _forget_arrived(self) -> None:
        self._arriving = [parcel for parcel in self._arriving if not parcel.arrived()]

    def _copies(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


class HostKept(KeptOutputs):
    """The outputs of one region on a ``HostShelf``."""

    def __init__(self, shelf: HostShelf) -> None:
        self._shelf = shelf
        self._parcels: deque[_Parcel] = deque()
        self._before: Callable[[], HostKept | None] = _nothing

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, kept: Kept) -> None:
        parcel = _Parcel(kept)
        self._parcels.append(parcel)
        before = self._shelf.add(self, parcel)
        if before is not None and before is not self:
            self._before = ref(before)

    def take(self) -> Kept:
        return self._shelf.deliver(self._parcels.popleft())

    def expect(self) -> None:
        before = self._before()
        for store in (self,) if before is None else (self, before):
            for parcel in store._parcels:
                self._shelf.fetch(parcel)

    def clear(self) -> None:
        self._parcels.clear()


class _Parcel:
    """One output on its way between device and host."""

    def __init__(self, kept: Kept) -> None:
        self._caller = kept.caller
        self._on_device: tuple[Tensor, ...] | None = (kept.out, kept.lse)
        self._on_host: tuple[Tensor, ...] | None = None
        self._device = kept.out.device
        self._event = torch.cuda.current_stream().record_event()  # after which it can be read

    def leave(self, copies: torch.cuda.Stream) -> None:
        """Start the copy to the host."""
        copies.wait_event(self._event)
        with torch.cuda.stream(copies):
            self._on_host = tuple(
                torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
                for x in self._on_device
            )
        self._event = copies.record_event()

    def free_device(self) -> None:
        """Let the current stream reuse the device memory, once the copy has read it."""
        torch.cuda.current_stream().wait_event(self._event)
        self._on_device = None

    def fetch(self, copies: torch.cuda.Stream) -> bool:
        """Start the copy to the device; False if it is there, or on its way."""
        if self._on_device is not None:
            return False
        self._on_device = tuple(torch.empty_like(x, device=self._device) for x in self._on_host)
        copies.wait_stream(torch.cuda.current_stream())  # Its memory may still be read there.
        with torch.cuda.stream(copies):
            for target, source in zip(self._on_device, self._on_host, strict=True):
                target.copy_(source, non_blocking=True)
        self._event = copies.record_event()
        self._on_host = None
        return True

    def arrived(self) -> bool:
        return self._event.query()

    def open(self) -> Kept:
        """The output, once the current stream may use it."""
        torch.cuda.current_stream().wait_event(self._event)
        return Kept(self._caller, *self._on_device)


def _nothing() -> None:
    """A weak reference to nothing."""
