"""The guard of a session's steps: knows the step under way, and refuses further steps after one that failed."""

from __future__ import annotations

from typing import NamedTuple

from gradcomp.networks import Connection

_REFUSAL = (
    "gradcomp refuses further steps on this rank, since a step failed in its middle ({reason}): its gradients were not "
    "exchanged, and entries that it had taken from the residual are lost. Start all ranks again from their last states"
)
# What Horovod allows beside: DistributedDataParallel does not survive a backward pass that failed.
_OR_LOAD = (
    "; or, if the step failed on all ranks, call compression.load_state_dict() on all with a state from before, and then "
    "optimizer.load_state_dict(optimizer.state_dict()), with which Horovod forgets the step"
)


class Failure(NamedTuple):
    """A step that failed on this rank: the network's generation in which it failed, and the error's text."""

    generation: object
    reason: str


class StepGuard:
    """The step under way, and the failure of an earlier one. Both end when the network is initialised again.

    ends_in_backward: a step ends in backward, and not in the optimizer's step().
    """

    def __init__(self, network: Connection, ends_in_backward: bool = False):
        self._network, self._ends_in_backward = network, ends_in_backward
        self._step_in: object = None  # the generation in which the step under way began; None between steps
        self._failure: Failure | None = None

    @property
    def under_way(self) -> bool:
        """True from a step's first gradient to its end."""
        return self._step_in is not None

    @property
    def outlived(self) -> bool:
        """True if a step is under way that began before the network was last initialised."""
        return self.under_way and self._step_in is not self._network.generation

    @property
    def failed(self) -> bool:
        """True if a step failed since the network was last initialised."""
        return self._failure is not None and self._failure.generation is self._network.generation

    def begin(self) -> None:
        """Begin a step, or go on with it."""
        self._step_in = self._network.generation

    def end(self) -> None:
        """End the step under way."""
        self._step_in = None

    def fail(self, error: BaseException) -> None:
        """End the step under way by an error."""
        self._step_in = None
        self._failure = Failure(self._network.generation, f"{type(error).__name__}: {error}")

    def forgive(self) -> None:
        """Allow steps again."""
        self._step_in = self._failure = None

    def refuse_after_failure(self) -> None:
        """Raise an error if an earlier step failed."""
        if self._failure is None:
            return
        if self.failed:
            remedy = "" if self._ends_in_backward else _OR_LOAD
            raise RuntimeError(_REFUSAL.format(reason=self._failure.reason) + remedy)
        self._failure = None

    def before_optimizer(self) -> None:
        """Raise an error if the optimizer's step would apply gradients that were not exchanged."""
        self.refuse_after_failure()
        if self._ends_in_backward and self.under_way:
            error = RuntimeError("backward() ended before all gradients were exchanged")
            self.fail(error)
            raise error

    def refuse_in_step(self, call: str) -> None:
        """Raise an error in the middle of a step, and after one that failed."""
        self.refuse_after_failure()
        if self.under_way:
            raise RuntimeError(f"{call} came in the middle of a step: call it after optimizer.step(), before the next backward")
