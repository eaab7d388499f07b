#!/usr/bin/env bash
# Make .venv at the top of the repository: the pinned packages and this project, editable.
#
# A second call does nothing: .venv/.installed keeps a digest of the files that say what belongs in
# the environment, and only a change of those, or a Python that went away, installs again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

requirements=tools/requirements.txt
digest=$(cat "$requirements" pyproject.toml setup.py cpp/* kernels/*.* | sha256sum)

# A virtual environment outlives its Python (an upgrade, a moved folder): run it to know.
if ! .venv/bin/python -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)' 2>/dev/null; then
    python=$(tools/find_python.sh)
    echo "making .venv with $("$python" --version) ($python)"
    rm -rf .venv
    "$python" -m venv .venv
elif [ "$(cat .venv/.installed 2>/dev/null)" = "$digest" ]; then
    exit 0
fi

log=.venv/install.log
: >"$log"

# Shows what pip downloads, with its size, and nothing else of what it says; the log keeps all of it.
run_pip() {
    if ! .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off "$@" 2>&1 |
        tee -a "$log" | sed -unE '/\.metadata /d; s/^ *(Downloading|Using cached) ([^ ]+) (\(.*\))$/  \2 \3/p'; then
        tail -n 20 "$log" >&2
        echo "pip could not install the environment; all it said is in $log" >&2
        exit 1
    fi
}

echo "installing $(grep -c '==' "$requirements") pinned packages; torch and its CUDA libraries are about 3 GB"
run_pip -r "$requirements"
echo "installing megatron-distflash (editable)"
run_pip --no-deps --no-build-isolation --editable .
if ! compgen -G 'megatron_distflash/runtime/_native*.so' >/dev/null; then
    echo "the native module was not built and the demo does without it; 'make build' says why"
fi
printf '%s\n' "$digest" >.venv/.installed
echo "environment ready: .venv"
