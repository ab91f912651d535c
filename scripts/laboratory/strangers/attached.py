"""Run another project's program with one line more: python -m laboratory.strangers.attached SPEC [-m] PROGRAM [arguments].

Every DistributedDataParallel gets gradcomp.ddp.attach(model, SPEC) once it is made, and every hvd.DistributedOptimizer is
gradcomp's, with SPEC. Programs of transformers get gradcomp.integrations.transformers.attach() instead.
Without a spec ("") the program runs as its authors wrote it. {rank} in arguments becomes Horovod's rank.
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

# The programs that train by transformers' Trainer.
OF_TRANSFORMERS = ("run_clm.py",)


def main(arguments: list[str]) -> None:
    """Add the line, and run the program as the main one."""
    spec, program, *rest = arguments
    if spec and Path(program).name in OF_TRANSFORMERS:
        attach_to_trainers(spec)
    elif spec:
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


def attach_to_trainers(spec: str) -> None:
    """Attach gradcomp to every Trainer of transformers once it trains."""
    import transformers

    from gradcomp.integrations.transformers import attach

    train = transformers.Trainer.train

    @functools.wraps(train)
    def attached(self: Any, *arguments: Any, **options: Any) -> Any:
        attach(self, spec)
        return train(self, *arguments, **options)

    transformers.Trainer.train = attached


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
