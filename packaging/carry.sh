#!/usr/bin/env bash
# For a machine that reaches no package registry, and takes files up to a size: the packages that it lacks, in parts,
# and recpipe.
#
#   packaging/carry.sh PYTHON HAVE FOLDER [MIB]
#
# PYTHON has the set to carry, at its versions: .venv/bin/python after ./setup.sh, for the same version of Python and
# the same kind of machine (RECPIPE_PYTHON, RECPIPE_REQUIREMENTS). HAVE is a file with the names of the packages that
# the other machine has: what "pip list --format=freeze" prints there, or names with commas. FOLDER gets part-00, part-01 ...
# of at most MIB (default 55) each. With ARCHITECTURE=90 in the environment, FBGEMM, torch and NCCL have kernels for
# GPUs of compute capability 9.0 alone, FBGEMM a third of its size. Over there, with all parts in a folder PARTS:
#
#   cat PARTS/part-* | tar -xf - -C WHEELS && python3 -m pip install --no-index --no-deps --target SITE WHEELS/*.whl
#   PYTHONPATH=SITE python3 -m recpipe
set -euo pipefail
python=$1 have=$2 mib=${4:-55}
folder=$(mkdir -p "$3" && cd "$3" && pwd)
pip() { python3 -m pip --disable-pip-version-check --python "$python" "$@"; }
names() { tr ', ' '\n\n' | sed -E 's/[=<>@].*//' | grep . | tr 'A-Z_.' 'a-z--' | sort -u; }

wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip list --format=freeze --exclude recpipe --exclude-editable > "$wheels/installed.txt"
names < "$wheels/installed.txt" | comm -23 - <(names < "$have") > "$wheels/lacking.txt"
[ -s "$wheels/lacking.txt" ] || { echo "carry: that machine has all of $python's packages" >&2; exit 1; }
while IFS== read -r name _ version; do
  if grep -qx "$(echo "$name" | names)" "$wheels/lacking.txt"; then echo "$name==$version"; fi
done < "$wheels/installed.txt" > "$wheels/wanted.txt"
cat "$wheels/wanted.txt"
pip wheel -q --no-deps -w "$wheels/all" -r "$wheels/wanted.txt"
# Plugins are found by the entry points of an installed recpipe.
pip wheel -q --no-deps -w "$wheels/all" "$(dirname "$0")/.."
if [ -n "${ARCHITECTURE:-}" ]; then
  shopt -s nullglob
  python3 "$(dirname "$0")/one_architecture.py" "$wheels"/all/{fbgemm_gpu,torch,nvidia_nccl_cu13}-*.whl "$ARCHITECTURE"
fi
rm -f "$folder"/part-*
tar -C "$wheels/all" -cf - . | split -b "${mib}M" -d - "$folder/part-"
ls -l "$folder"/part-*
