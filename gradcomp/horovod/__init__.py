"""The integration of unmodified Horovod.

`Compression` goes into `hvd.DistributedOptimizer(compression=...)`. Horovod gives it every gradient, and reduces one number,
the carrier, in place of each. `DistributedOptimizer` makes Horovod's optimizer, and takes gradients without carriers.
"""

from __future__ import annotations

try:
    import horovod.torch  # noqa: F401 - so that its absence gets a sentence
except ImportError as error:
    raise ImportError(
        f"gradcomp.horovod needs Horovod 0.28.1 built for PyTorch, and this Python has none that loads ({error}): activate the "
        "environment that has torch and run scripts/setup --horovod of gradcomp's sources, which builds Horovod for that torch "
        "(a plain pip install horovod does not compile with it)",
        name=error.name,
    ) from error

from gradcomp.horovod import elastic
from gradcomp.horovod.compression import Compression
from gradcomp.horovod.optimizer import DistributedOptimizer

elastic.register()

__all__ = ["Compression", "DistributedOptimizer"]


def __dir__() -> list[str]:
    return __all__
