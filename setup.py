"""Build script: pyproject.toml holds the metadata, this the extension module in cpp/.

The module needs a C++ compiler, Python's headers and pybind11. Its GPU transports need the headers
of CUDA and NCCL besides, from a toolkit or from NVIDIA's wheels; nothing of either is linked, so it
loads anywhere.
What is missing is left out, and one line says so.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HOST_SOURCES = ["module", "communicator", "executor", "host_device", "transport_host"]
CUDA_SOURCES = ["cuda_driver", "cuda_device", "transport_nccl", "transport_copy"]


def cuda_includes() -> list[str] | None:
    """Directories that hold the headers of CUDA and of NCCL; None if either is missing."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        toolkits.append(Path(nvcc).resolve().parents[1])
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    cuda = [toolkit / "include" for toolkit in toolkits]
    cuda += [wheels / "cu13/include", wheels / "cuda_runtime/include"]
    nccl = [wheels / "nccl/include", *cuda, Path("/usr/include")]
    with_cuda = (path for path in cuda if _has(path, "cuda.h", "cuda_runtime.h", "cuda_fp16.h"))
    with_nccl = (path for path in nccl if _has(path, "nccl.h"))
    found = [next(with_cuda, None), next(with_nccl, None)]
    return None if None in found else [str(path) for path in found]


def native_module() -> list[Extension]:
    """The extension, or nothing on a machine that cannot build it."""
    try:
        import pybind11
    except ImportError:
        pybind11 = None
    compiler = os.environ.get("CXX", "g++")
    missing = "pybind11" if pybind11 is None else None
    if shutil.which(compiler.split()[0]) is None:
        missing = f"C++ compiler ({compiler})"
    elif not _has(Path(sysconfig.get_path("include")), "Python.h"):
        missing = "Python.h (Debian: apt install python3-dev)"
    if missing is not None:
        print(f"megatron-distflash: no {missing} found, building without the native module")
        return []
    cuda = cuda_includes()
    if cuda is None:
        print("megatron-distflash: no cuda.h or nccl.h found, building without GPU transports")
    sources = HOST_SOURCES + (CUDA_SOURCES if cuda else [])
    return [
        Extension(
            "megatron_distflash.runtime._native",
            [f"cpp/{name}.cpp" for name in sources],
            include_dirs=[pybind11.get_include(), *(cuda or [])],
            define_macros=[("DISTFLASH_WITH_CUDA", "1")] if cuda else [],
            depends=[str(path) for path in Path("cpp").glob("*.h")],
            extra_compile_args=["-std=c++17", "-O2", "-g0", "-Wall", "-fvisibility=hidden"],
            libraries=["dl", "pthread"],
            language="c++",
        )
    ]


def _has(directory: Path, *headers: str) -> bool:
    return all((directory / header).is_file() for header in headers)


setup(ext_modules=native_module())
