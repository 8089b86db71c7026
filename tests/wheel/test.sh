#!/bin/sh
# Installs a wheel in a fresh virtual environment and runs tests/wheel/installed.py there.
#
#   tests/wheel/test.sh PYTHON WHEEL...   of the wheels, the one that fits PYTHON
#
#   TORCH      which PyTorch to install; empty: none, and what needs it must say so
#   PIP_ARGS   more options for every pip install
set -eu

python=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
wheel=$(printf '%s\n' "$@" | grep -e "-$tag-$tag-") || {
    echo "no wheel of $tag among: $*" >&2
    exit 1
}
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"$python" -m venv "$venv"
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install -q ${PIP_ARGS:-} "$wheel" ${TORCH:-}
cd "$venv" # so that nothing of a checkout is found
"$venv/bin/python" "$here/installed.py"
