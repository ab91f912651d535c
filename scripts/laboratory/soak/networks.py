"""The two networks of a soak: how their ranks are started, and how their number changes in mid-training."""

from __future__ import annotations

import sys
from collections.abc import Callable

from laboratory.soak.driver import Driver

# Names of this machine, each of which Horovod takes for a host. It never returns to one where a process died.
HOSTS = ["localhost", "127.0.0.1", "127.1", "127.0.1"]
LATER_HOSTS = ["0x7f.1", "0x7f.0.1"]

# The shares of a soak after which its ranks change. Horovod: one is killed, one joins, one leaves, one joins.
KILLED, JOINED, LEFT, JOINED_AGAIN = 0.2, 0.35, 0.5, 0.65
# DDP: one is killed, and all start again; then one less; then all.
KILLED_IN_DDP, ONE_LESS, ALL_AGAIN = 0.2, 0.4, 0.6
MOST_RESTARTS = 3


def horovod(driver: Driver, count: int) -> None:
    """Run a soak under horovodrun, in its elastic mode."""
    hosts = HOSTS[:count]
    _offer(driver, hosts)
    script = driver.folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat '{driver.folder}/hosts'\n")
    script.chmod(0o755)
    options = ["--min-np", str(count - 1), "--max-np", str(count), "--host-discovery-script", str(script)]
    options += ["--network-interface", "lo", "--start-timeout", "120", "--elastic-timeout", "120"]
    job = [sys.executable, "-m", "laboratory.soak.horovod_job", *_arguments(driver)]
    driver.start([sys.executable, "-m", "horovod.runner.launch", "-np", str(count), *options, *job], count)

    _after(KILLED, driver, count)
    hosts.remove(driver.kill_one())
    _after(JOINED, driver, count - 1)
    hosts.append(LATER_HOSTS[0])
    _offer(driver, hosts, "join")
    _after(LEFT, driver, count)
    hosts.pop(driver.random.randrange(count))
    _offer(driver, hosts, "leave")
    _after(JOINED_AGAIN, driver, count - 1)
    hosts.append(LATER_HOSTS[1])
    _offer(driver, hosts, "join")
    _after(1.0, driver, count)
    driver.end_ranks()


def ddp(driver: Driver, count: int) -> None:
    """Run a soak under torchrun, which starts the ranks again: after a death, and with other numbers of them."""
    _launch(driver, count)
    _after(KILLED_IN_DDP, driver, count)
    driver.kill_one()
    _after(ONE_LESS, driver, count)
    driver.end_ranks()
    _launch(driver, count - 1)
    _after(ALL_AGAIN, driver, count - 1)
    driver.end_ranks()
    _launch(driver, count)
    _after(1.0, driver, count)
    driver.end_ranks()


NETWORKS: dict[str, Callable[[Driver, int], None]] = {"horovod": horovod, "ddp": ddp}


def most_ranks() -> int:
    """Return how many ranks a soak can have."""
    return len(HOSTS)


def _launch(driver: Driver, count: int) -> None:
    """Start torchrun with the job's ranks."""
    driver.note(f"launch of {count} ranks")
    options = [f"--nproc-per-node={count}", f"--max-restarts={MOST_RESTARTS}", "--rdzv-backend=c10d"]
    job = ["-m", "laboratory.soak.ddp_job", *_arguments(driver)]
    # Otherwise torch's own store keeps the dead ranks' addresses, and gloo's restarted ranks call those.
    store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-endpoint=localhost:0", *job]
    driver.start(words, count, **store)


def _after(share: float, driver: Driver, count: int) -> None:
    """Wait until this share of the soak is over, and so many ranks have logged steps."""
    trained = driver.trained(count)
    driver.run_until(lambda: driver.share >= share and trained(), f"{count} ranks were {share:.0%} through")


def _arguments(driver: Driver) -> list[str]:
    return [str(driver.folder), f"--seed={driver.seed}", f"--steps={driver.steps}"]


def _offer(driver: Driver, hosts: list[str], kind: str = "start") -> None:
    """Let Horovod find these hosts, each for one rank."""
    driver.note(kind)
    new = driver.folder / "hosts.new"
    new.write_text("".join(f"{host}:1\n" for host in hosts))
    new.replace(driver.folder / "hosts")
