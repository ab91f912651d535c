"""SLURM's own daemons on emulated hosts run the page's recipes, and requeue a job with a dead rank, which goes on.

One host has slurmctld, two others a slurmd and an ssh daemon each. munge's key and all settings are made for the run, and
nothing outlives it. The record, benchmarks/results/slurm.json, has the last run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ssh_hosts

from laboratory import machine
from laboratory.cluster import guard, network
from laboratory.report import write

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "slurm.json"
PROGRAMS = (*ssh_hosts.PROGRAMS, "munged", "slurmctld", "slurmd", "sbatch", "scontrol")
LACKING = [program for program in PROGRAMS if not network.find(program)]
PATIENCE, TIMEOUT = 30, 180

# The recipes of the page: DDP, its lines for another start, and Horovod over gloo.
PAGE = (ROOT / "docs" / "clusters.md").read_text()
DDP, AGAIN, HOROVOD, _ = re.findall(r"^```sh\n(.*?)^```", PAGE.partition("## SLURM")[2].partition("\n## ")[0], re.M | re.S)

# The hosts share this machine's cores and its files. A requeued job waits until its credential has expired.
CONF = """\
ClusterName=gradcomp
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
NodeName=host1,host2 CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""

# The steps of a training that a rank's death interrupts after this checkpoint.
STEPS, EVERY, DIES_AFTER = 1500, 100, 300


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="SLURM's recipes were NOT tested: they need root")
@pytest.mark.skipif(bool(LACKING), reason=f"SLURM's recipes were NOT tested: {LACKING} missing, install slurm-wlm and munge")
def test_slurm_runs_the_recipes_and_requeues_a_job_that_lost_a_rank() -> None:
    pytest.importorskip("horovod.torch", reason="SLURM's recipes were NOT tested: Horovod is not installed")
    found = ssh_hosts.figures_of(__file__, 900)
    ddp, horovod, requeued = (found["jobs"][name] for name in ("ddp", "horovod", "requeued"))
    for job in (ddp, horovod):
        assert job["nodes"] == 2 and job["ranks"] == 4 and job["losses"][-1] < job["losses"][0], found
    assert ddp["losses"] == horovod["losses"], "a rank has another's pictures or number"
    assert requeued["restarts"] == 1 and requeued["goes_on_after"] >= DIES_AFTER, found
    assert requeued["sum"] == requeued["sum_uninterrupted"], "the requeued training ends elsewhere"
    write(RECORD, {"what": "slurm", **machine.origin("scripts/check --long"), **found})


