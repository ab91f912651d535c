"""A rank that does what it was asked to: end well, fail, hang, or leave without a word. No Horovod in it."""

import os
import subprocess
import time

import ranks

rank = int(os.environ["HOROVOD_RANK"])
what = ranks.arguments()[rank]
print(f"rank {rank} is to {what}")
if what == "fail":
    raise RuntimeError("on purpose")
if what == "hang":
    subprocess.Popen(["sleep", "61.5"])
    time.sleep(61.5)
if what == "end well":
    ranks.report({"rank": rank})
