# vLLM's image for ROCm with this package. Not run: nobody here has an MI300X.
#
#   make wheels WHEELS=3.12    # the Python of the base image
#   docker build -f docker/vllm-rocm.Dockerfile -t liteattention-vllm-rocm .
#   docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host -p 8000:8000 \
#       liteattention-vllm-rocm Qwen/Qwen3-8B
#
# vLLM 0.32 or newer; name a tag to have the same image again.
ARG BASE=vllm/vllm-openai-rocm:latest
# hadolint ignore=DL3006
FROM ${BASE}

COPY docker/install.sh /opt/liteattention-rocm/docker/install.sh
COPY dist/*.whl /opt/liteattention-rocm/dist/
RUN /opt/liteattention-rocm/docker/install.sh /opt/liteattention-rocm/dist

EXPOSE 8000
ENTRYPOINT ["vllm", "serve", "--attention-backend", "CUSTOM"]
CMD ["Qwen/Qwen3-8B"]
