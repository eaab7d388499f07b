"""The native module's C++ tests under sanitizers, and that it is built where it can be."""

import importlib.util
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
HOST_SOURCES = ["communicator", "executor", "host_device", "tape", "transport_host"]
NCCL_SOURCES = ["communicator", "host_device", "transport_nccl"]
COPY_SOURCES = ["board", "communicator", "cuda_device", "cuda_driver", "executor", "transport_copy"]


def compile_with(flags: list[str], sources: list[str], out: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    command = [compiler, *FLAGS, *flags, *sources, "-o", str(out), "-pthread"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)


def run_clean(binary: Path) -> None:
    seed = str(random.randrange(2**31))
    ran = subprocess.run([binary, seed], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stderr[-4000:]}"
    assert ran.stdout == "ok\n" and "Sanitizer" not in ran.stderr


@pytest.fixture(params=["thread", "address,undefined"])
def sanitizer(request) -> str:
    return f"-fsanitize={request.param}"


def test_executor_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """Random plans, slots reused at once, late and dead ranks: no race, leak or stray access."""
    binary = tmp_path / "executor_test"
    sources = [f"cpp/{name}.cpp" for name in HOST_SOURCES] + ["tests/cpp/executor_test.cpp"]
    compile_with([sanitizer], sources, binary)
    run_clean(binary)


def test_copy_transport_is_clean(sanitizer: str, tmp_path: Path) -> None:
    """On a stand-in for the driver, which the linker's path puts in the real one's place."""
    include = cuda_include()
    if include is None:
        pytest.skip("no cuda.h")
    flags = [sanitizer, f"-I{include}"]
    run_on_a_stand_in("libcuda.so.1", "fake_driver", "copy_test", COPY_SOURCES, flags, tmp_path)


def test_nccl_transport_ends(tmp_path: Path) -> None:
    """On a stand-in for NCCL. Not under the thread sanitizer, g++ 12's of which takes timed mutexes
    for unlocked ones."""
    includes = [include_with("crt/host_config.h", "cu13"), include_with("nccl.h", "nccl")]
    if None in includes:
        pytest.skip("no headers of a CUDA toolkit, or no nccl.h")
    flags = ["-fsanitize=address,undefined", *(f"-I{include}" for include in includes)]
    run_on_a_stand_in("libnccl.so.2", "fake_nccl", "nccl_test", NCCL_SOURCES, flags, tmp_path)


def run_on_a_stand_in(
    library: str, stand_in: str, test: str, names: list[str], flags: list[str], folder: Path
) -> None:
    """The test's program, with ``names`` of cpp/, finds the stand-in under the library's name."""
    made, binary = folder / library, folder / test
    shared = ["-shared", "-fPIC", f"-Wl,-soname,{library}"]
    compile_with([*flags, *shared], [f"tests/cpp/{stand_in}.cpp"], made)
    sources = [f"cpp/{name}.cpp" for name in names]
    sources += [f"tests/cpp/{test}.cpp", str(made), "-ldl"]
    compile_with([*flags, f"-Wl,-rpath,{folder}"], sources, binary)
    run_clean(binary)


def cuda_include() -> Path | None:
    return include_with("cuda.h", "cu13", "cuda_runtime")


def include_with(header: str, *wheels: str) -> Path | None:
    """Where a header is, as in setup.py."""
    nvidia = Path(sysconfig.get_path("purelib")) / "nvidia"
    places = [*(nvidia / wheel / "include" for wheel in wheels), Path("/usr/local/cuda/include")]
    return next((place for place in places if (place / header).is_file()), None)


def test_module_is_built_where_it_can_be() -> None:
    """Otherwise every test of it would be skipped unseen."""
    if shutil.which("g++") is None or importlib.util.find_spec("pybind11") is None:
        pytest.skip("no g++ or no pybind11")
    from megatron_distflash.runtime import _native

    if shutil.which("nvcc") is not None and importlib.util.find_spec("nvidia.nccl") is not None:
        assert _native.with_cuda
