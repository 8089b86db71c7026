# vLLM on a CPU with this package, and a small model of random weights: to try, without any GPU.
# Its steps run in `make test-quickstart`, in a clean Debian; the image itself has not been built here.
#
#   make wheels WHEELS=3.11
#   docker build -f docker/cpu.Dockerfile -t liteattention-cpu .
#   docker run -p 8000:8000 liteattention-cpu
#
# With an index of PyTorch built for CPUs, --build-arg PIP_ARGS="--extra-index-url URL" saves gigabytes.
FROM python:3.11-slim-bookworm

ARG PIP_ARGS=""
ARG TORCH="torch==2.13.0"

# vLLM needs libnuma and, through PyTorch, a compiler; this package neither. curl: requests from inside.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/liteattention-rocm
COPY docker/install.sh docker/
COPY tests/serving tests/serving
COPY dist/*.whl dist/
RUN docker/install.sh dist vllm .venv-vllm \
    && .venv-vllm/bin/python tests/serving/models.py out/models llama-d64

ENV PATH=/opt/liteattention-rocm/.venv-vllm/bin:$PATH VLLM_CPU_CI_ENV=1
EXPOSE 8000
ENTRYPOINT ["vllm", "serve", "--attention-backend", "CUSTOM"]
CMD ["out/models/llama-d64", "--dtype", "float32", "--max-model-len", "2048", \
     "--kv-cache-memory-bytes", "201326592", "--enforce-eager"]
