#!/bin/sh
# What every image of this folder runs: installs a wheel of this package, and proves that it works.
#
#   docker/install.sh DIST              in the Python of an image that has PyTorch and the framework
#   docker/install.sh DIST vllm VENV    makes VENV with PyTorch, vLLM for CPUs and the tests' platform plug-in
#
#   DIST       the folder with wheels (`make wheels`); the one that fits the Python is taken
#   PYTHON     that Python; python3 by default
#   TORCH      for VENV: which PyTorch to install
#   PIP_ARGS   more options for every pip install
set -eu

dist=${1:?usage: install.sh DIST [vllm VENV]}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
release=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
tag=cp$(echo "$release" | tr -d .)
wheel=$(find "$(cd "$dist" && pwd)" -name "*-$tag-$tag-*.whl")
[ -n "$wheel" ] || {
    found=$(cd "$dist" && find . -name "*.whl" | sed 's|^\./||' | sort | tr '\n' ' ')
    echo "no wheel for $python, which is Python $release: run \`make wheels WHEELS=$release\` in the checkout." \
        "$dist has ${found:-none}" >&2
    exit 1
}

if [ "${2:-}" = vllm ]; then
    venv=${3:?usage: install.sh DIST vllm VENV}
    PYTHON=$python PRODUCT=$wheel "$here/../tests/serving/setup_vllm.sh" "$venv"
    # The package's own requirements; vLLM brings most of them.
    python=$venv/bin/python
else
    "$python" -c 'import torch' || {
        echo "missing: PyTorch in $python" >&2
        exit 1
    }
fi
# The image's PyTorch is built for its device: nothing may put another in its place.
version() { "$python" -c 'from importlib.metadata import version; print(version("torch"))'; }
before=$(version)
# shellcheck disable=SC2086
"$python" -m pip install -q ${PIP_ARGS:-} "$wheel"
[ "$(version)" = "$before" ] || {
    echo "torch $before was replaced by $(version)" >&2
    exit 1
}
"$python" -c "from liteattention_rocm_cli import main; main()" doctor --no-time
