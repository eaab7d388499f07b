"""Build script: pyproject.toml holds the metadata, this the extension module in cpp/ and the CUDA
kernels in kernels/.

The module needs a C++ compiler, Python's headers and pybind11. Its GPU transports need the headers
of CUDA and NCCL besides, from a toolkit or from NVIDIA's wheels; nothing of either is linked, so it
loads anywhere. The kernels need nvcc and make. What is missing is left out, and one line says so;
what is there but does not compile ends the build.

DISTFLASH_KERNELS=0 leaves the kernels out; NVCC and CXX name other compilers.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HOST_SOURCES = ["module", "communicator", "executor", "host_device", "tape", "transport_host"]
CUDA_SOURCES = ["board", "cuda_driver", "cuda_device", "transport_nccl", "transport_copy"]

KERNELS = "megatron_distflash.runtime.libdistflash_kernels"
OLDEST_NVCC = (12, 5)


def cuda_includes() -> list[str] | None:
    """Directories that hold the headers of CUDA and of NCCL; None if either is missing."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia"
    toolkits = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    nvcc = find_nvcc()
    if nvcc is not None:
        toolkits.append(Path(nvcc).resolve().parents[1])
    toolkits += [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    cuda = [toolkit / "include" for toolkit in toolkits]
    cuda += [wheels / "cu13/include", wheels / "cuda_runtime/include"]
    nccl = [wheels / "nccl/include", *cuda, Path("/usr/include")]
    # What nccl.h includes, and what that does; of NVIDIA's wheels several hold parts of it.
    wanted = "cuda.h", "cuda_runtime.h", "cuda_fp16.h", "crt/host_config.h", "nv/target"
    with_cuda = (path for path in cuda if _has(path, *wanted))
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
        _say(f"no {missing} found, building without the native module")
        return []
    cuda = cuda_includes()
    if cuda is None:
        _say("no headers of a CUDA toolkit or no nccl.h found, building without GPU transports")
    sources = HOST_SOURCES + (CUDA_SOURCES if cuda else [])
    return [
        Extension(
            "megatron_distflash.runtime._native",
            [f"cpp/{name}.cpp" for name in sources],
            include_dirs=[pybind11.get_include(), *(cuda or [])],
            define_macros=[("DISTFLASH_WITH_CUDA", "1")] if cuda else [],
            depends=["kernels/api.h", *(str(path) for path in Path("cpp").glob("*.h"))],
            extra_compile_args=["-std=c++17", "-O2", "-g0", "-Wall", "-fvisibility=hidden"],
            libraries=["dl", "pthread"],
            language="c++",
        )
    ]


def cuda_kernels() -> list[Extension]:
    """The library of kernels, which is no Python module; nothing where it is not to be built."""
    problem = kernels_problem()
    if problem is not None:
        _say(f"{problem}, building without CUDA kernels")
        return []
    sources = Path("kernels")
    return [
        Extension(
            KERNELS,
            sorted(str(path) for path in sources.glob("*.cu")),
            depends=[
                str(path)
                for suffix in ("*.cuh", "*.h", "Makefile")
                for path in sources.glob(suffix)
            ],
        )
    ]


def kernels_problem() -> str | None:
    """Why the kernels are not built."""
    if os.environ.get("DISTFLASH_KERNELS") == "0":
        return "DISTFLASH_KERNELS is 0"
    nvcc = find_nvcc()
    if nvcc is None:
        return "no nvcc found"
    if shutil.which("make") is None:
        return "no make found"
    version = nvcc_version(nvcc)
    if version < OLDEST_NVCC:
        found, wanted = (".".join(map(str, x)) for x in (version, OLDEST_NVCC))
        return f"{nvcc} is version {found} and not {wanted} or newer"
    return None


def find_nvcc() -> str | None:
    """From $NVCC, the path, $CUDA_HOME or where CUDA's installer puts it."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    places = [f"{home}/bin/nvcc" for home in (*homes, "/usr/local/cuda")]
    names = [os.environ["NVCC"]] if os.environ.get("NVCC") else ["nvcc", *places]
    return next((found for found in map(shutil.which, names) if found), None)


def nvcc_version(nvcc: str) -> tuple[int, int]:
    """(0, 0) if it does not say."""
    says = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", says)
    return (int(release[1]), int(release[2])) if release else (0, 0)


class BuildExt(build_ext):
    """Leaves the kernels to their Makefile; what it compiled stays in build/ for the next time."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name != KERNELS:
            super().build_extension(ext)
            return
        target = Path(self.get_ext_fullpath(ext.name)).absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        _say("compiling the CUDA kernels, which takes a minute of CPU or two the first time")
        command = ["make", "-s", "-C", "kernels", f"-j{os.cpu_count() or 1}", f"NVCC={find_nvcc()}"]
        objects = Path("build/kernels").absolute()
        try:
            subprocess.run([*command, f"OUT={target}", f"OBJ={objects}"], check=True)
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"the CUDA kernels do not compile, see above ({error}): name another compiler with "
                "NVCC, or install without them with DISTFLASH_KERNELS=0"
            ) from error

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] == KERNELS.rpartition(".")[2]:
            return fullname.replace(".", "/") + ".so"
        return super().get_ext_filename(fullname)


def _has(directory: Path, *headers: str) -> bool:
    return all((directory / header).is_file() for header in headers)


def _say(text: str) -> None:
    print(f"megatron-distflash: {text}")


setup(ext_modules=native_module() + cuda_kernels(), cmdclass={"build_ext": BuildExt})
