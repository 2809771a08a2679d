#!/bin/sh
# Sets up .venv with a set of packages that fit together and recpipe itself; does nothing when it is up to date.
# The CPU sets are tested, and the CUDA set for torch 2.11 was run on GPUs.
#   RECPIPE_PYTHON        the Python to use (default: python3 when it is 3.11 to 3.14, else the first of these that is there)
#   RECPIPE_REQUIREMENTS  the set to install (default: requirements/cuda-torch2.11.txt with a GPU, else requirements/cpu.txt)
set -eu
cd "$(dirname "$0")"

fail() {
    echo "setup: $1" >&2
    exit 1
}

find_python() {
    for candidate in ${RECPIPE_PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null &&
            "$candidate" -m pip --version >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

requirements=${RECPIPE_REQUIREMENTS:-}
if [ -z "$requirements" ]; then
    requirements=requirements/cpu.txt
    if nvidia-smi -L >/dev/null 2>&1; then requirements=requirements/cuda-torch2.11.txt; fi
fi
[ -f "$requirements" ] || fail "no file $requirements; there are: $(echo requirements/*.txt)"

wanted=$({ echo "$requirements $(pwd)"; cat setup.sh pyproject.toml requirements/*.txt packaging/*/pyproject.toml; } | cksum)
stamp=.venv/.recpipe-setup
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && .venv/bin/python -c '' 2>/dev/null; then
    echo "setup: .venv is up to date ($requirements)"
    exit 0
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(find_python) || fail "no Python 3.11 to 3.14 with pip and venv found; install one or set RECPIPE_PYTHON=/path/to/python3"
    echo "setup: making .venv with $python"
    rm -rf .venv
    # Without pip of its own: some systems ship venv without ensurepip. The outer pip installs into it.
    "$python" -m venv --without-pip .venv || fail "$python -m venv failed; on Debian and Ubuntu: apt install python3-venv"
else
    python=$(find_python) || fail "no Python 3.11 to 3.14 with pip found; set RECPIPE_PYTHON=/path/to/python3"
fi

# pip < 22.3 cannot install into another environment; .venv then gets a pip of its own.
if "$python" -m pip --python .venv/bin/python --version >/dev/null 2>&1; then
    pip="$python -m pip --python .venv/bin/python"
else
    .venv/bin/python -m ensurepip --upgrade >/dev/null 2>&1 || fail "pip of $python is older than 22.3: upgrade it"
    pip=".venv/bin/python -m pip"
fi

echo "setup: installing $requirements and recpipe into .venv (about 1.5 GB for CPU, 5 GB for CUDA)"
rm -f "$stamp"
quiet="--disable-pip-version-check --no-warn-script-location"
case $requirements in requirements/cpu*)
    # Alone and without its dependencies, so that PyTorch's index is asked for this one package.
    $pip install $quiet --retries 1 --no-deps --extra-index-url https://download.pytorch.org/whl/cpu "$(grep ^torch== "$requirements")" ||
        fail "pip could not install torch's CPU build (its message is above); run ./setup.sh again when that is mended"
    ;;
esac
# One command, so that pip resolves recpipe and the set together.
$pip install $quiet pip -r "$requirements" -e '.[test]' ||
    fail "pip could not install $requirements (its message is above); run ./setup.sh again when that is mended"
# pip does so for what it installs, but not for this folder: each new process would compile it again where Python may
# not write bytecode (PYTHONDONTWRITEBYTECODE).
.venv/bin/python -m compileall -q -j 0 recpipe plugins tests conftest.py ||
    fail "the sources could not be compiled (the message is above)"
echo "$wanted" >"$stamp"
echo "setup: done. Train: .venv/bin/python -m recpipe    Check: .venv/bin/python -m recpipe doctor"
