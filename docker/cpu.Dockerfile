# gradcomp and Horovod on the CPU: the container runs the demo, or any command (horovodrun -np 2 python train.py).
#
#   docker build -f docker/cpu.Dockerfile -t gradcomp-cpu .
#   docker run gradcomp-cpu
#
# Where there is no Docker engine, as root: buildah --isolation chroot bud -f docker/cpu.Dockerfile -t gradcomp-cpu . ; then
# c=$(buildah from gradcomp-cpu) and buildah run --isolation chroot --hostname localhost "$c" -- scripts/demo (the container's host
# name must resolve: Horovod crashes where it does not, and outside Docker nothing sees to it). A base made by debootstrap will do.
#
# BASE is any Debian or Ubuntu with Python 3.10 or newer. TORCH is what pip is given; the CPU build is a fifth of the default's size
# (TORCH="torch==2.13.0 --index-url <an index of CPU builds>"). pip's own settings (PIP_INDEX_URL, PIP_FIND_LINKS, ...) are taken as
# build arguments; none of them stays in the image's environment. One that is secret is better mounted as /etc/pip.conf.
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
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
# A layer of its own for what takes long and hardly ever changes.
RUN python3 -m venv /opt/venv && pip install --no-cache-dir ${TORCH} numpy
WORKDIR /opt/gradcomp
COPY scripts/lib.sh scripts/setup scripts/
RUN scripts/setup --horovod && rm -rf build
COPY . .
RUN GRADCOMP_CUDA=OFF scripts/setup --install && rm -rf build ./*.egg-info ~/.cache

FROM ${BASE} AS run
# GRADCOMP_PYTHON tells the scripts that this environment is complete: they build nothing.
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH GRADCOMP_PYTHON=/opt/venv/bin/python
WORKDIR /opt/gradcomp
CMD ["scripts/demo"]
# The libraries are what the wheels leave to the system.
RUN apt-get update && apt-get install -y --no-install-recommends python3 libgomp1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/gradcomp/scripts /opt/gradcomp/scripts
COPY --from=build /opt/venv /opt/venv
