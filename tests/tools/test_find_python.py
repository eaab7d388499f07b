"""Finding a Python that works, among impostors on made-up PATHs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "find_python.sh"
BASH = "/bin/bash"


def make_command(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{BASH}\n{body}\n")
    path.chmod(0o755)
    return path


def working(path: Path) -> Path:
    """A command that is the Python of these tests under another name."""
    return make_command(path, f'exec "{sys.executable}" "$@"')


def old(path: Path, version: str = "3.11.7") -> Path:
    """A Python that is too old: the probe's own words for it."""
    return make_command(path, f'echo "is Python {version}" >&2; exit 1')


def broken(path: Path) -> Path:
    """A version manager's shim for a Python that is not activated."""
    return make_command(path, 'echo "pyenv: $(basename "$0"): command not found" >&2; exit 127')


def find(tmp_path: Path, *path_dirs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": os.pathsep.join(map(str, path_dirs)),
        "HOME": str(tmp_path / "home"),
    } | variables
    return subprocess.run(
        [BASH, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=60
    )


def test_first_working_name_wins(tmp_path):
    old(tmp_path / "a" / "python3")
    broken(tmp_path / "a" / "python3.12")
    expected = working(tmp_path / "b" / "python3.12")
    working(tmp_path / "b" / "python3.13")
    result = find(tmp_path, tmp_path / "a", tmp_path / "b")
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


def test_plain_python3_will_do(tmp_path):
    expected = working(tmp_path / "bin" / "python3")
    result = find(tmp_path, tmp_path / "bin")
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


@pytest.mark.parametrize("named", [True, False])
def test_pyenv_versions_behind_a_shim(tmp_path, named):
    """The shim fails, the version itself works: under $PYENV_ROOT or in its usual place."""
    root = tmp_path / ("elsewhere" if named else "home/.pyenv")
    broken(tmp_path / "shims" / "python3.12")
    old(root / "versions" / "3.11.7" / "bin" / "python")
    expected = working(root / "versions" / "3.12.1" / "bin" / "python")
    variables = {"PYENV_ROOT": str(root)} if named else {}
    result = find(tmp_path, tmp_path / "shims", **variables)
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


def test_uv_versions(tmp_path):
    name = ".local/share/uv/python/cpython-3.13.2-linux-x86_64-gnu/bin/python3"
    expected = working(tmp_path / "home" / name)
    result = find(tmp_path, tmp_path / "empty")
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


def test_an_explicit_choice_is_used(tmp_path):
    working(tmp_path / "bin" / "python3.12")
    expected = working(tmp_path / "mine" / "py")
    result = find(tmp_path, tmp_path / "bin", PYTHON=str(expected))
    assert (result.returncode, result.stdout) == (0, f"{expected}\n")


def test_an_explicit_choice_is_never_replaced(tmp_path):
    working(tmp_path / "bin" / "python3.12")
    choice = old(tmp_path / "mine" / "py")
    result = find(tmp_path, tmp_path / "bin", PYTHON=str(choice))
    assert (result.returncode, result.stdout) == (1, "")
    assert f"PYTHON={choice} was asked for and cannot be used" in result.stderr
    assert f"{choice}: is Python 3.11.7" in result.stderr


def test_none_found_says_what_it_looked_for_and_why_not(tmp_path):
    shim = broken(tmp_path / "bin" / "python3.13")
    too_old = old(tmp_path / "bin" / "python3")
    result = find(tmp_path, tmp_path / "bin")
    assert (result.returncode, result.stdout) == (1, "")
    for expected in (
        "Python 3.12 or 3.13 with venv is needed",
        "python3.12, python3.13, python3 and python on PATH",
        str(tmp_path / "home/.pyenv/versions"),
        f"{shim}: does not run",
        f"{too_old}: is Python 3.11.7",
        "make PYTHON=",
    ):
        assert expected in result.stderr


@pytest.mark.parametrize(
    ("version_info", "modules", "reason"),
    [
        ((3, 11, 9), {}, "is Python 3.11.9"),
        ((3, 14, 0), {}, "is Python 3.14.0"),
        (
            (3, 12, 4),
            {"ensurepip": None},
            "has no venv module (Debian: apt install python3.12-venv)",
        ),
    ],
)
def test_the_probe_itself(tmp_path, version_info, modules, reason):
    """The probe runs for real in an interpreter that pretends to be another one."""
    pretence = f"import sys; sys.version_info = {version_info}; sys.modules.update({modules})"
    script = f'exec "{sys.executable}" -c "{pretence}"$\'\\n\'"$2"'
    python = make_command(tmp_path / "bin" / "python3.12", script)
    result = find(tmp_path, tmp_path / "bin")
    assert result.returncode == 1
    assert f"{python}: {reason}" in result.stderr
