# Adds ssh to an image of gradcomp, for launchers that start ranks through it: horovodrun -H, and Kubernetes' MPI operator.
#
#   docker build -f docker/cpu.Dockerfile -t gradcomp-cpu .
#   docker build -f docker/ssh.Dockerfile -t gradcomp-cpu-ssh .          # --build-arg BASE=gradcomp-cuda for GPUs
#
# The container is a host that waits for its ranks. sshd runs as the image's user, at port 2222, and lets in that user alone, with
# the key of /home/gradcomp/.ssh. The image holds no key: mount id_rsa and authorized_keys there, as the MPI operator does.
ARG BASE=gradcomp-cpu

FROM ${BASE}
USER 0
# The package makes host keys, which would be the same in every container: they go.
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /etc/ssh/ssh_host_*
COPY docker/ssh /etc/gradcomp-ssh
# The client's settings hold for every user of the image. sshd as root, which nobody needs, would ask for /run/sshd.
RUN cp /etc/gradcomp-ssh/client /etc/ssh/ssh_config.d/gradcomp.conf
USER 10001
WORKDIR /work
CMD ["/usr/sbin/sshd", "-De", "-f", "/etc/gradcomp-ssh/daemon"]
