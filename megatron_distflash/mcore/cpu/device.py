"""The CUDA device, played by the CPU.

Megatron names its device in three ways: the literal ``"cuda"`` (or an index) in tensor factories,
``tensor.cuda()``, and functions of ``torch.cuda``. ``CpuDeviceMode`` answers the first two through
torch's own override protocol; ``install_device`` replaces the functions of ``torch.cuda`` that
need a GPU. ``torch.cuda.is_available()`` keeps telling the truth.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
DEVICE_INDEX = 0  # Every rank sees one device, so that int-typed device arguments stay ints.


def to_cpu_device(device: Any) -> Any:
    """Map any spelling of a CUDA device (index, string, ``torch.device``) to the CPU."""
    if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
        return device
    if isinstance(device, int):
        return CPU
    return CPU if torch.device(device).type == "cuda" else device


class CpuDeviceMode(TorchFunctionMode):
    """Torch function mode under which CUDA placement means CPU placement.

    ``Tensor.type()`` reports CUDA type names ("torch.cuda.FloatTensor"): Megatron's optimizers and
    gradient clipping sort parameters by them.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if kwargs:
            if "device" in kwargs:
                kwargs = {**kwargs, "device": to_cpu_device(kwargs["device"])}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **(kwargs or {}))


def _tensor_cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.cuda``: like on a GPU, a tensor already on the device is returned as it is."""
    return tensor


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to``: a device may be the first positional argument."""
    if args and not isinstance(args[0], torch.Tensor):
        args = (to_cpu_device(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = to_cpu_device(kwargs["device"])
    return torch.Tensor.to(tensor, *args, **kwargs)


def _tensor_type(tensor: torch.Tensor, dtype: Any = None, **kwargs: Any) -> str | torch.Tensor:
    """``Tensor.type``: names CPU types as their CUDA counterparts, and accepts CUDA type names."""
    if dtype is None:
        return torch.Tensor.type(tensor).replace("torch.", "torch.cuda.", 1)
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.", 1)
    elif isinstance(dtype, type):
        dtype = dtype.dtype  # A tensor type such as torch.cuda.FloatTensor.
    return torch.Tensor.type(tensor, dtype, **kwargs)


def _tensor_pin_memory(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.pin_memory``: there is no transfer to speed up."""
    return tensor


def _tensor_record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """``Tensor.record_stream``: there is no caching allocator to tell. A method, not a handler of
    the mode: torch checks the stream's type before it asks the mode."""


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.cuda: _tensor_cuda,
    torch.Tensor.to: _tensor_to,
    torch.Tensor.type: _tensor_type,
    torch.Tensor.pin_memory: _tensor_pin_memory,
}


class Event:
    """``torch.cuda.Event`` for a device that finishes every operation before it returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing is ever in flight."""

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        if self._recorded_s is None or end._recorded_s is None:
            raise RuntimeError("Both events must be recorded before elapsed_time is asked for.")
        return (end._recorded_s - self._recorded_s) * 1e3


class Stream:
    """``torch.cuda.Stream`` for a device that has one queue and runs it at once."""

    cuda_stream = 0
    stream_id = 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = CPU
        self.priority = priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def wait_stream(self, stream: Any) -> None:
        """Nothing is ever in flight."""

    def wait_event(self, event: Any) -> None:
        """Nothing is ever in flight."""

    def synchronize(self) -> None:
        """Nothing is ever in flight."""

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``: the pointer is meaningless here."""

    def __init__(self, stream_ptr: int = 0, device: Any = None, **kwargs: Any) -> None:
        super().__init__(device)


_THE_STREAM = Stream()


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    """``torch.cuda.stream``: there is one queue, so selecting another changes nothing."""
    yield


class _DeviceContext(contextlib.nullcontext):
    """``torch.cuda.device`` and ``torch.cuda.device_of``: there is one device."""


def _constant(name: str, value: Any) -> Callable[..., Any]:
    """A function that returns ``value``. Each name gets its own: torch.compile's tables refuse a
    function object that appears under two names."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Stand-in for torch.cuda.{name} on CPU ranks."
    return function


def _memory_stats(device: Any = None) -> dict[str, int]:
    """``torch.cuda.memory_stats``: every counter is 0, host memory is not accounted for."""
    return collections.defaultdict(int)


def _device_properties(device: Any = None) -> SimpleNamespace:
    """``torch.cuda.get_device_properties`` of the host."""
    total_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return SimpleNamespace(
        name=f"CPU ({platform.machine()})",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=total_bytes,
        multi_processor_count=os.cpu_count(),
        is_integrated=1,
    )


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    """``torch.cuda.mem_get_info``: free and total host memory, in bytes."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return (
        page_bytes * os.sysconf("SC_AVPHYS_PAGES"),
        page_bytes * os.sysconf("SC_PHYS_PAGES"),
    )


# Megatron asks hardware older than Blackwell (major < 10) for CUDA_DEVICE_MAX_CONNECTIONS=1, an
# ordering guarantee of CUDA queues that the CPU gives anyway, so claim a newer one.
_CAPABILITY = (10, 0)

_NO_OPS = (
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_stream",
)
_ZEROS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "device_memory_used",
)


def install_device() -> CpuDeviceMode:
    """Replace what needs a GPU in ``torch.cuda`` and enter the device mode for this thread.

    Returns the entered mode. The mode stays on until the process ends: Megatron places tensors on
    its device at any time.
    """
    replacements: dict[str, Any] = {
        "current_device": _constant("current_device", DEVICE_INDEX),
        "device_count": _constant("device_count", 1),
        "get_device_name": _constant("get_device_name", "CPU"),
        "get_device_capability": _constant("get_device_capability", _CAPABILITY),
        "is_current_stream_capturing": _constant("is_current_stream_capturing", False),
        "current_stream": _constant("current_stream", _THE_STREAM),
        "default_stream": _constant("default_stream", _THE_STREAM),
        "get_device_properties": _device_properties,
        "mem_get_info": _mem_get_info,
        "memory_stats": _memory_stats,
        "stream": _stream_context,
        "device": _DeviceContext,
        "Stream": Stream,
        "ExternalStream": ExternalStream,
        "Event": Event,
    }
    replacements |= {name: _constant(name, None) for name in _NO_OPS}
    replacements |= {name: _constant(name, 0) for name in _ZEROS}
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _constant(f"nvtx.{name}", None))
    torch.Tensor.record_stream = _tensor_record_stream
    mode = CpuDeviceMode()
    mode.__enter__()
    _keep_in_backward(mode)
    return mode


def _keep_in_backward(mode: CpuDeviceMode) -> None:
    """Let backward functions run under the mode.

    Torch suspends a mode while it handles a call, and since 2.11 ``torch.autograd.backward`` is
    such a call; activation recomputation makes one in the middle of a backward pass.
    """
    stock = torch.autograd._engine_run_backward

    @functools.wraps(stock)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return stock(*args, **kwargs)

    torch.autograd._engine_run_backward = run_backward
