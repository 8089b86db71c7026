# SGLang's image for ROCm with this package: video and language models. Not run: nobody here has an MI300X.
#
#   make wheels WHEELS="3.10 3.12"    # the Pythons of its images
#   docker build -f docker/sglang-rocm.Dockerfile --build-arg BASE=lmsysorg/sglang:TAG \
#       -t liteattention-sglang-rocm .
#   docker run --device /dev/kfd --device /dev/dri --group-add video --ipc host -p 30000:30000 \
#       liteattention-sglang-rocm --model-path Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
#       --attention-backend-config '{"budget": 0.05, "warmup_steps": 4}'
#
# TAG: SGLang 0.5.23 or newer, for the MI300X (-mi30x). Take one of ROCm 7.2.4 (-rocm724-mi30x) or 10 (-rocm10-mi30x,
# -rocm1000-mi30x): by SGLang's docker/rocm.Dockerfile these have Python 3.12 and torch 2.11. Those of ROCm 7.2.0
# (-rocm720-mi30x) have Python 3.10 and torch 2.9.1. Images with a date in their tags are in lmsysorg/sglang-rocm.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}

COPY docker/install.sh /opt/liteattention-rocm/docker/install.sh
COPY dist/*.whl /opt/liteattention-rocm/dist/
RUN /opt/liteattention-rocm/docker/install.sh /opt/liteattention-rocm/dist

EXPOSE 30000
ENTRYPOINT ["sglang", "serve", "--attention-backend", "liteattention_rocm", "--host", "0.0.0.0"]
CMD ["--model-path", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"]
