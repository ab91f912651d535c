"""Runs the cluster so that nothing outlives the script, however either ends.

The cluster runs as the first process of a process-id namespace of its own. When that process ends, the kernel kills all
that was started in the namespace, however deep or detached, and with the last process go the network namespaces and mounts:
they have no names on disk, so there is nothing to clean up later. The first process in turn dies with the script.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from . import kernel

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 5.0  # seconds from TERM to KILL for the ranks
PATIENCE = GRACE + 3  # seconds before the script kills a cluster that does not end when asked


def say(sentence: str) -> None:
    print(f"cluster: {sentence}", file=sys.stderr, flush=True)


def supervise(inside: Callable[[], int]) -> int:
    """Runs inside() as the first process of a new process-id namespace and returns the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # none may arrive between the fork and the handlers
    lifeline, held = os.pipe()
    kernel.unshare(kernel.NEW_PIDS)
    child = os.fork()
    if child == 0:
        os.close(held)
        os._exit(_first_process(lifeline, inside))
    os.close(lifeline)
    asked = _forward_signals(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if asked:
        say(f"ended by {signal.Signals(asked[0]).name}")
        return 128 + asked[0]
    if code < 0:
        say(f"the process that holds the cluster was killed by {signal.Signals(-code).name}")
    return code if code >= 0 else 128 - code


def _forward_signals(child: int) -> list[int]:
    """The first signal asks the cluster to end, a second one or the end of patience kills it; returns the list of what came."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL if asked else signal.SIGTERM)
        if not asked:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        asked.append(number)

    signal.signal(signal.SIGALRM, forward)
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish stands
            signal.signal(number, forward)
    return asked


def _first_process(lifeline: int, inside: Callable[[], int]) -> int:
    kernel.die_with_parent()
    if select.select([lifeline], [], [], 0)[0]:  # at its end: the script died before the line above
        return 1
    os.setsid()  # a terminal's Ctrl-C goes to the script alone, which then ends the ranks in order
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)  # the kernel drops these for a first process without a handler
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    try:
        return inside()
    except kernel.Refused as error:
        say(str(error))
    except BrokenPipeError:
        pass  # whoever read the output went away, so there is nobody to tell
    except BaseException:
        traceback.print_exc()
    return 1
