#!/bin/sh
# Makes the virtual environment in which SGLang's own runtime serves on a machine without a GPU.
#
#   tests/serving/setup_sglang.sh VENV [diffusion]
#
#   diffusion   also install what `sglang generate` needs
#   PYTHON      the Python (3.11 or newer) to make it with
#   TORCH       which PyTorch to install
#   PIP_ARGS    more options for every pip install
#   PRODUCT     what to install of this project: the checkout by default, or a wheel of it
#
# SGLang's own requirements are CUDA builds of everything (11 GB). It runs without them, on the
# PyTorch below, if it and torchvision are installed without their requirements. sglang_cpu_platform
# is what makes it accept a CPU: see there. smollm2.py writes a published language model into the
# environment. Running it again brings an environment up to date.
set -eu

venv=${1:?usage: setup_sglang.sh VENV [diffusion]}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck disable=SC2086
install() { "$venv/bin/python" -m pip install -q ${PIP_ARGS:-} "$@"; }

[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
install "${TORCH:-torch==2.13.0}"
install -c "$here/sglang-constraints.txt" -r "$here/sglang-requirements.txt"
install --no-deps sglang==0.5.23 torchvision==0.28.0 -r "$here/smollm2-requirements.txt"
install --no-deps --force-reinstall "$here/sglang_cpu_platform"
if [ "${2:-}" = diffusion ]; then
    install -c "$here/sglang-constraints.txt" -r "$here/sglang-diffusion-requirements.txt"
    install --no-deps cache-dit==1.5.1
    install --no-deps --force-reinstall "$here/sglang_diffusion_cpu"
fi
install --no-deps --force-reinstall "${PRODUCT:-$root}"
PYTHONPATH="$root" "$venv/bin/python" -m tests.serving.smollm2
