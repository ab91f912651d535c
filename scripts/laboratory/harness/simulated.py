"""A training with simulated ranks in one process: they share weights, or exchange updates of their own, or take local steps."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import gradcomp
from gradcomp.core.requests import Reduce, Request
from gradcomp.engine.gathered_weights import SMALLEST
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.engine.updates.steps import ignore
from gradcomp.messages.rounding import BlockRounding
from gradcomp.networks import Answer
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make
from laboratory.harness import ways
from laboratory.tasks import table
from laboratory.tasks.table import TASKS
from laboratory.tasks.task import Job, Task, clip, momentum_of, optimizer_of, rate_of
from laboratory.timing import threads

if TYPE_CHECKING:
    from laboratory.harness.measured import Training


# The loss and the gradients of a batch, as tensors that nobody else has.
Passes = Callable[[Tensor, Tensor], tuple[Tensor, Sequence[Tensor]]]


@threads(1)
def train(own: Training, folder: Path) -> dict[str, Any]:
    """Train a task of the table on one thread."""
    task = TASKS[own.task]
    arrays = table.load(table.place(folder, own.data) if own.data else None)
    return trained(own, task, task.make(own.settings, own.seed, own.ranks, arrays))


class Plain:
    """Passes of a model as torch runs them. clip: the longest gradient; 0: any length."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], clip: float):
        self.model, self._loss_of, self._clip = model, loss_of, clip
        self._parameters = [*model.parameters()]

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss and the gradients of a batch."""
        loss = self._loss_of(self.model(x), y)
        grads = torch.autograd.grad(loss, self._parameters)
        clip(grads, self._clip)
        return loss.detach(), grads


def trained(
    own: Training, task: Task, job: Job, passes: Callable[[nn.Module, Callable[..., Tensor], float], Passes] = Plain
) -> dict[str, Any]:
    """Train a job where its model lies. What the ranks come to is checked to be equal to the last bit."""
    began, settings = time.perf_counter(), own.settings
    kind = Local if ways.local_of(own.way) else Updates if ways.acts_on_updates(own.way) else Gradients
    kind = RoundedWeights if ways.weight_bits(own.way) else kind
    exchange = kind(own, job, task)
    of_models = {id(model): passes(model, job.loss, settings.clip) for model in exchange.models}
    losses, sent = [], []
    warned_at = None
    for step in range(1, settings.steps + 1):
        for optimizer in exchange.optimizers:
            optimizer.param_groups[0]["lr"] = rate_of(task, settings, step)
        found = [of_models[id(model)](*next(of)) for model, of in zip(exchange.models, job.batches, strict=True)]
        losses.append([loss for loss, _ in found])  # numbers later: a GPU would be waited for
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            exchange.step([grads for _, grads in found])
        warned_at = step if seen and warned_at is None else warned_at
        sent.append(max(exchange.bytes_sent))
    exchange.close()
    means = [round(sum(float(each) / own.ranks for each in of_step), 6) for of_step in losses]
    seconds = round(time.perf_counter() - began, 2)
    return {
        "losses": means,
        "sent": sent,
        "scores": [(settings.steps, seconds, job.score())],
        "parameters": sum(each.numel() for each in job.model.parameters()),
        "seconds": seconds,
        "warned_at": warned_at,
    }


class Gradients:
    """Simulated ranks that exchange gradients; `stock` does without gradcomp. All share the weights and an optimizer.

    models: by rank.
    """

    def __init__(self, own: Training, job: Job, task: Task):
        self._named = dict(job.model.named_parameters())
        kept = momentum_of(own.way) if ways.is_spec(own.way) else 0.0
        optimizer = optimizer_of(task, own.settings, job.model, kept)
        self.optimizers, self.models = [optimizer], [job.model] * own.ranks
        self.bytes_sent = [4 * sum(each.numel() for each in self._named.values())] * own.ranks
        self._simulation = None
        if own.way != "stock":
            shapes = {name: tuple(each.shape) for name, each in self._named.items()}
            known: Any = {"optimizer": optimizer, "named_parameters": list(self._named.items())}
            known["device"] = next(job.model.parameters()).device
            self._simulation = gradcomp.Simulation(own.way, shapes, own.ranks, own.seed, **known)

    def step(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Exchange all ranks' gradients, and step."""
        if self._simulation is None:
            updates = {name: torch.stack(each).mean(0) for name, *each in zip(self._named, *grads, strict=True)}
        else:
            updates = self._simulation.step([dict(zip(self._named, each, strict=True)) for each in grads])
            self.bytes_sent = self._simulation.bytes_sent
        for name, update in updates.items():
            self._named[name].grad = update
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def close(self) -> None:
        """End. Nothing is left to do."""


