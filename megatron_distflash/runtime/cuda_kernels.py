"""Our CUDA kernels (``kernels/``) from Python: loading, checked calls, nothing else.

The library is plain C, reached with ctypes; tensors cross as pointers and strides, once checked
here. What a call passes is made and checked once for its tensors' shapes, strides, dtypes and
devices; after that only pointers are filled in. Launches go to the current torch stream and are
asynchronous.

Shapes: b batch, h query heads, g KV heads (h is a multiple of g), s sequence, d head dimension.
Tensors come in one of the layouts of ``LAYOUTS`` with any strides but a contiguous d; LSE and
delta are always [b, h, s] fp32, of any strides. LSE is the natural logarithm.
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

LAYOUTS = {"sbhd": (1, 2, 0), "bshd": (0, 2, 1), "bhsd": (0, 1, 2)}  # dims of batch, head, seq
HEAD_DIMS = (64, 96, 128, 192, 256)
MASKS = {"full": 0, "causal": 1, "window": 2}
LIBRARY = Path(__file__).with_name("libdistflash_kernels.so")

_API_VERSION = 2
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
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class _View(ctypes.Structure):
    """distflash_tensor and distflash_rows of kernels/api.h: pointer and strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("seq_stride", ctypes.c_int64),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int32),
        ("q_heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("q_len", ctypes.c_int32),
        ("k_len", ctypes.c_int32),
        ("mask", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("window", ctypes.c_int64),
    ]


class _ForwardTask(ctypes.Structure):
    _fields_ = [
        ("block", _Block),
        ("q", _View),
        ("k", _View),
        ("v", _View),
        ("out_acc", _View),
        ("out", _View),
        ("lse", _View),
        ("accumulate", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _BackwardTask(ctypes.Structure):
    _fields_ = [
        ("block", _Block),
        ("q", _View),
        ("k", _View),
        ("v", _View),
        ("dout", _View),
        ("lse", _View),
        ("delta", _View),
        ("dq", _View),
        ("dk", _View),
        ("dv", _View),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("softmax_scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("batch", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("seq", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees; i and j count from the task's first query and key.

    ``full``: all. ``causal``: j <= i + offset, where offset is the position of query 0 minus the
    position of key 0. ``window``: causal, and j > i + offset - window.
    """

    kind: str = "full"
    offset: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in MASKS:
            raise ValueError(f"mask kind {self.kind!r} is unknown; use one of {tuple(MASKS)}")
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"a window of {self.window} keys; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ForwardTask:
    """One attention block whose result is merged into its queries' state.

    q [s, b, h, d], k and v [s_k, b, g, d] (in the call's layout), bf16 or fp16; out_acc like q in
    fp32; lse [b, h, s] fp32. With ``accumulate`` the state (out_acc, lse) is read and updated, else
    overwritten. With ``out`` (like q, same dtype) the merged result is written there in 16 bit and
    not to out_acc, which may then be None unless ``accumulate``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    out_acc: Tensor | None = None
    out: Tensor | None = None
    mask: Mask = Mask()
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class BackwardTask:
    """One attention block's share of the gradients, added to fp32 dq, dk and dv.

    Shapes as in ForwardTask; dout like q in its dtype; lse and delta [b, h, s] fp32 are those of
    the whole attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    mask: Mask = Mask()


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> None:
    if tuple(x.shape) != shape or x.dtype != dtype or x.device != like.device:
        raise ValueError(
            f"{name} must be {dtype} of shape {shape} on {like.device}, "
            f"got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
        )


def _view(name: str, x: Tensor | None, dims: tuple[int, int, int]) -> _View:
    if x is None:
        return _View()
    if x.dim() == 4 and x.shape[3] > 1 and x.stride(3) != 1:
        raise ValueError(f"the last dimension of {name} must be contiguous, got {x.stride()}")
    batch, head, seq = dims
    return _View(x.data_ptr(), x.stride(batch), x.stride(head), x.stride(seq))


def _rows(x: Tensor) -> _View:
    return _View(x.data_ptr(), *x.stride())


def _dims(layout: str) -> tuple[int, int, int]:
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is unknown; use one of {tuple(LAYOUTS)}")
    return LAYOUTS[layout]


def _block(q: Tensor, k: Tensor, v: Tensor, mask: Mask, dims: tuple[int, int, int]) -> _Block:
    """The block's extents; raises ValueError unless q, k and v fit together."""
    batch, head, seq = dims
    if q.dim() != 4 or k.dim() != 4 or q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"q must be 4-dimensional bf16 or fp16, got {q.dtype} {tuple(q.shape)}")
    expected = list(k.shape)
    expected[batch], expected[3] = q.shape[batch], q.shape[3]
    _check("k", k, tuple(expected), q.dtype, q)
    _check("v", v, tuple(expected), q.dtype, q)
    q_heads, kv_heads = q.shape[head], k.shape[head]
    if q_heads % max(kv_heads, 1) or (kv_heads == 0 and q_heads):
        raise ValueError(f"{q_heads} query heads are not a multiple of {kv_heads} KV heads")
    return _Block(
        q.shape[batch],
        q_heads,
        kv_heads,
        q.shape[seq],
        k.shape[seq],
        MASKS[mask.kind],
        mask.offset,
        mask.window,
    )


def _forward_task(task: ForwardTask, dims: tuple[int, int, int]) -> _ForwardTask:
    q = task.q
    block = _block(q, task.k, task.v, task.mask, dims)
    _check("lse", task.lse, (block.batch, block.q_heads, block.q_len), torch.float32, q)
    if task.out_acc is not None:
        _check("out_acc", task.out_acc, tuple(q.shape), torch.float32, q)
    elif task.out is None or task.accumulate:
        raise ValueError("out_acc may be None only with out and without accumulate")
    if task.out is not None:
        _check("out", task.out, tuple(q.shape), q.dtype, q)
    return _ForwardTask(
        block,
        _view("q", q, dims),
        _view("k", task.k, dims),
        _view("v", task.v, dims),
        _view("out_acc", task.out_acc, dims),
        _view("out", task.out, dims),
        _rows(task.lse),
        int(task.accumulate),
    )


def _backward_task(task: BackwardTask, dims: tuple[int, int, int]) -> _BackwardTask:
    q = task.q
    block = _block(q, task.k, task.v, task.mask, dims)
    rows = (block.batch, block.q_heads, block.q_len)
    _check("dout", task.dout, tuple(q.shape), q.dtype, q)
    _check("lse", task.lse, rows, torch.float32, q)
    _check("delta", task.delta, rows, torch.float32, q)
    _check("dq", task.dq, tuple(q.shape), torch.float32, q)
    _check("dk", task.dk, tuple(task.k.shape), torch.float32, q)
    _check("dv", task.dv, tuple(task.k.shape), torch.float32, q)
    return _BackwardTask(
        block,
        *(_view(name, getattr(task, name), dims) for name in ("q", "k", "v", "dout")),
        _rows(task.lse),
        _rows(task.delta),
        *(_view(name, getattr(task, name), dims) for name in ("dq", "dk", "dv")),
    )


def _shape(x: Tensor, dims: tuple[int, int, int]) -> _Shape:
    if x.dim() != 4:
        raise ValueError(f"expected 4 dimensions, got shape {tuple(x.shape)}")
    batch, head, seq = dims
    return _Shape(x.shape[batch], x.shape[head], x.shape[seq], x.shape[3])


@dataclass(frozen=True, slots=True)
class _Form:
    """What a call passes, but for the pointers.

    Attributes:
        words: the type of an array of 64-bit words that is as long as ``structures``.
        structures: the call's tasks or views.
        pointers: which words are the tensors' pointers, in the tensors' order.
        rest: the arguments behind or before them; nobody writes to those.
    """

    words: type[ctypes.Array]
    structures: bytes
    pointers: tuple[int, ...]
    rest: tuple[Any, ...]

    @classmethod
    def of(cls, structures: ctypes.Array, pointers: Sequence[int], rest: tuple[Any, ...]) -> _Form:
        template = bytes(structures)
        return cls(ctypes.c_uint64 * (len(template) // 8), template, tuple(pointers), rest)

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
    options: _Options,
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
    return _Form.of(structures, pointers, (len(tasks), ctypes.byref(options)))


def _options(
    tasks: Sequence[ForwardTask] | Sequence[BackwardTask],
    softmax_scale: float,
    num_sms: int,
    deterministic: bool = False,
) -> _Options:
    kinds = {(task.q.dtype, task.q.shape[3], task.q.device) for task in tasks}
    if len(kinds) > 1:
        raise ValueError(f"tasks of one call share dtype, head_dim and device; got {kinds}")
    dtype, head_dim, _ = kinds.pop()
    return _Options(softmax_scale, _DTYPES[dtype], head_dim, num_sms, int(deterministic))


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
    ) -> None:
        """Runs a list of blocks in one launch (several, if it is longer than 16 tasks).

        Consecutive tasks with the same q, out_acc, out and lse share one pass over their state. Any
        other two tasks must not overlap in what they write. ``num_sms``: multiprocessors to occupy
        (0: all).
        """
        if not tasks:
            return

        def make() -> _Form:
            dims = _dims(layout)
            structures = (_ForwardTask * len(tasks))(*(_forward_task(x, dims) for x in tasks))
            return _task_form(tasks, structures, names, _options(tasks, softmax_scale, num_sms))

        names = ("q", "k", "v", "out_acc", "out", "lse")
        tensors = [x for t in tasks for x in (t.q, t.k, t.v, t.out_acc, t.out, t.lse)]
        ways = tuple([(task.mask, task.accumulate) for task in tasks])
        key = ("forward", layout, softmax_scale, num_sms, ways, *map(_kind, tensors))
        form = self._form(key, make)
        self._call("forward", tasks[0].q.device, form.filled(tensors), *form.rest)

    def backward_accumulate(
        self,
        tasks: Sequence[BackwardTask],
        *,
        softmax_scale: float,
        layout: str = "sbhd",
        num_sms: int = 0,
        deterministic: bool = False,
    ) -> None:
        """Adds the gradients of a list of blocks to their fp32 dq, dk and dv (which tasks may
        share). ``deterministic``: bitwise equal results from run to run, at some cost."""
        if not tasks:
            return

        def make() -> _Form:
            dims = _dims(layout)
            structures = (_BackwardTask * len(tasks))(*(_backward_task(x, dims) for x in tasks))
            return _task_form(tasks, structures, names, _options(tasks, *how))

        names = ("q", "k", "v", "dout", "lse", "delta", "dq", "dk", "dv")
        how = softmax_scale, num_sms, deterministic
        tensors = []
        for t in tasks:
            tensors += (t.q, t.k, t.v, t.dout, t.lse, t.delta, t.dq, t.dk, t.dv)
        masks = tuple([task.mask for task in tasks])
        form = self._form(("backward", layout, *how, masks, *map(_kind, tensors)), make)
        self._call("backward", tasks[0].q.device, form.filled(tensors), *form.rest)

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
        words = form.filled(tensors)
        places = [ctypes.byref(words, 8 * word) for word in form.pointers]
        self._call(name, tensors[0].device, form.rest[0], *places, form.rest[1])


def _row_form(
    name: str, layout: str, dtype: torch.dtype, views: dict[str, tuple[Tensor, torch.dtype]]
) -> _Form:
    """rest: (the shape, the code of ``dtype``)."""
    if dtype not in _DTYPES:
        raise ValueError(f"{name} takes bf16, fp16 or fp32, got {dtype}")
    dims = _dims(layout)
    like = next(iter(views.values()))[0]
    shape = _shape(like, dims)
    rows, filled = (shape.batch, shape.heads, shape.seq), []
    for part, (x, wanted) in views.items():
        is_rows = part in ("delta", "acc_lse", "o_lse")
        _check(part, x, rows if is_rows else tuple(like.shape), wanted, like)
        filled.append(_rows(x) if is_rows else _view(part, x, dims))
    words_each = ctypes.sizeof(_View) // 8
    pointers = range(0, len(filled) * words_each, words_each)  # a view begins with its pointer
    rest = ctypes.byref(shape), _DTYPES[dtype]
    return _Form.of((_View * len(filled))(*filled), pointers, rest)


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
