"""The doors for unmodified Horovod.

`Compression` goes into the stock `hvd.DistributedOptimizer(compression=...)`. Horovod gives it every gradient,
and reduces one number in place of each: the carrier. `DistributedOptimizer` makes the stock optimizer and takes the gradients
itself, so that no carriers travel.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

try:
    import horovod.torch as hvd
except ImportError as error:
    raise ImportError(
        f"gradcomp.horovod needs Horovod 0.28.1 built for PyTorch, and this Python has none that loads ({error}): activate the "
        "environment that has torch and run scripts/setup --horovod of gradcomp's sources, which builds Horovod for that torch "
        "(a plain pip install horovod does not compile with it)",
        name=error.name,
    ) from error
import torch
from torch import Tensor

from gradcomp.engine.parameters import Parameters, Slot, named_of
from gradcomp.engine.sessions.commits import Commits
from gradcomp.engine.sessions.session import Session
from gradcomp.engine.steps.options import Options
from gradcomp.handle import Handle
from gradcomp.networks import carrier
from gradcomp.networks.elastic import keep_with_optimizers
from gradcomp.networks.horovod import HorovodNetwork, calling_optimizer, carrier_free, exchange_failure, version
from gradcomp.protocol import Compressor
from gradcomp.spec import make

__all__ = ["Compression", "DistributedOptimizer"]

# The messages for a gradient that cannot be compressed, and for one of an unknown parameter.
_SPARSE = (
    "sparse gradients, like those of torch.nn.Embedding(sparse=True), cannot be compressed, not even with "
    "sparse_as_dense=True; use sparse=False, or give the layer its own optimizer"
)
_UNKNOWN = (
    "a gradient belongs to no known parameter: its shape is {shape}; pass all parameters as named_parameters, and unfreeze "
    "them before making Compression or DistributedOptimizer"
)

_UNUSED = (
    "Pass the Compression to hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=...), and step that one"
)

_CLASS = "compression= is the class Compression; pass an object: compression=Compression('topk', model.named_parameters())"


class Compression(Handle):
    """The compression= of a stock hvd.DistributedOptimizer. Each optimizer needs its own object.

    spec: "name:knob=value", or a compressor. named_parameters: those of the optimizer, usually model.named_parameters().
    process_set: the optimizer's process set; all ranks by default.
    optimizer: the source of learning rates, for specs that need them; its momentum is checked against the spec's; or None.
    scaler: the GradScaler that scales the loss, if one does.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes; 25 by default.
    seed: the seed of random draws, equal on all ranks; 0 by default.

    Only Horovod calls compress() and decompress().
    """

    def __init__(
        self,
        spec: str | Compressor,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        process_set: hvd.ProcessSet | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        bucket_mb: float = 25,
        seed: int = 0,
    ):
        if process_set is not None and not isinstance(process_set, hvd.ProcessSet):
            raise TypeError(f"process_set is a {type(process_set).__name__}; pass the result of hvd.add_process_set(...)")
        self._network = HorovodNetwork(process_set or hvd.global_process_set)
        options = Options(optimizer, scaler, bucket_mb, seed)
        super().__init__(Session(make(spec), Parameters(named_parameters), self._network, options, _UNKNOWN, _UNUSED))
        self._knows_optimizer = False
        self._commits = Commits(self._session)
        keep_with_optimizers(_commits_of)

    def compress(self, tensor: Tensor | None = None) -> tuple[Tensor, Slot]:
        """Take a gradient, and return a carrier in its place. Horovod gives the slot back to decompress().

        The ranks meet in the hook of the first gradient. Two optimizers in one backward pass must get their first gradients in
        the same order on all ranks.
        """
        if tensor is None:  # Horovod has the class, and `self` is the gradient
            raise TypeError(_CLASS)
        if not self._knows_optimizer:
            self._note_optimizer(calling_optimizer())
        slot = self._session.parameters.of_gradient(tensor)
        if slot is None:
            raise self._session.failed(ValueError(self._why_unknown(tensor)))
        self._session.mark_ready(slot)
        return carrier.carrier(self._network.world.rank), slot

    def decompress(self, tensor: Tensor, ctx: Slot | None) -> Tensor:
        """Return the gradient, which now holds the update. The reduced carrier reveals the op of the optimizer."""
        if ctx is not None:
            again: Any = tensor  # None where Horovod is asked again after a step that failed, which finish_step() refuses
            try:
                scale = 1.0 if again is None else carrier.scale(tensor.item(), self._network.world.size)
            except ValueError as error:
                if self._session.reducer.steps_done == 0:
                    raise self._session.failed(error) from None
                raise self._session.failed(
                    exchange_failure(error)
                ) from error  # earlier carriers were right: a rank that called hvd.join() adds 0
            self._session.finish_step(scale)
            assert ctx.parameter.grad is not None
            return ctx.parameter.grad
        if tensor.is_sparse:
            raise ValueError(_SPARSE)
        return tensor

    def _note_optimizer(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Note Horovod's optimizer, and whether its updates are sums."""
        self._knows_optimizer = True
        if optimizer is not None:
            self._session.training.note_optimizer(optimizer)
            if getattr(optimizer, "op", None) == hvd.Sum:
                self._session.note_sums()

    def _why_unknown(self, tensor: Tensor) -> str:
        if self._session.parameters.slot(tensor) is not None:
            return "op=Adasum reduces parameters, not gradients, and cannot be compressed; use op=Average or op=Sum"
        return _SPARSE if self._session.parameters.any_sparse else _UNKNOWN.format(shape=tuple(tensor.shape))


