# gradcomp and Horovod on the CPU. The container runs the demo, or any command (horovodrun -np 2 python train.py).
#
#   docker build -f docker/cpu.Dockerfile -t gradcomp-cpu .
#   docker run gradcomp-cpu
#
# buildah replaces the Docker engine, as root: docs/decisions/building.md has the commands. Horovod crashes where the container's
# host name does not resolve. Docker makes it resolve; buildah needs --hostname localhost.
#
# BASE is any Debian or Ubuntu with Python 3.10 or newer; a base made by debootstrap will do. TORCH holds pip's arguments. The CPU
# build is a fifth of the default's size (TORCH="torch==2.13.0 --index-url <an index of CPU builds>"). Python 3.10 needs
# NUMPY="numpy==2.2.6". pip's own settings
# (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are build arguments, and none of them stays in the image's environment. Mount /etc/pip.conf
# for a secret one.
ARG BASE=debian:bookworm-slim

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
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
# A layer of its own: torch takes long to install and hardly ever changes.
RUN python3 -m venv /opt/venv && pip install --no-cache-dir ${TORCH} ${NUMPY}
WORKDIR /opt/gradcomp
COPY scripts/lib.sh scripts/setup scripts/
COPY scripts/setting_up scripts/setting_up
RUN scripts/setup --horovod && rm -rf build
COPY . .
RUN GRADCOMP_CUDA=OFF scripts/setup --install && rm -rf build ./*.egg-info ~/.cache

FROM ${BASE} AS run
# GRADCOMP_PYTHON tells the scripts that this environment is complete: they build nothing.
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH GRADCOMP_PYTHON=/opt/venv/bin/python
# The wheels need these libraries from the system.
RUN apt-get update && apt-get install -y --no-install-recommends python3 libgomp1 libstdc++6 \
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
