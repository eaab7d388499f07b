"""Which kernel computes a block: the names, the table of measurements, the refusals."""

import json
import sys
import types
from dataclasses import fields

import pytest
import torch

from megatron_distflash.config import DistFlashConfig
from megatron_distflash.runtime import blocks, fa4_kernel
from megatron_distflash.runtime.blocks import Case, candidates, choose, chosen, read_table
from megatron_distflash.runtime.kernel import BackwardBlock, Band, ForwardBlock, Rows
from megatron_distflash.runtime.library_kernels import Cpu, Cudnn

FULL = Band()
CPU = torch.device("cpu")


class FakeCuda:
    """What a kernel asks of queries on a GPU, which this machine need not have."""

    is_cuda, device, dtype = True, torch.device("cuda"), torch.bfloat16

    def __init__(self, head_dim: int) -> None:
        self.shape = (0, head_dim)


def refuse_all_but(monkeypatch, *names: str) -> None:
    for name, kernel in blocks._KERNELS.items():
        refusal = None if name in names else f"{name} is out"
        monkeypatch.setattr(type(kernel), "refusal", lambda *_, answer=refusal: answer)


def test_options_offer_every_kernel():
    kernel = next(field for field in fields(DistFlashConfig) if field.name == "kernel")
    assert sorted(kernel.metadata["choices"]) == sorted(blocks.KERNELS)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_cpu_has_one_kernel(direction):
    q = torch.empty(0, 12, dtype=torch.float64)
    for name in ("auto", "cpu"):
        assert isinstance(choose(name, direction, q, FULL, 3, 5), Cpu)
    for name in ("cuda", "cudnn", "flash", "fa4"):
        with pytest.raises(ValueError, match=f"{name}: .*CUDA tensors only.*choose another kernel"):
            choose(name, direction, q, FULL, 3, 5)
    with pytest.raises(ValueError, match="unknown kernel 'fa5'; choose one of auto, cpu, cuda"):
        choose("fa5", direction, q, FULL, 3, 5)


TABLE = (
    Case("forward", 128, "full", 4096, "fa4"),
    Case("forward", 128, "full", 0, "cudnn"),
    Case("backward", 128, "causal", 2048, "flash"),
)


@pytest.mark.parametrize(
    ("case", "first"),
    [
        (("forward", 128, "full", 8192), ["fa4", "cudnn", "cuda", "flash"]),
        (("forward", 128, "full", 4095), ["cudnn", "cuda", "flash"]),
        (("backward", 128, "full", 8192), ["cuda", "cudnn", "flash"]),
        (("backward", 128, "causal", 2048), ["flash", "cuda", "cudnn"]),
        (("forward", 64, "full", 8192), ["cuda", "cudnn", "flash"]),
        (("forward", 128, "band", 8192), ["cuda", "cudnn", "flash"]),
    ],
)
def test_the_first_case_that_fits_comes_first(case, first):
    assert candidates(*case, table=TABLE) == first


def test_auto_takes_the_next_where_one_refuses(monkeypatch):
    monkeypatch.setattr(blocks, "_table", lambda: TABLE)
    block = "forward", FakeCuda(128), FULL, 8192, 8192
    for names in (("fa4", "cuda"), ("cudnn", "cuda"), ("cuda", "flash"), ("flash",)):
        refuse_all_but(monkeypatch, *names)
        assert choose("auto", *block).name == names[0]
    refuse_all_but(monkeypatch)
    with pytest.raises(ValueError, match="head dim 128, full block .*fa4: fa4 is out; cudnn"):
        choose("auto", *block)


def test_small_blocks_are_measured_by_their_shorter_side(monkeypatch):
    monkeypatch.setattr(blocks, "_table", lambda: TABLE)
    refuse_all_but(monkeypatch, "fa4", "cudnn", "cuda")
    assert choose("auto", "forward", FakeCuda(128), FULL, 8192, 4096).name == "fa4"
    assert choose("auto", "forward", FakeCuda(128), FULL, 8192, 4000).name == "cudnn"


def test_the_table_that_is_shipped():
    for case in read_table(blocks.TABLE):
        assert case.direction in ("forward", "backward")
        assert case.shape in ("full", "causal", "band")
        assert case.head_dim % 8 == 0 and case.min_tokens >= 0


