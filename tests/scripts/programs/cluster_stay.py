"""Leaves a detached grandchild, a file in shared memory and itself sleeping; says "ready", and ignores TERM if told to."""

import os
import signal
import sys
import time
from pathlib import Path

if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(300)
    os._exit(0)
os.wait()  # the child between: it must not be counted
Path("/dev/shm/left-by-cluster-test").touch()
print("ready", flush=True)
time.sleep(300)
