"""The build script: what it builds where, and what it says of what it leaves out. Compilers are
fakes that answer at once; the real ones run whenever the package is installed."""

import importlib.util
import os
import stat
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
from setuptools import Distribution

ROOT = Path(__file__).parents[1]
LIBRARY = "megatron_distflash/runtime/libdistflash_kernels.so"


@pytest.fixture
def build(monkeypatch) -> types.ModuleType:
    """setup.py, imported from the repository's top without building anything."""
    monkeypatch.chdir(ROOT)
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC", "DISTFLASH_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("distflash_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch("setuptools.setup") as setup, mock.patch("subprocess.run", refuse):
        monkeypatch.setenv("DISTFLASH_KERNELS", "0")
        spec.loader.exec_module(module)
    monkeypatch.delenv("DISTFLASH_KERNELS")
    assert setup.call_args.kwargs["cmdclass"] == {"build_ext": module.BuildExt}
    return module


def refuse(*_args, **_kwargs) -> None:
    raise AssertionError("nothing is to be run")


def program(directory: Path, name: str, script: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def fake_nvcc(directory: Path, version: str = "13.0") -> Path:
    text = f"Cuda compilation tools, release {version}, V{version}.88"
    return program(directory, "nvcc", f"print({text!r})")


def test_kernels_where_nvcc_and_make_are(build, monkeypatch, tmp_path):
    fake_nvcc(tmp_path)
    program(tmp_path, "make", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    (kernels,) = build.cuda_kernels()
    assert sorted(kernels.sources) == sorted(
        f"kernels/{x.name}" for x in Path("kernels").glob("*.cu")
    )
    others = {Path(x).name for x in kernels.depends}
    assert {"Makefile", "api.h", "forward_sm90.cuh"} <= others


def test_what_is_missing_is_said_in_one_line(build, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    assert build.cuda_kernels() == []
    monkeypatch.undo()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["megatron-distflash: no nvcc found, building without CUDA kernels"]


@pytest.mark.parametrize(
    ("version", "problem"),
    [("12.4", "is version 12.4 and not 12.5 or newer"), ("9.2", "is version 9.2 "), ("12.5", None)],
)
def test_an_old_nvcc_is_refused(build, monkeypatch, tmp_path, version, problem):
    nvcc = fake_nvcc(tmp_path, version)
    program(tmp_path, "make", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.kernels_problem()
    assert found is None if problem is None else found.startswith(f"{nvcc} {problem}")


def test_no_make(build, monkeypatch, tmp_path):
    fake_nvcc(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.kernels_problem() == "no make found"


def test_kernels_can_be_left_out(build, monkeypatch):
    monkeypatch.setenv("DISTFLASH_KERNELS", "0")
    with mock.patch("subprocess.run", refuse):
        assert build.cuda_kernels() == []


def test_where_nvcc_is_looked_for(build, monkeypatch, tmp_path):
    for name in ("path", "home/bin", "own"):
        fake_nvcc(tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() == str(tmp_path / "home/bin/nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert build.find_nvcc() == str(tmp_path / "path/nvcc")
    monkeypatch.setenv("NVCC", str(tmp_path / "own/nvcc"))
    assert build.find_nvcc() == str(tmp_path / "own/nvcc")
    monkeypatch.setenv("NVCC", str(tmp_path / "gone/nvcc"))
    assert build.find_nvcc() is None  # and not another one than was asked for


def test_incomplete_headers_are_not_taken(build, monkeypatch, tmp_path):
    """The wheels that torch installs hold cuda_runtime.h, but not what it includes."""
    include = tmp_path / "include"
    for name in ("cuda.h", "cuda_runtime.h", "cuda_fp16.h", "nccl.h"):
        include.mkdir(exist_ok=True)
        (include / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert str(include) not in (build.cuda_includes() or [])
    for name in ("crt/host_config.h", "nv/target"):
        (include / name).parent.mkdir()
        (include / name).touch()
    assert build.cuda_includes()[0] == str(include)


def build_command(build, tmp_path, extension):
    command = build.BuildExt(Distribution({"ext_modules": [extension]}))
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    return command


def test_the_kernels_are_made_into_the_package(build, monkeypatch, tmp_path):
    nvcc = fake_nvcc(tmp_path / "bin")
    record = tmp_path / "arguments"
    program(
        tmp_path / "bin", "make", f"import sys; open({str(record)!r}, 'w').write(str(sys.argv))"
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (kernels,) = build.cuda_kernels()
    command = build_command(build, tmp_path, kernels)
    command.run()
    arguments = record.read_text()
    target = tmp_path / "lib" / LIBRARY
    assert target.parent.is_dir() and f"'OUT={target}'" in arguments
    assert f"'NVCC={nvcc}'" in arguments and "'-C', 'kernels'" in arguments
    assert command.get_outputs() == [str(target)]


def test_kernels_that_do_not_compile_end_the_build(build, monkeypatch, tmp_path):
    fake_nvcc(tmp_path / "bin")
    program(tmp_path / "bin", "make", "raise SystemExit(2)")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (kernels,) = build.cuda_kernels()
    with pytest.raises(RuntimeError, match="make.*exit status 2.*DISTFLASH_KERNELS=0"):
        build_command(build, tmp_path, kernels).run()


def test_the_module_keeps_its_name(build, tmp_path):
    """What Python imports has the interpreter's suffix, the library has not."""
    command = build_command(build, tmp_path, build.Extension("a.b._native", []))
    assert command.get_ext_filename("a.b._native").startswith(os.path.join("a", "b", "_native."))
    assert command.get_ext_filename("_native").endswith(
        build.sysconfig.get_config_var("EXT_SUFFIX")
    )
    assert command.get_ext_filename(build.KERNELS) == LIBRARY


def test_the_library_is_looked_for_where_it_is_built():
    from megatron_distflash.runtime.cuda_kernels import LIBRARY as LOADED

    assert ROOT / LIBRARY == LOADED