@pytest.mark.parametrize(
    ("name", "value"), [("kernel", "fa9"), ("shape", "square"), ("direction", "sideways")]
)
def test_a_table_with_an_unknown_name_is_refused(tmp_path, name, value):
    path = tmp_path / "table.json"
    line = {"direction": "forward", "head_dim": 64, "shape": "full", "min_tokens": 0}
    path.write_text(json.dumps([line | {"kernel": "cuda"} | {name: value}]))
    with pytest.raises(ValueError, match=f"table.json names {name} '{value}'; choose among"):
        read_table(path)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_rule_cudnn_gradients_out(monkeypatch, deterministic):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    q = FakeCuda(128)
    assert Cudnn().refusal(q, "full", "forward") is None
    assert "differ from run to run" in Cudnn().refusal(q, "full", "backward")
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert Cudnn().refusal(q, "full", "backward") is None


def test_a_choice_is_not_remembered_across_deterministic_mode(monkeypatch):
    block = "backward", torch.float64, CPU, 8, FULL, 4, 4
    blocks._chosen.cache_clear()
    assert chosen("cpu", *block).name == "cpu"
    monkeypatch.setattr(Cpu, "refusal", lambda *_: "not now")
    assert chosen("cpu", *block).name == "cpu"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert chosen("cpu", *block).name == "cpu", "a warning refuses nothing"
        torch.use_deterministic_algorithms(True)
        with pytest.raises(ValueError, match="not now"):
            chosen("cpu", *block)
    finally:
        torch.use_deterministic_algorithms(False)
        blocks._chosen.cache_clear()


# ---- flash-attn-4, which is not installed here --------------------------------------------------


@pytest.fixture
def fa4(monkeypatch):
    """Its two functions as attention of [b, s, h, d] tensors on the CPU, by our CPU kernel."""
    calls: list[dict] = []

    def fwd(q, k, v, *, softmax_scale, causal, return_lse):
        calls.append({"causal": causal, "return_lse": return_lse})
        band = Band(right=0) if causal else FULL
        inputs = (x.transpose(0, 1) for x in (q, k, v))
        out, lse = Cpu()._forward(*inputs, softmax_scale, band)
        return out.transpose(0, 1), lse.permute(1, 2, 0), None, None

    def bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic):
        assert lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        calls.append({"causal": causal, "deterministic": deterministic})
        band = Band(right=0) if causal else FULL
        inputs = [x.transpose(0, 1) for x in (dout, q, k, v, out)]
        grads = Cpu()._backward(*inputs, lse.permute(2, 0, 1), softmax_scale, band)
        return *(grad.transpose(0, 1) for grad in grads), None

    module = types.SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)
    monkeypatch.setattr(fa4_kernel, "_load", lambda: (module, None))
    return calls


@pytest.mark.parametrize("band", [FULL, Band(right=0)], ids=["full", "causal"])
def test_fa4_gets_and_gives_our_shapes(fa4, seed, band):
    generator = torch.Generator().manual_seed(seed)
    q, dout = (torch.randn(6, 2, 4, 8, generator=generator).double() for _ in range(2))
    k, v = (torch.randn(6, 2, 4, 8, generator=generator).double() for _ in range(2))
    results = []
    for kernel in (fa4_kernel.FlashAttention4(), Cpu()):
        ((out, lse),) = kernel.forward([ForwardBlock(q, k, v, band)], 0.3)
        rows = Rows(lse, (out * dout).sum(-1))
        (grads,) = kernel.backward([BackwardBlock(q, k, v, dout, rows, band)], 0.3)
        results.append((out, lse, *grads))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    causal = band.right is not None
    assert fa4[0] == {"causal": causal, "return_lse": True}
    assert fa4[1] == {"causal": causal, "deterministic": False}


@pytest.fixture
def looks_for_fa4(monkeypatch):
    """On a Hopper GPU; what was found before and is found here is forgotten."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    fa4_kernel._load.cache_clear()
    yield
    fa4_kernel._load.cache_clear()


@pytest.mark.usefixtures("looks_for_fa4")
def test_fa4_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    refusal = fa4_kernel.FlashAttention4().refusal(FakeCuda(128), "full", "forward")
    assert "pip install flash-attn-4" in refusal


@pytest.mark.usefixtures("looks_for_fa4")
def test_fa4_of_another_interface_is_refused(monkeypatch):
    package = types.ModuleType("flash_attn.cute")
    package.interface = types.ModuleType("flash_attn.cute.interface")
    package.interface._flash_attn_fwd = print
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    refusal = fa4_kernel.FlashAttention4().refusal(FakeCuda(64), "causal", "backward")
    assert "this flash-attn-4 has no _flash_attn_bwd" in refusal


def test_fa4_needs_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    refusal = fa4_kernel.FlashAttention4().refusal(FakeCuda(64), "full", "forward")
    assert refusal == "it needs compute capability 9.0"