def _commits_of(optimizer: Any) -> Commits | None:
    """Return the commits of an optimizer's compression, for Horovod's elastic mode.

    The compression then knows the optimizer: a rank that joins meets the others before it has seen a gradient.
    """
    compression = getattr(optimizer, "_compression", None)
    if not isinstance(compression, Compression):
        return None
    if not compression._knows_optimizer:
        compression._note_optimizer(optimizer)
    return compression._commits


if TYPE_CHECKING:

    class CompressedOptimizer(torch.optim.Optimizer):
        """The type of Horovod's distributed optimizer: a subclass of the given optimizer's class, with these members."""

        compression: Compression
        stats: Callable[[], dict[str, Any]]
        synchronize: Callable[[], None]
        skip_synchronize: Callable[[], Any]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: str | Compressor = "topk",
    *,
    scaler: torch.amp.GradScaler | None = None,
    bucket_mb: float = 25,
    seed: int = 0,
    **stock_options: Any,
) -> CompressedOptimizer:
    """Make a stock hvd.DistributedOptimizer with compression. It has .compression and .stats() added.

    It sends no carriers unless this version of Horovod is untested.

    optimizer: the one to wrap; its learning rates are used, and its momentum is checked against the spec's.
    named_parameters: usually model.named_parameters(); Horovod's names by default.
    compression: "name:knob=value", or a compressor; "topk" by default.
    scaler: the GradScaler that scales the loss, if one does.
    bucket_mb: the largest size of a bucket of several layers, in 10^6 bytes; 25 by default.
    seed: the seed of random draws, equal on all ranks; 0 by default.
    stock_options: any other options of hvd.DistributedOptimizer. groups and num_groups have no effect, since gradcomp makes its
    own buckets.

    The method that reduces a gradient is replaced in this one object. Horovod's class is not changed.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ValueError("the optimizer is a hvd.DistributedOptimizer already; pass the one that it was made of")
    op = stock_options.get("op", hvd.Average)
    if op not in (hvd.Average, hvd.Sum):
        name = next((name for name in ("Adasum", "Min", "Max", "Product") if getattr(hvd, name, None) == op), op)
        raise ValueError(f"op={name} cannot be compressed; use op=Average or op=Sum")
    if stock_options.get("sparse_as_dense"):
        raise ValueError(_SPARSE)
    stock_options.pop("groups", None)
    stock_options.pop("num_groups", None)
    named = named_of(optimizer, named_parameters)
    process_set = stock_options.get("process_set", hvd.global_process_set)
    options = {"process_set": process_set, "optimizer": optimizer, "scaler": scaler, "bucket_mb": bucket_mb, "seed": seed}
    door = Compression(compression, named, **options)
    if op == hvd.Sum:
        door._session.note_sums()
    stock = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=door, **stock_options)
    if carrier_free():
        stock._allreduce_grad_async = _carrier_free_reduction(door._session, process_set, op)
    else:
        warnings.warn(
            f"Horovod {version()} is untested (tested: 0.28.1); falling back to the slower carrier route",
            stacklevel=2,
        )
    door._session.training.note_optimizer(stock)  # it is another object than the one that it was made of
    stock.compression = door
    stock.stats = door.stats
    return cast("CompressedOptimizer", stock)


def _carrier_free_reduction(
    session: Session, process_set: hvd.ProcessSet, op: Any
) -> Callable[[Tensor], tuple[Callable[[], Tensor], None]]:
    """Make a replacement for the stock optimizer's reduction of one gradient. It returns a function for the result.

    Gradients are held until the ranks have met in step(), since steps have the same order on all ranks.
    """

    def start(p: Tensor) -> tuple[Callable[[], Tensor], None]:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if p.grad.is_sparse:
            raise session.failed(ValueError(_SPARSE))
        session.mark_ready(session.slot(p), hold=True)

        def result() -> Tensor:
            session.finish_step(1.0 if op == hvd.Average else float(process_set.size()))
            assert p.grad is not None
            return p.grad

        return result, None

    return start


def __dir__() -> list[str]:
    return __all__
