"""The guard: nothing of the cluster outlives the script, however either ends.

The cluster runs as the first process of its own process-id namespace. When that process ends, the kernel kills every process of
the namespace, however deep or detached. Network namespaces and mounts end with the last process: they have no names on disk.
Nothing is left to clean up. The first process dies with the script.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from laboratory.cluster import kernel

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds from TERM to KILL for the ranks.
GRACE = 5.0

# Seconds before the script kills a cluster that was asked to end.
PATIENCE = GRACE + 3


def say(sentence: str) -> None:
    """Write a sentence to stderr."""
    print(f"cluster: {sentence}", file=sys.stderr, flush=True)


def supervise(inside: Callable[[], int]) -> int:
    """Run inside() as the first process of a new process-id namespace. Return the exit status."""
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
    """Pass signals on: the first asks the cluster to end, a second one or the end of patience kills it. Return all."""
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, signal.SIGKILL if asked else signal.SIGTERM)
        if not asked:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        asked.append(number)

    signal.signal(signal.SIGALRM, forward)
    for number in ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # unless nohup ignores it
            signal.signal(number, forward)
    return asked


def _first_process(lifeline: int, inside: Callable[[], int]) -> int:
    kernel.die_with_parent()
    if select.select([lifeline], [], [], 0)[0]:  # closed: the script died before the line above
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
        pass  # nobody reads the output any more
    except BaseException:
        traceback.print_exc()
    return 1
