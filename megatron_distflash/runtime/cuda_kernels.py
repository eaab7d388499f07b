"""Our CUDA kernels (``kernels/``) from Python: loading, checked calls, nothing else.

The library is plain C, reached with ctypes; tensors cross as pointers and strides, once checked
here. What a call passes is made and checked once for its tensors' shapes, strides, dtypes and
devices; after that only pointers are filled in. Launches go to the current torch stream and are
asynchronous.
Shapes as in ``cuda_tasks``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_distflash.runtime.cuda_tasks import (
    DTYPES,
    BackwardStructure,
    BackwardTask,
    ForwardStructure,
    ForwardTask,
    Options,
    Shape,
    View,
    backward_structure,
    check,
    dims_of,
    forward_structure,
    rows_of,
    shape_of,
    view_of,
)
from megatron_distflash.runtime.shadow import Shadow

LIBRARY = Path(__file__).with_name("libdistflash_kernels.so")

_API_VERSION = 3
_FUNCTIONS = (
    "check_device",
    "forward",
    "backward",
    "merge",
    "finish",
    "delta",
    "stand_in",
    "accumulate",
    "cast",
)
_MAX_REMEMBERED = 2**16  # tensors of forms: half a kilobyte each


@dataclass(frozen=True, slots=True)
class _Form:
    """What a call passes, but for the pointers.

    Attributes:
        words: the type of an array of 64-bit words that is as long as ``structures``.
        structures: the call's tasks or views.
        pointers: which words are the tensors' pointers, in the tensors' order.
        number: of tasks, or the code of the row kernels' dtype.
        settings: the call's options or shape; nobody writes to them.
    """

    words: type[ctypes.Array]
    structures: bytes
    pointers: tuple[int, ...]
    number: int
    settings: Options | Shape

    @classmethod
    def of(cls, structures: ctypes.Array, pointers: Sequence[int], *rest: Any) -> _Form:
        """``rest``: number, settings."""
        template = bytes(structures)
        return cls(ctypes.c_uint64 * (len(template) // 8), template, tuple(pointers), *rest)

    def filled(self, tensors: Sequence[Tensor | None]) -> ctypes.Array:
        words = self.words.from_buffer_copy(self.structures)
        present = [x for x in tensors if x is not None]
        for word, x in zip(self.pointers, present, strict=True):
            words[word] = x.data_ptr()
        return words


def _kind(x: Tensor | None) -> Hashable:
    """All that a form depends on."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device)


def _task_form(
    tasks: Sequence[ForwardTask] | Sequence[BackwardTask],
    structures: ctypes.Array,
    names: tuple[str, ...],
    options: Options,
) -> _Form:
    """``structures``: of the tasks, which have their tensors by these names."""
    structure = structures._type_
    words_each = ctypes.sizeof(structure) // 8
    pointers = [
        idx * words_each + getattr(structure, name).offset // 8
        for idx, task in enumerate(tasks)
        for name in names
        if getattr(task, name) is not None
    ]
    return _Form.of(structures, pointers, len(tasks), options)


def _options(
    tasks: Sequence[ForwardTask] | Sequence[BackwardTask],
    softmax_scale: float,
    num_sms: int,
    tiles_per_shift: int,
    deterministic: bool = False,
) -> Options:
    kinds = {(task.q.dtype, task.q.shape[3], task.q.device) for task in tasks}
    if len(kinds) > 1:
        raise ValueError(f"tasks of one call share dtype, head_dim and device; got {kinds}")
    dtype, head_dim, _ = kinds.pop()
    return Options(
        softmax_scale, DTYPES[dtype], head_dim, num_sms, int(deterministic), tiles_per_shift
    )


