"""Starts ranks by forking a process that has imported everything once, and watches them to their end.

Importing torch and Horovod takes seconds; a fork takes milliseconds. The server itself never starts Horovod, computes nothing
and has one thread, so that every rank begins as a new process does. Orders come through its standard input.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# The variable that holds the folder of the ranks' reports.
FOLDER = "GRADCOMP_TEST_REPORTS"
# Seconds that the other ranks have to say why, once a rank failed.
GRACE = 2


class Order(NamedTuple):
    """A program for some ranks: a function of a file, and its arguments."""

    file: str
    function: str
    arguments: tuple[Any, ...]
    # Each rank's environment.
    environments: list[dict[str, str]]
    # The exit codes that the ranks are to end with.
    codes: list[int]
    # Seconds until all ranks must have ended.
    seconds: float


class Outcome(NamedTuple):
    """The end of an order: the trouble, or an empty text, and every rank's exit code."""

    trouble: str
    codes: list[int]


def run(file: str, function: str, arguments: Sequence[Any]) -> None:
    """Run a function as a rank's program, and report the result."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    warnings.simplefilter("error")
    facts = getattr(module, function)(*arguments)
    if facts is not None:
        report(facts)
    leave()


def report(facts: Any) -> None:
    """Hand this rank's findings to the test."""
    (Path(os.environ[FOLDER]) / f"{os.environ['HOROVOD_RANK']}.pickle").write_bytes(pickle.dumps(facts))


def end_together(seconds: float = 30) -> NoReturn:
    """End once all ranks have reported, for one rank's end could be another's error. End without Horovod and torch's group.

    seconds: after these, end all the same.
    """
    reports = [Path(os.environ[FOLDER]) / f"{rank}.pickle" for rank in range(int(os.environ["HOROVOD_SIZE"]))]
    until = time.monotonic() + seconds
    while not all(report.exists() for report in reports) and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(0)  # operations that never end are under way


def leave() -> None:
    """End Horovod, or torch's group, once all ranks are done: a rank that ends early ends them for the others."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        horovod.barrier()
        horovod.shutdown()
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def serve() -> None:
    """Carry out orders until the test process ends."""
    # Signals to the group go to this process, too. The end of the test process, which it notices as EOF, ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import_everything()
    answers = os.fdopen(os.dup(1), "wb")
    orders = os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)
    while True:
        try:
            order = pickle.load(orders)
        except EOFError:
            return
        ranks = [fork(order, rank) for rank in range(len(order.environments))]
        pickle.dump(watch(ranks, order.codes, time.monotonic() + order.seconds, orders.fileno()), answers)
        answers.flush()


def import_everything() -> None:
    """Import all that programs import."""
    import hypothesis
    import pytest
    import torch._dynamo  # the first optimizer of a process imports it, in two seconds
    import torch.distributed
    import torch.nn.parallel

    import gradcomp.ddp

    assert all((gradcomp, hypothesis, pytest, torch))
    with suppress(ModuleNotFoundError):  # ranks under torch need no Horovod
        import horovod.torch

        import gradcomp.horovod

        assert not horovod.torch.is_initialized()


def fork(order: Order, rank: int) -> int:
    """Start a rank in a session of its own; return its process id."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            output = os.open(Path(order.environments[rank][FOLDER]) / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for own, fd in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(own, fd)
            os.closerange(3, 256)
            os.environ.clear()
            os.environ.update(order.environments[rank])
            run(order.file, order.function, order.arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return process


def watch(processes: Sequence[int], codes: Sequence[int], end: float, orders: int | None = None) -> Outcome:
    """Wait for all processes; say what went wrong, and leave none behind. They end with the test process."""
    trouble = ""
    while None in (ended := [code_of(process) for process in processes]):
        wrong = [i for i, code in enumerate(ended) if code not in (None, codes[i])]
        if wrong and not trouble:
            trouble = f"{wrong} failed"
            end = min(end, time.monotonic() + GRACE)
        alone = orders is not None and bool(select.select([orders], [], [], 0)[0])
        if alone or time.monotonic() > end:
            hanging = [i for i, code in enumerate(ended) if code is None]
            trouble = trouble or f"{hanging} hang"
            for number in (signal.SIGABRT, signal.SIGKILL):
                for i in hanging:
                    send(processes[i], number)
                time.sleep(0.5)
        time.sleep(0.01)
    for process in processes:
        send(process, signal.SIGKILL)  # processes that the rank started
    found = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    wrong = [i for i, code in enumerate(found) if code != codes[i]]
    return Outcome(trouble or (f"{wrong} failed" if wrong else ""), found)


def code_of(process: int) -> int | None:
    """Return a process's exit code without collecting it: until then its number, and its group's, stay its own."""
    found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def send(process: int, number: int) -> None:
    """Signal a process's group, if there still is one."""
    with suppress(ProcessLookupError):
        os.killpg(process, number)
