"""The report of gradcomp doctor: the installation, the build, the machine, and their problems."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from gradcomp import _version
from gradcomp.native import cuda_versions, extension

# The version of torch that the tests run with.
TESTED_TORCH = "2.13"
# The first number of the least capability of a GPU: Volta's.
LEAST_CAPABILITY = 7


class Finding(NamedTuple):
    """One line of the report. advice: the remedy of a problem; empty if there is none."""

    subject: str
    text: str
    advice: str = ""


def findings() -> list[Finding]:
    """Check everything that gradcomp depends on."""
    checks = (_versions, _extension, _gpus, _horovod, _distributed, host_name, _threads)
    return [finding for check in checks for finding in check()]


def report(found: Sequence[Finding] | None = None) -> str:
    """Write the findings, by default those of now, and then the problems among them."""
    found = findings() if found is None else found
    lines = [f"{'!!' if each.advice else 'ok'}  {each.subject:12} {each.text}" for each in found]
    problems = [each for each in found if each.advice]
    lines += ["", "Problems:" if problems else "No problems."]
    lines += [f"  {each.subject}: {each.advice}" for each in problems]
    return "\n".join(lines)


def _versions() -> Iterator[Finding]:
    where = Path(__file__).resolve().parent
    yield Finding("gradcomp", f"{_version.VERSION}, from {where}")
    yield Finding("Python", f"{platform.python_version()}, {sys.executable}")
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    tested = "" if torch.__version__.startswith(TESTED_TORCH) else f" (tests run with {TESTED_TORCH})"
    yield Finding("torch", f"{torch.__version__}, {built}{tested}")


def _extension() -> Iterator[Finding]:
    if isinstance(extension.native, extension.Unloaded):
        yield Finding("extension", f"not loaded: {extension.native.reason}", extension.native.remedy)
        return
    own, driver, has, advice = extension.CUDA_VERSION, 0, "without CUDA kernels", ""
    if extension.BUILT_WITH_CUDA:
        driver = cuda_versions.driver_version()
        has = f"with kernels of CUDA {cuda_versions.in_words(own)}"
        has += f", under a driver for {cuda_versions.in_words(driver)}" if driver else ""
        advice = cuda_versions.misfit(own, driver, torch.version.cuda)
    yield Finding("extension", f"{Path(extension.native.__file__).name}, {has}", advice)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use: everything runs on the CPU")
        return
    advice = ""
    if not extension.BUILT_WITH_CUDA:
        advice = "this build has no CUDA kernels, and a CUDA tensor raises an error; install gradcomp with GRADCOMP_CUDA=ON"
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        is_old = properties.major < LEAST_CAPABILITY
        old = f"the kernels need capability {LEAST_CAPABILITY}.0; use another GPU" if is_old else ""
        yield Finding("GPU", f"{index}: {properties.name}, capability {properties.major}.{properties.minor}", old or advice)
    if any(not torch.cuda.can_device_access_peer(a, b) for a in range(count) for b in range(count) if a != b):
        # Elsewhere an all-reduce went from 1.9 to 12.5 GB/s.
        faster = "with NCCL_SHM_USE_CUDA_MEMCPY=1 that may be several times as fast: try it before you compress between them"
        yield Finding("GPU links", f"some GPUs do not reach each other, and NCCL goes through main memory; {faster}")


def _horovod() -> Iterator[Finding]:
    try:
        from gradcomp.networks import horovod as network
    except Exception as error:  # a broken installation raises anything: an OSError of a library, for one
        if isinstance(error, ModuleNotFoundError) and error.name == "horovod":
            yield Finding("Horovod", "not installed: gradcomp.ddp and the simulator work, gradcomp.horovod does not")
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
            yield Finding("Horovod", f"broken: {reason}", "it cannot be imported; install it again beside this torch")
        return
    controllers, operations = network.built_with()
    text = f"{network.version()}, starts ranks by {' and '.join(controllers) or 'nothing'}, reduces by {', '.join(operations)}"
    from gradcomp.horovod.optimizer import carrier_free

    advice = ""
    if not carrier_free():
        advice = "its optimizer is untested (tested: Horovod 0.28.1); gradients take the slower carrier route"
    elif torch.cuda.is_available() and "NCCL" not in operations:
        advice = "it was built without NCCL: CUDA tensors travel through main memory; build it with HOROVOD_GPU_OPERATIONS=NCCL"
    yield Finding("Horovod", text, advice)


def _distributed() -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding("DDP", "torch has no torch.distributed", "gradcomp.ddp cannot be used; install a torch that has it")
        return
    from gradcomp.networks.torch import backends

    yield Finding("DDP", f"backends {', '.join(backends()) or 'none'}")
    try:
        from gradcomp import fsdp
    except ImportError as error:
        yield Finding("FSDP2", f"not served: {error}")
    else:
        yield Finding("FSDP2", f"{fsdp.__name__} serves fully_shard() and replicate()")


def host_name() -> Iterator[Finding]:
    """Check whether the host name resolves. scripts/demo says the same words."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        advice = (
            "horovodrun and hvd.init() crash and torchrun waits for a minute or more where it does not resolve; "
            f"as root, add this line to /etc/hosts: 127.0.1.1 {name}"
        )
        yield Finding("host name", f"{name}, which does not resolve", advice)
    else:
        yield Finding("host name", name)


def _threads() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    set_by = "" if "OMP_NUM_THREADS" in os.environ else "; horovodrun sets none for ranks that share them"
    text = f"{torch.get_num_threads()} of torch in each rank, {cores} cores (OMP_NUM_THREADS sets them{set_by})"
    yield Finding("threads", text)
