"""Run another project's program with one line more: python -m laboratory.strangers.attached SPEC [-m] PROGRAM [arguments].

Every DistributedDataParallel gets gradcomp.ddp.attach(model, SPEC) once it is made, and every hvd.DistributedOptimizer is
gradcomp's, with SPEC. Without a spec ("") the program runs as its authors wrote it. {rank} in arguments becomes Horovod's rank.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def main(arguments: list[str]) -> None:
    """Add the line, and run the program as the main one."""
    spec, program, *rest = arguments
    if spec:
        attach_to_ddp(spec)
        if "HOROVOD_RANK" in os.environ and find_spec("horovod") is not None:
            replace_horovods(spec)
    module = program == "-m"
    if module:
        program, *rest = rest
    else:
        sys.path.insert(0, str(Path(program).parent))
    sys.argv = [program, *(each.replace("{rank}", os.environ.get("HOROVOD_RANK", "0")) for each in rest)]
    (runpy.run_module if module else runpy.run_path)(program, run_name="__main__")


def attach_to_ddp(spec: str) -> None:
    """Attach gradcomp to every model that DistributedDataParallel wraps from now on."""
    import gradcomp

    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def attached(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        gradcomp.ddp.attach(self, spec)

    DistributedDataParallel.__init__ = attached  # type: ignore[method-assign]


def replace_horovods(spec: str) -> None:
    """Put gradcomp's DistributedOptimizer in the place of Horovod's, which it calls itself."""
    import horovod.torch as hvd

    import gradcomp

    stock = hvd.DistributedOptimizer

    def ours(optimizer: Any, named_parameters: Any = None, **options: Any) -> Any:
        hvd.DistributedOptimizer = stock
        try:
            return gradcomp.horovod.DistributedOptimizer(optimizer, named_parameters, spec, **options)
        finally:
            hvd.DistributedOptimizer = ours

    hvd.DistributedOptimizer = ours


if __name__ == "__main__":
    main(sys.argv[1:])