class CudaKernels:
    """The loaded library. Methods launch on the current stream of their tensors' device and raise
    ValueError for tensors that do not fit and RuntimeError with the library's sentence else."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        self._forms: dict[tuple[Hashable, ...], _Form] = {}
        self._num_remembered = 0
        for name in _FUNCTIONS:
            getattr(library, f"distflash_{name}").restype = ctypes.c_char_p

    def _call(self, name: str, device: torch.device, *arguments: Any) -> None:
        if device.type != "cuda":
            raise ValueError(f"the kernels need CUDA tensors, got one on {device}")
        function = getattr(self._library, f"distflash_{name}")
        with torch.cuda.device(device.index):
            stream = torch._C._cuda_getCurrentRawStream(device.index)  # makes no Stream object
            message = function(*arguments, ctypes.c_void_p(stream))
        if message is not None:
            raise RuntimeError(f"distflash_{name}: {message.decode()}")

    def _launch(self, name: str, form: _Form, tensors: Sequence[Tensor | None]) -> None:
        first = tensors[0]
        if isinstance(first, Shadow):
            first.notes.call(self, name, form, tensors)
            return
        settings = ctypes.byref(form.settings)
        self._call(name, first.device, form.filled(tensors), form.number, settings)

    def addresses(self) -> dict[str, int]:
        """Of the library's functions that launch, by the names of ``kernels/api.h``."""
        functions = {name: getattr(self._library, f"distflash_{name}") for name in _FUNCTIONS[1:]}
        return {name: ctypes.cast(x, ctypes.c_void_p).value for name, x in functions.items()}

    def _form(self, key: tuple[Hashable, ...], make: Callable[[], _Form]) -> _Form:
        form = self._forms.get(key)
        if form is None:
            form = make()
            if self._num_remembered + len(key) > _MAX_REMEMBERED:
                self._forms.clear()
                self._num_remembered = 0
            self._forms[key] = form
            self._num_remembered += len(key)
        return form

    def unusable_reason(self, device: torch.device) -> str | None:
        """None if ``device`` can run the kernels, else why not."""
        with torch.cuda.device(device):
            message = self._library.distflash_check_device()
        return None if message is None else message.decode()

    def forward_accumulate(
        self,
        tasks: Sequence[ForwardTask],
        *,
        softmax_scale: float,
        layout: str = "sbhd",
        num_sms: int = 0,
        tiles_per_shift: int = 0,
    ) -> None:
        """Runs a list of blocks in one launch (several, if it is longer than 16 tasks).

        Consecutive tasks with the same q, out_acc, out and lse share one pass over their state. Any
        other two tasks must not overlap in what they write. ``num_sms``: multiprocessors to occupy
        (0: all). ``tiles_per_shift``: give multiprocessors up to kernels of higher priority after
        so many tiles each (0: only at the end); num_sms then is no limit.
        """
        if not tasks:
            return

        def make() -> _Form:
            dims = dims_of(layout)
            structures = (ForwardStructure * len(tasks))(
                *(forward_structure(x, dims) for x in tasks)
            )
            return _task_form(tasks, structures, names, _options(tasks, *how))

        names = ("q", "k", "v", "out_acc", "out", "lse")
        how = softmax_scale, num_sms, tiles_per_shift
        tensors = [x for t in tasks for x in (t.q, t.k, t.v, t.out_acc, t.out, t.lse)]
        ways = tuple([(task.mask, task.accumulate) for task in tasks])
        key = ("forward", layout, *how, ways, *map(_kind, tensors))
        form = self._form(key, make)
        self._launch("forward", form, tensors)

    def backward_accumulate(
        self,
        tasks: Sequence[BackwardTask],
        *,
        softmax_scale: float,
        layout: str = "sbhd",
        num_sms: int = 0,
        tiles_per_shift: int = 0,
        deterministic: bool = False,
    ) -> None:
        """Adds the gradients of a list of blocks to their fp32 dq, dk and dv (which tasks may
        share). ``deterministic``: bitwise equal results from run to run, at some cost. Otherwise
        as ``forward_accumulate``."""
        if not tasks:
            return

        def make() -> _Form:
            dims = dims_of(layout)
            structures = (BackwardStructure * len(tasks))(
                *(backward_structure(x, dims) for x in tasks)
            )
            return _task_form(tasks, structures, names, _options(tasks, *how))

        names = ("q", "k", "v", "dout", "lse", "delta", "dq", "dk", "dv")
        how = softmax_scale, num_sms, tiles_per_shift, deterministic
        tensors = []
        for t in tasks:
            tensors += (t.q, t.k, t.v, t.dout, t.lse, t.delta, t.dq, t.dk, t.dv)
        masks = tuple([task.mask for task in tasks])
        form = self._form(("backward", layout, *how, masks, *map(_kind, tensors)), make)
        self._launch("backward", form, tensors)

    def merge(
        self,
        acc: Tensor,
        acc_lse: Tensor,
        o: Tensor,
        o_lse: Tensor,
        *,
        out: Tensor | None = None,
        layout: str = "sbhd",
    ) -> None:
        """Merges a partial (o, o_lse) into the state (acc, acc_lse), in place.

        acc [s, b, h, d] fp32; o likewise in 16 bit or fp32; acc_lse and o_lse [b, h, s] fp32. Where
        acc_lse is -inf, acc may hold anything; where o_lse is -inf, the state stays untouched. With
        ``out``, like o and in 16 bit, the result goes there and acc stays as it is.
        """
        fp32, like_o = torch.float32, o.dtype
        state = {"acc": (acc, fp32), "acc_lse": (acc_lse, fp32)}
        partial = {"o": (o, like_o), "o_lse": (o_lse, fp32)}
        if out is None:
            self._row_call("merge", layout, like_o, **state, **partial)
        else:
            self._row_call("finish", layout, like_o, **state, **partial, out=(out, like_o))

    def delta(self, o: Tensor, dout: Tensor, delta: Tensor, *, layout: str = "sbhd") -> None:
        """delta [b, h, s] fp32 <- sum over d of o * dout (both [s, b, h, d], of one dtype)."""
        views = {"o": (o, o.dtype), "dout": (dout, o.dtype), "delta": (delta, torch.float32)}
        self._row_call("delta", layout, o.dtype, **views)

    def stand_in(self, dout: Tensor, delta: Tensor, out: Tensor, *, layout: str = "sbhd") -> None:
        """out <- dout * delta / |dout|², 0 where dout is; out like dout, delta [b, h, s] fp32."""
        dtype = dout.dtype
        views = {"dout": (dout, dtype), "delta": (delta, torch.float32), "out": (out, dtype)}
        self._row_call("stand_in", layout, dtype, **views)

    def accumulate(self, acc: Tensor, x: Tensor, *, layout: str = "sbhd") -> None:
        """acc (fp32) += x (16 bit or fp32), both [s, b, h, d]."""
        views = {"acc": (acc, torch.float32), "x": (x, x.dtype)}
        self._row_call("accumulate", layout, x.dtype, **views)

    def cast(self, out: Tensor, acc: Tensor, *, layout: str = "sbhd") -> None:
        """out (16 bit) <- acc (fp32), both [s, b, h, d]."""
        views = {"out": (out, out.dtype), "acc": (acc, torch.float32)}
        self._row_call("cast", layout, out.dtype, **views)

    def _row_call(
        self, name: str, layout: str, dtype: torch.dtype, **views: tuple[Tensor, torch.dtype]
    ) -> None:
        """``views``: by name, tensors and the dtypes that they must have. The first has the shape
        [s, b, h, d]; others are like it, or [b, h, s]."""
        tensors = [x for x, _ in views.values()]
        key = (name, layout, dtype, *map(_kind, tensors))
        form = self._form(key, lambda: _row_form(name, layout, dtype, views))
        if isinstance(tensors[0], Shadow):
            tensors[0].notes.call(self, name, form, tensors)
            return
        words = form.filled(tensors)
        places = [ctypes.byref(words, 8 * word) for word in form.pointers]
        self._call(name, tensors[0].device, ctypes.byref(form.settings), *places, form.number)