def inside() -> int:
    """Make the hosts, start SLURM on them, run the recipes, and print their figures."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-slurm.") as name:
        folder = Path(name)
        hosts = network.build(3, "none")
        ssh_hosts.start_daemons(hosts, folder)
        cluster = Cluster(hosts, folder)
        try:
            cluster.start()
            jobs = {
                "ddp": trained(cluster.run(recipe(DDP, "examples/ddp.py"))),
                "horovod": trained(cluster.run(recipe(HOROVOD, "examples/stock_horovod.py"))),
                "requeued": requeued(cluster),
            }
        except BaseException:
            for log in sorted([*folder.glob("*.log"), *folder.glob("*.out")]):
                print(f"--- {log.name}:\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            raise
        print(json.dumps({"slurm": cluster.call("sinfo", "--version").split()[-1], "jobs": jobs}))
    return 0


def recipe(text: str, program: str) -> str:
    """Fill in a recipe: the program, the cores of these hosts, and an environment that the job inherits."""
    text = text.replace("train.py", program).replace(" --gpus-per-node=2", "").replace(". .venv/bin/activate\n", "")
    return re.sub(r"--cpus-per-task=\d+", "--cpus-per-task=1", text)


class Cluster:
    """SLURM on emulated hosts: the first has the controller, the others are nodes. Its files are in one folder."""

    def __init__(self, hosts: Sequence[network.Host], folder: Path):
        self.hosts, self.folder = hosts, folder
        home = folder / "home"  # horovodrun remembers there which hosts it has reached
        home.mkdir()
        self.environment = {**os.environ, **ssh_hosts.variables(), "HOME": str(home), "SLURM_CONF": f"{folder}/slurm.conf"}

    def start(self) -> None:
        """Start all daemons, and wait for the nodes."""
        folder = self.folder
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used, and not looked for: hosts have none
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.daemon(0, "munged", "--foreground", "--force", *(f"--{o}={folder}/munge.{file}" for o, file in files.items()))
        wait(lambda: (folder / "munge.socket").exists(), "munged has no socket")
        self.daemon(0, "slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for i in range(1, len(self.hosts)):
            (folder / self.hosts[i].name).mkdir()
            self.daemon(i, "slurmd", "-D", "-N", self.hosts[i].name, "-f", f"{folder}/slurm.conf")
        wait(lambda: self.call("sinfo", "-h", "-o", "%T", check=False).split() == ["idle"], "the nodes are not idle")

    def daemon(self, host: int, program: str, *arguments: str) -> None:
        """Start a daemon, which ends with this process's namespace."""
        output = (self.folder / f"{program}.{host}.out").open("w")
        started: Any = [str(network.find(program)), *arguments]
        subprocess.Popen(
            started, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=self.enter(host)
        )

    def enter(self, host: int) -> Callable[[], None]:
        """Return a function that moves a process to a host, into the checkout."""

        def entered() -> None:
            self.hosts[host].namespaces.enter()
            os.chdir(ROOT)

        return entered

    def call(self, *words: str, check: bool = True) -> str:
        """Call a program of SLURM on the first host. Return its output."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, preexec_fn=self.enter(0))
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def submit(self, text: str) -> str:
        """Submit a job. Return its number."""
        script = self.folder / "job.sh"
        script.write_text(text)
        return self.call("sbatch", "--parsable", f"--output={self.folder}/job-%j.out", str(script)).strip()

    def finish(self, job: str) -> dict[str, Any]:
        """Wait for a job. Return what SLURM shows of it, and its output."""
        shown: dict[str, str] = {}

        def ended() -> bool:
            shown.update(re.findall(r"(\w+)=(\S*)", self.call("scontrol", "show", "job", job)))
            return shown["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

        output = self.folder / f"job-{job}.out"
        wait(ended, f"job {job} does not end", TIMEOUT)
        said = output.read_text() if output.exists() else ""
        assert shown["JobState"] == "COMPLETED", f"{shown}\n{said[-6000:]}"
        return {"nodes": int(shown["NumNodes"]), "restarts": int(shown["Restarts"]), "said": said}

    def run(self, text: str) -> dict[str, Any]:
        """Submit a job and wait for it."""
        return self.finish(self.submit(text))


def wait(found: Callable[[], bool], wrong: str, seconds: float = PATIENCE) -> None:
    """Wait until something is found."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, wrong
        time.sleep(0.2)


def trained(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job's nodes, ranks and losses."""
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+) on rank 0", job["said"])]
    return {"nodes": job["nodes"], "ranks": int(re.findall(r"each of (\d+) ranks sends", job["said"])[0]), "losses": losses}


def requeued(cluster: Cluster) -> dict[str, Any]:
    """Kill a rank of a training on the second node. Return where it went on, and its end beside an uninterrupted one's."""
    options = f"--steps {STEPS} --every {EVERY}"
    folders = [cluster.folder / each for each in ("whole", "broken")]
    whole = f"torchrun --standalone --nproc-per-node 4 examples/resume.py {folders[0]} {options}"
    sums = [ending(cluster.call(*shlex.split(whole)))]
    first, rest = AGAIN.split("\n", 1)
    text = recipe(DDP, f"examples/resume.py {folders[1]} {options}").replace("\n. ", f"\n{first}\n. ")
    job = cluster.submit(text.replace("\nexport", f"\n{first}\nexport", 1) + rest)
    wait(lambda: (folders[1] / f"step-{DIES_AFTER:08}" / "0.pt").exists(), "the training has no checkpoint", TIMEOUT)
    os.kill(rank_on("host2", str(folders[1])), signal.SIGKILL)
    ended = cluster.finish(job)
    sums.append(ending(ended["said"]))
    after = int(re.findall(r"goes on after step (\d+)", ended["said"])[-1])
    return {"restarts": ended["restarts"], "goes_on_after": after, "sum": sums[1], "sum_uninterrupted": sums[0]}


def ending(said: str) -> str:
    """Return the sum of all weights at the end."""
    return str(re.findall(r"the sum of all weights is (\S+)", said)[-1])


def rank_on(node: str, argument: str) -> int:
    """Find the process of a rank with this argument on a node."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((process / name).read_text().split("\0") for name in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        if argument in words and f"SLURMD_NODENAME={node}" in variables and any(v.startswith("LOCAL_RANK=") for v in variables):
            return int(process.name)
    raise AssertionError(f"no rank on {node}")


if __name__ == "__main__":
    sys.dont_write_bytecode = True  # root leaves no files in the checkout
    sys.exit(guard.supervise(inside))
