#!/usr/bin/env bash
# Print the path of a Python that the pinned packages have wheels for (3.12 or 3.13) and that can
# make a virtual environment. Every candidate is run, because a file that is there need not work: a
# pyenv shim fails unless its version is activated, and Debian's python3 comes without venv.
#
# $PYTHON, when set, is the only candidate: an explicit choice is used or refused, never replaced.
set -u

probe='
import sys, sysconfig
if not (3, 12) <= sys.version_info[:2] <= (3, 13):
    sys.exit("is Python %d.%d.%d" % sys.version_info[:3])
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit("is a free-threaded build, for which there are no wheels")
try:
    import ensurepip, venv
except ImportError:
    sys.exit("has no venv module (Debian: apt install python%d.%d-venv)" % sys.version_info[:2])
'

candidates() {
    if [ -n "${PYTHON:-}" ]; then
        printf '%s\n' "$PYTHON"
        return
    fi
    type -aP python3.12 python3.13 python3 python
    printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python
    printf '%s\n' "$HOME"/.local/share/uv/python/cpython-3.1[23].*/bin/python3
}

rejected=""
while IFS= read -r candidate; do
    case $candidate in *'*'*) continue ;; esac # a pattern that matched nothing
    if reason=$("$candidate" -c "$probe" 2>&1); then
        printf '%s\n' "$candidate"
        exit 0
    fi
    case $reason in
        "is "* | "has no venv "*) ;;
        *) reason="does not run" ;;
    esac
    rejected+="  $candidate: $reason"$'\n'
done < <(candidates)

{
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON was asked for and cannot be used; Python 3.12 or 3.13 with venv is needed."
    else
        echo "No usable Python was found; Python 3.12 or 3.13 with venv is needed."
        echo "Looked for python3.12, python3.13, python3 and python on PATH, for pyenv's versions under" \
            "${PYENV_ROOT:-$HOME/.pyenv}/versions and for uv's under $HOME/.local/share/uv/python."
    fi
    if [ -n "$rejected" ]; then
        echo "Found, but not usable:"
        printf '%s' "$rejected"
    fi
    echo "Install one (Debian 13: apt install python3-venv; or: pyenv install 3.12)" \
        "or name one: make PYTHON=/path/to/python3.12 ..."
} >&2
exit 1
