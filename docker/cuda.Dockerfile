# gradcomp and Horovod for NVIDIA GPUs, with NCCL: the stages of cpu.Dockerfile on CUDA bases. Not built in CI.
#
#   docker build -f docker/cuda.Dockerfile -t gradcomp-cuda .
#   docker run --gpus all --ipc=host gradcomp-cuda     # with InfiniBand: --device=/dev/infiniband --ulimit memlock=-1
#
# NCCL shares memory between GPUs: without --ipc=host a container has 64 MB. InfiniBand needs its devices, and locked memory.
#
# BASE needs nvcc and NCCL's headers. Its CUDA major version must be the one TORCH was built for. RUN_BASE needs no CUDA: torch's
# packages bring their own. NCCL and the CUDA runtime are linked into Horovod, the runtime into gradcomp.
ARG BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG RUN_BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
      ca-certificates cmake g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ARG PIP_CERT
ARG TORCH="torch==2.13.0"
ARG NUMPY="numpy==2.4.6"
# The GPUs to build for, in CMake's form ("90" or "80-real;90"). Empty means every GPU since Turing.
ARG GRADCOMP_CUDA_ARCHS=
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:/usr/local/cuda/bin:$PATH
# A layer of its own: torch takes long to install and hardly ever changes.
RUN python3 -m venv /opt/venv && pip install --no-cache-dir ${TORCH} ${NUMPY}
WORKDIR /opt/gradcomp
COPY scripts/lib.sh scripts/setup scripts/
COPY scripts/setting_up scripts/setting_up
# Horovod takes numbers with commas. An empty list would stop its build, so the variable is then left unset. It is the same in
# both calls of scripts/setup, which otherwise builds Horovod again.
RUN archs="$(printf %s "${GRADCOMP_CUDA_ARCHS}" | tr -d 'a-z-' | tr ';' ',')" \
    && env ${archs:+HOROVOD_BUILD_CUDA_CC_LIST="$archs"} HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=/usr/local/cuda \
      scripts/setup --horovod && rm -rf build
COPY . .
RUN archs="$(printf %s "${GRADCOMP_CUDA_ARCHS}" | tr -d 'a-z-' | tr ';' ',')" \
    && env ${archs:+HOROVOD_BUILD_CUDA_CC_LIST="$archs"} HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME=/usr/local/cuda \
      GRADCOMP_CUDA=ON GRADCOMP_CUDA_ARCHS="${GRADCOMP_CUDA_ARCHS}" \
      scripts/setup --install && rm -rf build ./*.egg-info ~/.cache

FROM ${RUN_BASE} AS run
# GRADCOMP_PYTHON tells the scripts that this environment is complete: they build nothing.
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH GRADCOMP_PYTHON=/opt/venv/bin/python
# The wheels need the first three. By the others NCCL uses InfiniBand; without them it falls back to TCP and says nothing.
RUN apt-get update && apt-get install -y --no-install-recommends \
      python3 libgomp1 libstdc++6 ibverbs-providers libibverbs1 \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
COPY --from=build /opt/gradcomp/scripts /opt/gradcomp/scripts
COPY --from=build /opt/venv /opt/venv
# Nothing at run time needs root. USER is a number, as Kubernetes' runAsNonRoot asks for. Any other user may run the image, too
# (docker run --user): everybody may write to HOME and /work, and torch asks for USER where the user has no name.
RUN useradd --uid 10001 --no-create-home --home-dir /home/gradcomp gradcomp && install -d -m 1777 /home/gradcomp /work
ENV HOME=/home/gradcomp USER=gradcomp
USER 10001
WORKDIR /work
CMD ["/opt/gradcomp/scripts/demo"]
