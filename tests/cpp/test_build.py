"""The native module's C++ tests under sanitizers, and that it is built where it can be."""

import importlib.util
import random
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ["communicator", "executor", "host_device", "tape", "transport_host"]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_executor_is_clean_under(sanitizer: str, tmp_path: Path) -> None:
    """Random plans, slots reused at once, late and dead ranks: no race, leak or stray access."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    binary = tmp_path / "executor_test"
    sources = [f"cpp/{name}.cpp" for name in SOURCES] + ["tests/cpp/executor_test.cpp"]
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}"]
    command = [compiler, *flags, *sources, "-o", str(binary), "-pthread"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500)
    seed = str(random.randrange(2**31))
    ran = subprocess.run([binary, seed], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"seed {seed}\n{ran.stderr[-4000:]}"
    assert ran.stdout == "ok\n" and "Sanitizer" not in ran.stderr


def test_module_is_built_where_it_can_be() -> None:
    """Otherwise every test of it would be skipped unseen."""
    if shutil.which("g++") is None or importlib.util.find_spec("pybind11") is None:
        pytest.skip("no g++ or no pybind11")
    from megatron_distflash.runtime import _native

    if shutil.which("nvcc") is not None and importlib.util.find_spec("nvidia.nccl") is not None:
        assert _native.with_cuda