class RoundedWeights(Gradients):
    """Ranks that gather their weights in few bits, as FSDP2's shards, and exchange whole gradients."""

    def __init__(self, own: Training, job: Job, task: Task):
        super().__init__(own._replace(way="dense"), job, task)
        self._bits, self._ranks = ways.weight_bits(own.way) or 8, own.ranks
        self._exact = {name: each.detach().clone() for name, each in self._named.items()}
        self._round()

    @torch.no_grad()
    def step(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Step on the exact weights, and round them for the next passes."""
        for name, each in self._named.items():
            each.copy_(self._exact[name])
        super().step(grads)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, each in self._named.items():
            self._exact[name].copy_(each)
            size = -(-len(each) // self._ranks) if each.ndim > 1 else 0
            for shard in each.split(size) if size * each[0].numel() >= SMALLEST else ():
                rounding, left = BlockRounding(self._bits, shard.numel()), shard.flatten()
                payload = rounding.take(left.clone(), None, None, key=0)
                rounding.add(left.zero_(), [payload], 1.0)
                shard.copy_(left.view(shard.shape))


class Turn(threading.Condition):
    """The turn of one thread, while the others wait for messages. has_failed: some rank has, and nobody is to wait for it."""

    has_failed = False


class ThreadNetwork(MemoryNetwork):
    """The network of a rank with a thread of its own. device: that of its messages. All threads use one stream of a GPU."""

    def __init__(self, board: Board, rank: int, turn: Turn, device: torch.device):
        super().__init__(board, rank, ranks_per_host=1)
        self._turn, self.device = turn, device

    def start(self, request: Request, name: str) -> Answer:
        """Post a request. The answer lets other ranks have their turns until all have posted theirs."""
        if isinstance(request, Reduce):  # a rank may write to its tensor again before another has read the sum
            request = Reduce(request.tensor.clone(), request.scale)
        turn, rank = self._turn, self.world.rank
        its = self._board.post(name, rank, request)
        turn.notify_all()

        def answer() -> Any:
            turn.wait_for(lambda: its.missing == 0 or turn.has_failed)
            if its.missing:
                raise RuntimeError(f"rank {rank} ends: another rank has failed")
            reply = its.reply(rank)
            return reply.clone() if isinstance(reply, Tensor) else reply

        return answer


class Replica:
    """One rank's weights, optimizer and session."""

    def __init__(self, spec: str, model: nn.Module, optimizer: torch.optim.Optimizer, network: MemoryNetwork, seed: int):
        self.optimizer, slots = optimizer, Parameters(model.named_parameters())
        self._slots, self.parameters = slots.slots, [*slots.parameters.values()]
        self.session = Session(make(spec), slots, network, Options(seed=seed), Door(has_optimizers=True))

    def step(self, grads: Sequence[Tensor]) -> None:
        """Step on this rank's own gradients. The session exchanges what that does to the weights."""
        flat, session = [slot.flat(grad) for slot, grad in zip(self._slots, grads, strict=True)], self.session
        session.gradients.begin()
        session.updates.gradients.add(flat)
        if (poison := session.updates.end_backward()) is not None:
            flat[0] = flat[0].clone()
            flat[0][:1].add_(poison)
        session.updates.note_backward()
        for slot, grad in zip(self._slots, flat, strict=True):
            slot.parameter.grad = slot.shaped(grad)
        self.optimizer.step()


class Updates:
    """Simulated ranks that exchange updates, as behind DDP. The first one's weights are the job's."""

    def __init__(self, own: Training, job: Job, task: Task):
        self._turn, board, device = Turn(), Board(own.ranks), next(job.model.parameters()).device
        networks = [ThreadNetwork(board, rank, self._turn, device) for rank in range(own.ranks)]
        models = [job.model, *(copy.deepcopy(job.model) for _ in range(own.ranks - 1))]
        self._replicas = [
            Replica(own.way, model, optimizer_of(task, own.settings, model), network, own.seed)
            for model, network in zip(models, networks, strict=True)
        ]
        self._waits = device.type != "cpu"
        self._pool = ThreadPoolExecutor(own.ranks, initializer=torch.set_num_threads, initargs=(1,))
        self.optimizers = [each.optimizer for each in self._replicas]
        self.models = [job.model] * own.ranks  # all weights are equal, and a batch norm sees all batches
        self.bytes_sent = [0] * own.ranks

    def step(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Take a step of all ranks, each on its own gradients. On a CPU their weights are compared."""
        futures = [self._pool.submit(self._take_turn, *each) for each in zip(self._replicas, grads, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:  # the first that was raised is the cause of the others
            raise next((each for each in errors if "another rank has failed" not in str(each)), errors[0])
        if not self._waits:
            self._compare()
        self.bytes_sent = [each.session.reducer.traffic.sent for each in self._replicas]

    def close(self) -> None:
        """Let other optimizers step the model as if nobody exchanged anything. Weights that have parted are so still."""
        for each in self._replicas:
            ignore(each.session)
        self._pool.shutdown()
        self._compare()

    def _compare(self) -> None:
        """Refuse weights that differ in some bit."""
        first, *others = self._replicas
        for rank, other in enumerate(others, 1):
            if not all(map(_are_equal, first.parameters, other.parameters)):
                raise RuntimeError(f"rank {rank} has other weights than rank 0: {first.session.spec} is not deterministic")

    def _take_turn(self, replica: Replica, grads: Sequence[Tensor]) -> None:
        with self._turn:
            try:
                replica.step(grads)
            except BaseException:
                self._turn.has_failed = True
                self._turn.notify_all()
                raise


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Compare to the last bit. A NaN equals any other."""
    return bool(torch.equal(one, other)) or bool(((one == other) | (one.isnan() & other.isnan())).all())


class Local:
    """Simulated ranks that take local steps, each with weights of its own. In the end the job's model has the common ones."""

    def __init__(self, own: Training, job: Job, task: Task):
        way = ways.local_of(own.way)
        assert way is not None
        self._every, self._steps, self._left, self._job = way.every, 0, own.settings.steps, job
        self.models = [copy.deepcopy(job.model) for _ in range(own.ranks)]
        # One for all ranks, since it moves each entry by itself.
        self.optimizers = [optimizer_of(task, own.settings, nn.ModuleList(self.models), fused=True)]
        self._starts = {name: each.detach().clone() for name, each in job.model.named_parameters()}
        self._outer = torch.optim.SGD(self._starts.values(), way.rate, way.momentum, nesterov=way.momentum > 0)
        shapes = {name: tuple(each.shape) for name, each in self._starts.items()}
        device = next(job.model.parameters()).device
        self._simulation = gradcomp.Simulation(way.spec, shapes, own.ranks, own.seed, device=device)
        self._begun = [self._starts] * own.ranks  # where each went on: from the start, less what it has not sent
        self.bytes_sent = [0] * own.ranks

    @torch.no_grad()
    def step(self, grads: Sequence[Sequence[Tensor]]) -> None:
        """Step on all ranks; at every H-th step and the last one, exchange their progress, and go on from the new start."""
        for model, own in zip(self.models, grads, strict=True):
            for parameter, grad in zip(model.parameters(), own, strict=True):
                parameter.grad = grad
        self.optimizers[0].step()
        self._steps += 1
        self.bytes_sent = [0] * len(self.models)
        if self._steps % self._every and self._steps != self._left:
            return
        progress = [
            {name: begun[name] - each for name, each in model.named_parameters()}
            for begun, model in zip(self._begun, self.models, strict=True)
        ]
        for name, mean in self._simulation.step(progress).items():
            self._starts[name].grad = mean.clone()
        self._outer.step()
        buffers = [dict(model.named_buffers()) for model in self.models]
        means = {
            name: torch.stack([each[name] for each in buffers]).mean(0)
            for name, first in buffers[0].items()
            if first.is_floating_point()
        }
        is_last = self._steps == self._left
        for rank, model in enumerate(self.models):
            waiting = {} if is_last else self._simulation.residual(rank)
            self._begun[rank] = {name: start - waiting.get(name, 0.0) for name, start in self._starts.items()}
            model.load_state_dict({**self._begun[rank], **means}, strict=False)
        self.bytes_sent = self._simulation.bytes_sent

    def close(self) -> None:
        """Leave the common weights in the job's model."""
        self._job.model.load_state_dict(self.models[0].state_dict())