def _row_form(
    name: str, layout: str, dtype: torch.dtype, views: dict[str, tuple[Tensor, torch.dtype]]
) -> _Form:
    """number: the code of ``dtype``."""
    if dtype not in DTYPES:
        raise ValueError(f"{name} takes bf16, fp16 or fp32, got {dtype}")
    dims = dims_of(layout)
    like = next(iter(views.values()))[0]
    shape = shape_of(like, dims)
    rows, filled = (shape.batch, shape.heads, shape.seq), []
    for part, (x, wanted) in views.items():
        is_rows = part in ("delta", "acc_lse", "o_lse")
        check(part, x, rows if is_rows else tuple(like.shape), wanted, like)
        filled.append(rows_of(x) if is_rows else view_of(part, x, dims))
    words_each = ctypes.sizeof(View) // 8
    pointers = range(0, len(filled) * words_each, words_each)  # a view begins with its pointer
    return _Form.of((View * len(filled))(*filled), pointers, DTYPES[dtype], shape)


@cache
def load(path: str | Path = LIBRARY) -> tuple[CudaKernels | None, str]:
    """The kernels, or None and one sentence that says why they can't be used on this machine."""
    if not torch.cuda.is_available():
        return None, "torch sees no CUDA device"
    if not Path(path).exists():
        return None, f"{path} was not built; install with nvcc 12.5 or newer on the PATH"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path} does not load: {error}"
    version = library.distflash_api_version()
    if version != _API_VERSION:
        return None, f"{path} has API version {version}, expected {_API_VERSION}; rebuild it"
    kernels = CudaKernels(library)
    reason = kernels.unusable_reason(torch.device("cuda", torch.cuda.current_device()))
    return (kernels, "") if reason is None else (None, reason)
