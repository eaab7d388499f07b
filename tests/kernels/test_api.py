"""What can be checked of the kernels' interface without a GPU."""

import ctypes
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_distflash.runtime import cuda_kernels, cuda_tasks
from megatron_distflash.runtime.cuda_kernels import CudaKernels
from megatron_distflash.runtime.cuda_tasks import BackwardTask, ForwardTask, Mask

HEADER = Path(__file__).parents[2] / "kernels" / "api.h"
STRUCTURES = {
    "distflash_tensor": cuda_tasks.View,
    "distflash_rows": cuda_tasks.View,
    "distflash_block": cuda_tasks.BlockStructure,
    "distflash_forward_task": cuda_tasks.ForwardStructure,
    "distflash_backward_task": cuda_tasks.BackwardStructure,
    "distflash_options": cuda_tasks.Options,
    "distflash_shape": cuda_tasks.Shape,
}


class _Library:
    """Stands in for the loaded library: every function succeeds and notes its call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append((name, arguments))

        setattr(self, name, function)
        return function


def _qkv(num_queries=8, num_keys=8, heads=4, kv_heads=2, head_dim=64):
    q = torch.randn(num_queries, 1, heads, head_dim, dtype=torch.bfloat16)
    k, v = (torch.randn(num_keys, 1, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v, torch.zeros(1, heads, num_queries)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) found")
def test_structures_have_the_layout_of_the_c_header(tmp_path):
    lines, expected = [], []
    for name, structure in STRUCTURES.items():
        lines.append(f'printf("%zu ", sizeof({name}));')
        expected.append(ctypes.sizeof(structure))
        declared = _fields_of(name)
        assert declared == [field for field, _ in structure._fields_]
        for field in declared:
            lines.append(f'printf("%zu ", offsetof({name}, {field}));')
            expected.append(getattr(structure, field).offset)
    source = tmp_path / "layout.c"
    body = "\n".join(lines)
    source.write_text(
        f'#include "{HEADER}"\n#include <stdio.h>\nint main(void) {{ {body} return 0; }}\n'
    )
    program = tmp_path / "layout"
    subprocess.run(["cc", "-std=c11", "-Wall", "-Werror", source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert [int(word) for word in printed.split()] == expected


def _fields_of(name):
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    body = re.search(r"typedef struct \{([^}]*)\} " + name + ";", text).group(1)
    return re.findall(r"(\w+)\s*[,;]", body)


def test_api_version_is_that_of_the_header():
    version = re.search(r"DISTFLASH_API_VERSION (\d+)", HEADER.read_text()).group(1)
    assert int(version) == cuda_kernels._API_VERSION


def test_every_declared_function_is_defined_once():
    declared = set(re.findall(r"\b(distflash_\w+)\(", HEADER.read_text()))
    sources = "\n".join(path.read_text() for path in HEADER.parent.glob("*.cu"))
    external = re.findall(r"^(?:const char\*|int) (distflash_\w+)\(", sources, re.MULTILINE)
    assert sorted(external) == sorted(declared)


def test_load_says_why_there_are_no_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_kernels.load(tmp_path / "a.so") == (None, "torch sees no CUDA device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels, reason = cuda_kernels.load(tmp_path / "b.so")
    assert kernels is None and "was not built" in reason
    (tmp_path / "c.so").write_text("not a library")
    kernels, reason = cuda_kernels.load(tmp_path / "c.so")
    assert kernels is None and "does not load" in reason


def test_cpu_tensors_are_refused():
    kernels = CudaKernels(_Library())
    q, k, v, lse = _qkv()
    with pytest.raises(ValueError, match="CUDA tensors"):
        kernels.forward_accumulate(
            [ForwardTask(q, k, v, lse, out=torch.empty_like(q))], softmax_scale=1.0
        )
    with pytest.raises(ValueError, match="CUDA tensors"):
        kernels.merge(q.float(), lse, q, lse)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(8, 1, 3, 64, dtype=torch.bfloat16)}, "v must be"),
        ({"v": torch.zeros(9, 1, 2, 64, dtype=torch.bfloat16)}, "v must be"),
        ({"q": torch.zeros(8, 1, 4, 64)}, "bf16 or fp16"),
        ({"lse": torch.zeros(1, 4, 7)}, "lse must be"),
        ({"out": None}, "out_acc may be None only"),
        ({"accumulate": True}, "out_acc may be None only"),
        ({"out": torch.zeros(8, 1, 4, 64)}, "out must be"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(change, message):
    q, k, v, lse = _qkv()
    task = {"q": q, "k": k, "v": v, "lse": lse, "out": torch.empty_like(q)} | change
    with pytest.raises(ValueError, match=message):
        CudaKernels(_Library()).forward_accumulate([ForwardTask(**task)], softmax_scale=1.0)


def test_heads_must_share_kv_heads_evenly():
    q, k, v, lse = _qkv(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3 KV heads"):
        CudaKernels(_Library()).forward_accumulate(
            [ForwardTask(q, k, v, lse, out=torch.empty_like(q))], softmax_scale=1.0
        )


def test_the_last_dimension_must_be_contiguous():
    q, k, v, lse = _qkv()
    wide = torch.empty(8, 1, 4, 128, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="last dimension of q"):
        CudaKernels(_Library()).forward_accumulate(
            [ForwardTask(wide[..., ::2], k, v, lse, out=torch.empty_like(q))], softmax_scale=1.0
        )


def test_backward_accumulators_must_be_fp32():
    q, k, v, lse = _qkv()
    grads = (q.float(), k.float(), v)
    with pytest.raises(ValueError, match="dv must be torch.float32"):
        CudaKernels(_Library()).backward_accumulate(
            [BackwardTask(q, k, v, q, lse, lse, *grads)], softmax_scale=1.0
        )


def test_tasks_of_one_call_share_a_head_dim():
    small, large = _qkv(head_dim=64), _qkv(head_dim=128)
    tasks = [ForwardTask(q, k, v, lse, out=torch.empty_like(q)) for q, k, v, lse in (small, large)]
    with pytest.raises(ValueError, match="share dtype, head_dim and device"):
        CudaKernels(_Library()).forward_accumulate(tasks, softmax_scale=1.0)


def test_an_empty_list_launches_nothing():
    library = _Library()
    kernels = CudaKernels(library)
    kernels.forward_accumulate([], softmax_scale=1.0)
    kernels.backward_accumulate([], softmax_scale=1.0)
    assert library.calls == []


class _Passed(CudaKernels):
    """Notes what it would call the library with, as bytes: (name, structures, …).

    Attributes:
        offsets: of the last call's views behind the first one, in bytes.
    """

    def __init__(self):
        super().__init__(_Library())
        self.calls = []

    def _call(self, name, device, *arguments):
        views = [ctypes.cast(x, ctypes.c_void_p).value for x in arguments[1:-1]]
        self.offsets = [address - views[0] for address in views]
        pointed = (x._obj if hasattr(x, "_obj") else x for x in arguments)
        self.calls.append((name, *(x if isinstance(x, int) else bytes(x) for x in pointed)))


def _forward_tasks(rng):
    """As a step has them: with and without a state, in two pieces of the same tensors."""
    sizes = rng.randint(1, 9), rng.randint(1, 9)
    q, k, v, lse = _qkv(*sizes)
    state, out = q.float(), torch.empty_like(q)
    mask = rng.choice([Mask(), Mask("causal", rng.randint(-3, 3)), Mask("window", 0, 4)])
    how = [
        {"out": out},
        {"out_acc": state},
        {"out_acc": state, "accumulate": True},
        {"out_acc": state, "out": out, "accumulate": True},
    ]
    tasks = [ForwardTask(q, k, v, lse, mask=mask, **rng.choice(how)) for _ in range(2)]
    return [
        *tasks,
        ForwardTask(q[:, :, :2], k[:, :, :1], v[:, :, :1], lse[:, :2], out=out[:, :, 2:]),
    ]


def _backward_tasks(rng):
    q, k, v, lse = _qkv(rng.randint(1, 9), rng.randint(1, 9))
    sums = q.float(), k.float(), v.float()
    return [BackwardTask(q, k, v, q, lse, lse.clone(), *sums, rng.choice([Mask(), Mask("causal")]))]


def test_calls_pass_what_their_tensors_say_however_often_they_are_made():
    """New and remembered forms alike; the structures that ctypes makes of a task are the truth."""
    rng, kernels, dims = random.Random(), _Passed(), cuda_tasks.LAYOUTS["sbhd"]
    for _ in range(60):
        forward, backward = _forward_tasks(rng), _backward_tasks(rng)
        scale, shift = rng.choice([(0.5, 0), (2.0, 0), (2.0, 7)])
        how = {"softmax_scale": scale, "tiles_per_shift": shift}
        kernels.forward_accumulate(forward, **how)
        kernels.backward_accumulate(backward, **how, deterministic=True)
        wanted = [
            b"".join(bytes(cuda_tasks.forward_structure(x, dims)) for x in forward),
            b"".join(bytes(cuda_tasks.backward_structure(x, dims)) for x in backward),
        ]
        options = [
            bytes(cuda_tasks.Options(scale, 0, 64, 0, is_deterministic, shift))
            for is_deterministic in (0, 1)
        ]
        for (_, structures, num_tasks, option), tasks, structure, wanted_option in zip(
            kernels.calls, (forward, backward), wanted, options, strict=True
        ):
            assert (structures, num_tasks, option) == (structure, len(tasks), wanted_option)
        kernels.calls.clear()
    assert len(kernels._forms) < 120, "forms were not remembered"


def test_row_calls_pass_what_their_tensors_say_however_often_they_are_made():
    kernels, dims = _Passed(), cuda_tasks.LAYOUTS["sbhd"]
    for _ in range(2):
        q, _, _, lse = _qkv()
        acc, other_lse = q.float(), lse.clone()
        wide = torch.empty(8, 1, 6, 64, dtype=q.dtype)[:, :, 1:5]
        kernels.merge(acc, lse, q, other_lse, out=wide)
        assert kernels.offsets == [idx * ctypes.sizeof(cuda_tasks.View) for idx in range(5)]
        kernels.cast(wide, acc)
        for name, views in (
            ("finish", [acc, lse, q, other_lse, wide]),
            ("cast", [wide, acc]),
        ):
            called, shape, first, *_, code = kernels.calls.pop(0)
            wanted = [
                cuda_tasks.rows_of(x) if x.dim() == 3 else cuda_tasks.view_of("", x, dims)
                for x in views
            ]
            assert (called, shape) == (name, bytes(cuda_tasks.Shape(1, 4, 8, 64)))
            assert (first, code) == (b"".join(map(bytes, wanted)), 0)
    assert len(kernels._forms) == 2


def test_forms_are_forgotten_before_they_are_too_many(monkeypatch):
    monkeypatch.setattr(cuda_kernels, "_MAX_REMEMBERED", 40)
    kernels = _Passed()
    for num_queries in range(1, 9):
        q, k, v, lse = _qkv(num_queries)
        kernels.forward_accumulate([ForwardTask(q, k, v, lse, out=q.clone())], softmax_scale=1.0)
        assert kernels._forms and sum(map(len, kernels._forms)) <= 40
    assert len(kernels._forms) > 1


@pytest.mark.parametrize("layout", sorted(cuda_tasks.LAYOUTS))
def test_views_name_the_strides_of_the_layout(layout):
    sizes = {"b": 2, "h": 3, "s": 5, "d": 8}
    x = torch.empty([sizes[axis] for axis in layout])
    view = cuda_tasks.view_of("x", x, cuda_tasks.LAYOUTS[layout])
    strides = dict(zip(layout, x.stride(), strict=True))
    assert (view.batch_stride, view.head_stride, view.seq_stride) == (
        strides["b"],
        strides["h"],
        strides["s"],
    )


def test_masks_are_checked():
    with pytest.raises(ValueError, match="unknown"):
        Mask("diagonal")
    with pytest.raises(ValueError, match="at least 1"):
        Mask("window")
