"""The files for containers on several hosts: their parts fit each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="the files for containers were NOT read: PyYAML is not installed")

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"


def read(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def user(name: str) -> str:
    return re.findall(r"^USER (\S+)$", (DOCKER / name).read_text(), re.MULTILINE)[-1]


@pytest.fixture
def job() -> Any:
    return read("mpijob.yaml")


def containers(job: Any) -> dict[str, Any]:
    return {role: each["template"]["spec"]["containers"][0] for role, each in job["spec"]["mpiReplicaSpecs"].items()}


def test_the_launcher_starts_as_many_ranks_as_there_are_slots(job: Any) -> None:
    launcher = containers(job)["Launcher"]
    words = launcher["command"] + launcher["args"]
    assert words[:2] == ["horovodrun", "-np"] and words[3:5] == ["--hostfile", "/etc/mpi/hostfile"]
    assert int(words[2]) == job["spec"]["slotsPerWorker"] * job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert job["spec"]["mpiImplementation"] == "OpenMPI", "the list of hosts has another form that horovodrun does not read"


def test_the_job_runs_as_the_images_user_with_the_images_daemon(job: Any) -> None:
    for replica in job["spec"]["mpiReplicaSpecs"].values():
        assert str(replica["template"]["spec"]["securityContext"]["runAsUser"]) == user("ssh.Dockerfile")
    worker = containers(job)["Worker"]
    (command,) = re.findall(r"^CMD (\[.+\])$", (DOCKER / "ssh.Dockerfile").read_text(), re.MULTILINE)
    assert worker["command"] + worker["args"] == yaml.safe_load(command)
    lines = (DOCKER / "ssh" / "daemon").read_text().splitlines()
    daemon = dict(line.split(maxsplit=1) for line in lines if not line.startswith("#"))
    assert worker["readinessProbe"]["tcpSocket"]["port"] == int(daemon["Port"])
    assert re.search(rf"^  Port {daemon['Port']}$", (DOCKER / "ssh" / "client").read_text(), re.MULTILINE)
    mounted = job["spec"]["sshAuthMountPath"]
    assert (daemon["HostKey"], daemon["AuthorizedKeysFile"]) == (f"{mounted}/id_rsa", f"{mounted}/authorized_keys")
    assert daemon["PasswordAuthentication"] == daemon["KbdInteractiveAuthentication"] == "no"


def test_the_job_asks_for_a_gpu_a_slot_and_for_shared_memory_once_its_comments_are_taken() -> None:
    text = re.sub(r"^( *)# GPU ", r"\1", (DOCKER / "mpijob.yaml").read_text(), flags=re.MULTILINE)
    spec = yaml.safe_load(text)["spec"]
    pod = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == spec["slotsPerWorker"]
    (mount,), (volume,) = worker["volumeMounts"], pod["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/dev/shm"} and volume["emptyDir"] == {"medium": "Memory"}


@pytest.mark.parametrize(
    ("given", "list_"), [("", ""), ("native", ""), ("90", "90"), ("80-real;90a", "80,90"), ("75-virtual;86", "75,86")]
)
def test_horovod_is_built_for_the_gpus_of_the_extension(given: str, list_: str) -> None:
    text = (DOCKER / "cuda.Dockerfile").read_text()
    commands = re.findall(r"^RUN (archs=(?:.*\\\n)*.*)$", text, re.MULTILINE)
    found = []
    for command in commands:
        said = subprocess.run(
            ["sh", "-c", re.sub(r"scripts/setup .*", "env", command)],
            env={"PATH": os.environ["PATH"], "GRADCOMP_CUDA_ARCHS": given},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        found.append({line for line in said.splitlines() if line.startswith("HOROVOD_")})
    wanted = {"HOROVOD_GPU_OPERATIONS=NCCL", "HOROVOD_CUDA_HOME=/usr/local/cuda"}
    assert found == [wanted | ({f"HOROVOD_BUILD_CUDA_CC_LIST={list_}"} if list_ else set())] * 2, "Horovod would be built twice"


def test_ssh_is_added_to_the_images_as_their_user() -> None:
    assert user("ssh.Dockerfile") == user("cpu.Dockerfile") == user("cuda.Dockerfile")
    text = (DOCKER / "ssh.Dockerfile").read_text()
    assert "/etc/ssh/ssh_host_*" in text, "host keys would be the same in every container"
    (folder,) = re.findall(r"^COPY (\S+) /etc/gradcomp-ssh$", text, re.MULTILINE)
    assert {path.name for path in (ROOT / folder).iterdir()} == {"client", "daemon"}


def test_both_containers_of_compose_run_one_command_and_meet_at_the_first() -> None:
    found = read("compose.yaml")
    assert set(found) == {"name", "services", "x-node"} and set(found["services"]) == {"node0", "node1"}
    for name, service in found["services"].items():
        assert service["hostname"] == name
        assert service["command"] == found["x-node"]["command"]
    words = found["x-node"]["command"]
    assert words[0] == "torchrun" and f"--nnodes={len(found['services'])}" in words
    assert "--rdzv-endpoint=node0:29500" in words
    source, target, mode = found["x-node"]["volumes"][0].split(":")
    program = DOCKER / source / Path(words[-1]).relative_to(target)
    assert program.resolve() == ROOT / "examples" / "ddp.py" and program.exists() and mode == "ro"


def test_images_that_are_named_are_those_of_the_dockerfiles_heads() -> None:
    built = {
        re.findall(r"^#   docker build -f docker/(\S+) -t (\S+) \.", path.read_text(), re.MULTILINE)[-1]
        for path in DOCKER.glob("*.Dockerfile")
    }
    images = {image for _, image in built}
    assert {file for file, _ in built} == {path.name for path in DOCKER.glob("*.Dockerfile")}
    assert read("compose.yaml")["x-node"]["image"] in images
    assert {each["image"].rpartition("/")[2] for each in containers(read("mpijob.yaml")).values()} <= images
