"""The cases of the table of loops: usual trainings, as people write them, each of which returns its score."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

from laboratory.loops.cell import BATCH, DEVIATION, MEAN, WIDTH, Cell
from laboratory.tasks import digits
from laboratory.tasks.task import accuracy


class Case(NamedTuple):
    """A usual loop.

    kinds: of optimizers that it is for. doors: that can do it. more: specs beside those of all cases. cell: of its task.
    """

    play: Callable[[Any], float]
    kinds: tuple[str, ...] = ("sgd", "adamw")
    doors: tuple[str, ...] = ("ddp", "horovod")
    more: tuple[str, ...] = ()
    cell: type[Cell] = Cell


def base(cell: Cell) -> float:
    cell.wrap()
    cell.train()
    return cell.score()


def clip(cell: Cell, by: Callable[[Any, float], Any] = nn.utils.clip_grad_norm_, most: float = 1.0) -> float:
    """Clip the gradients between their exchange and the step."""
    cell.wrap()
    for _ in range(cell.steps):
        cell.backward()
        cell.synchronize()
        by(cell.net.parameters(), most)
        cell.synchronized_step()
    return cell.score()


def scaler(cell: Cell, on_one: bool = False) -> float:
    """Scale the loss, with an overflow now and then. on_one: on one rank alone."""
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=30)
    cell.wrap()
    for step in range(cell.steps):
        cell.optimizer.zero_grad()
        overflows = step % 40 == 20 and not (on_one and cell.rank)
        loss = cell.loss() * (float("inf") if overflows else 1)
        scaling.scale(loss).backward()
        cell.synchronize()
        scaling.unscale_(cell.optimizer)
        cell.synchronized_step(lambda: scaling.step(cell.optimizer))
        scaling.update()
    return cell.score()


def accumulation(cell: Cell) -> float:
    """Add up the gradients of two batches: within no_sync(), or by backward_passes_per_step."""
    cell.wrap(backward_passes_per_step=2)
    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        for last in (False, True):
            with contextlib.nullcontext() if last or not cell.by_ddp else cell.whole.no_sync():
                (cell.loss() / 2).backward()
        cell.optimizer.step()
    return cell.score()


def two_exchanges(cell: Cell) -> float:
    """Add up the gradients of two batches, each exchanged."""
    cell.wrap()
    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        for _ in range(2):
            (cell.loss() / 2).backward()
        cell.optimizer.step()
    return cell.score()


def compiled(cell: Cell) -> float:
    cell.wrap()
    cell.whole = torch.compile(cell.whole, backend="aot_eager")
    cell.train()
    return cell.score()


def resume(cell: Cell, whole: bool = True) -> float:
    """Stop in the middle, and go on with new objects from a checkpoint. whole: it has gradcomp's state, too."""
    cell.wrap()
    cell.train(cell.steps // 2)
    saved = copy.deepcopy((cell.net.state_dict(), cell.optimizer.state_dict()))
    state = cell.handle.state_dict() if cell.handle and whole else None
    cell.whole = cell.optimizer = cell.handle = None
    cell.net = digits.conv(cell.key.seed + 1, WIDTH)
    cell.net.load_state_dict(saved[0])
    inner = cell.make()
    cell.wrap(inner)
    cell.optimizer.load_state_dict(saved[1])
    if state is not None:
        cell.handle.load_state_dict(state)
    cell.train(cell.steps - cell.steps // 2)
    return cell.score()


def scheduled(cell: Cell, make: Callable[[Any, int], Any]) -> float:
    inner = cell.make()
    cell.wrap(inner)
    schedule = make(inner, cell.steps)
    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        loss = cell.loss()
        loss.backward()
        cell.optimizer.step()
        schedule.step(*([loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
    return cell.score()


def one_cycle(inner: Any, steps: int) -> Any:
    return lr_scheduler.OneCycleLR(inner, 2 * inner.param_groups[0]["lr"], total_steps=steps + 1)


def cosine(inner: Any, steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(inner, steps)


def plateau(inner: Any, steps: int) -> Any:
    return lr_scheduler.ReduceLROnPlateau(inner, patience=steps // 4)


def closure(cell: Cell) -> float:
    cell.wrap()
    for _ in range(cell.steps):
        cell.optimizer.step(lambda: closed(cell))
    return cell.score()


def closed(cell: Cell) -> Tensor:
    """Compute a step's loss and gradients, as a closure."""
    cell.optimizer.zero_grad()
    loss = cell.loss()
    loss.backward()
    return loss.detach()


def lbfgs(cell: Cell) -> float:
    """Call the closure several times a step, on one batch."""
    cell.wrap(torch.optim.LBFGS(cell.net.parameters(), lr=0.1, max_iter=4, history_size=5))
    for _ in range(cell.steps // 4):
        x, y = next(cell.batches)

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            cell.optimizer.zero_grad()
            loss = functional.cross_entropy(cell.whole(x), y)
            loss.backward()
            return loss.detach()

        cell.optimizer.step(again)
    return cell.score()


def frozen_first(cell: Cell) -> float:
    """Freeze the first layer before anything is wrapped."""
    cell.net[1].requires_grad_(False)
    cell.wrap(cell.make(each for each in cell.net.parameters() if each.requires_grad))
    cell.train()
    return cell.score()


def frozen_later(cell: Cell) -> float:
    """Freeze the first layer in mid-training."""
    cell.wrap(ddp={"find_unused_parameters": True})
    cell.train(cell.steps // 2)
    cell.net[1].requires_grad_(False)
    cell.train(cell.steps - cell.steps // 2)
    return cell.score()


def unfrozen(cell: Cell) -> float:
    """Train the last layer alone at first, then all."""
    cell.wrap(ddp={"find_unused_parameters": True})
    for layer in cell.net[:-1]:
        layer.requires_grad_(False)
    cell.train(cell.steps // 4)
    cell.net.requires_grad_(True)
    cell.train(cell.steps - cell.steps // 4)
    return cell.score()


class Unused(nn.Module):
    """A net with a layer that no pass uses, and one that every third pass uses."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.never, self.rare, self.passes = net, nn.Linear(10, 10), nn.Linear(10, 10), 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        found = self.net(x)
        return found if self.passes % 3 else found + self.rare(found)


def unused(cell: Cell, **options: Any) -> float:
    cell.net = Unused(cell.net)
    cell.wrap(ddp={"find_unused_parameters": True}, **options)
    cell.train()
    cell.net.passes = 0
    return cell.score(cell.net.net)


def gan(cell: Cell) -> float:
    """Train a discriminator, through which the generator's loss goes, too. Return the percentage that it tells apart."""
    torch.manual_seed(cell.key.seed)
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    of_generator = torch.optim.SGD(generator.parameters(), 0.0)  # stays as it is: the score has little noise so
    cell.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))
    cell.wrap()
    noise = torch.Generator().manual_seed(cell.rank)

    def fake(count: int) -> Tensor:
        made: Tensor = generator(torch.randn(count, 16, generator=noise))
        return (made - MEAN) / DEVIATION

    def real_or_not(x: Tensor, real: float) -> Tensor:
        found = cell.whole(x).flatten()
        return functional.binary_cross_entropy_with_logits(found, torch.full_like(found, real))

    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        pictures = torch.cat([next(cell.batches)[0], fake(BATCH).detach()])
        found = cell.whole(pictures).flatten()
        wanted = (torch.arange(len(found)) < BATCH).float()
        functional.binary_cross_entropy_with_logits(found, wanted).backward()
        cell.optimizer.step()
        of_generator.zero_grad()
        real_or_not(fake(BATCH), 1.0).backward()  # the next zero_grad() drops the discriminator's part
        of_generator.step()
        cell.synchronize()
    with torch.no_grad():
        shown = (cell.net(cell.data["test_x"]) > 0).float().mean(), (cell.net(fake(360)) < 0).float().mean()
    return 50 * float(sum(shown))


def two_optimizers(cell: Cell) -> float:
    """Train matrices by SGD and the rest by AdamW."""
    parameters = [*cell.net.parameters()]
    inner: list[Any] = [
        torch.optim.SGD([each for each in parameters if each.ndim > 1], 0.05, momentum=0.9),
        torch.optim.AdamW([each for each in parameters if each.ndim == 1], 0.002),
    ]
    if cell.by_ddp:
        cell.wrap(inner[0])
        optimizers = inner
    else:
        cell.whole = cell.net
        optimizers = [cell.wrapped(each, cell.net)[0] for each in inner]
    for _ in range(cell.steps):
        for each in optimizers:
            each.zero_grad()
        cell.loss().backward()
        for each in optimizers:
            each.step()
    return cell.score()


def with_optimizer(make: Callable[[Any], Any]) -> Callable[[Cell], float]:
    """Make a case that trains in the usual way by another optimizer."""

    def play(cell: Cell) -> float:
        cell.wrap(make(cell.net.parameters()))
        cell.train()
        return cell.score()

    return play


def zero_redundancy(cell: Cell) -> float:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    cell.wrap(ZeroRedundancyOptimizer(cell.net.parameters(), torch.optim.AdamW, lr=0.002))
    cell.train()
    return cell.score()


def averaged(cell: Cell) -> float:
    """Average the weights, and score the average."""
    cell.wrap()
    average = AveragedModel(cell.net, avg_fn=lambda mean, own, count: 0.9 * mean + 0.1 * own)
    for _ in range(cell.steps):
        cell.train(1)
        average.update_parameters(cell.net)
    return cell.score(average)


def join(cell: Cell) -> float:
    """Give rank 0 more batches than rank 1, within DDP's join()."""
    cell.wrap()
    with cell.whole.join():
        cell.train(cell.steps if cell.rank == 0 else cell.steps - 10)
    return cell.score()


def bfloat16(cell: Cell) -> float:
    """Train parameters in bfloat16."""
    cell.net = cell.net.to(torch.bfloat16)
    cell.data = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in cell.data.items()}
    cell.batches = digits.batches(cell.data, cell.rank, cell.size, BATCH, cell.key.seed)
    cell.wrap()
    cell.train()
    return accuracy(cell.net, cell.data, lambda x: x)


def maximize(cell: Cell) -> float:
    """Maximize the negative loss."""
    cell.wrap(cell.make(maximize=True))
    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        (-cell.loss()).backward()
        cell.optimizer.step()
    return cell.score()


def fused(cell: Cell) -> float:
    cell.wrap(cell.make(fused=True))
    cell.train()
    return cell.score()


def weight_decay(cell: Cell) -> float:
    cell.wrap(cell.make(weight_decay=0.01))
    cell.train()
    return cell.score()


def anew(cell: Cell) -> float:
    """Begin with a new optimizer in mid-training."""
    cell.wrap()
    cell.train(cell.steps // 2)
    if cell.by_ddp:
        cell.optimizer = cell.make()
    else:
        cell.optimizer = cell.handle = None
        gc.collect()  # as Horovod's own optimizer needs it
        cell.wrap()
    cell.train(cell.steps - cell.steps // 2)
    return cell.score()


def rate_finder(cell: Cell) -> float:
    """Raise the learning rate until the training is lost, restore model and optimizer, and train."""
    cell.wrap()
    before = copy.deepcopy((cell.net.state_dict(), cell.optimizer.state_dict()))
    for _ in range(30):
        cell.train(1)
        cell.optimizer.param_groups[0]["lr"] *= 1.2
    cell.net.load_state_dict(before[0])
    cell.optimizer.load_state_dict(before[1])
    cell.train()
    return cell.score()


ADAMW, SGD, DDP, HOROVOD = ("adamw",), ("sgd",), ("ddp",), ("horovod",)

CASES = {
    "base": Case(base),
    "clip_grad_norm_": Case(clip),
    "clip_grad_value_": Case(lambda cell: clip(cell, nn.utils.clip_grad_value_, 0.01)),
    "GradScaler": Case(scaler),
    "GradScaler, overflows of one rank": Case(lambda cell: scaler(cell, on_one=True)),
    "accumulation": Case(accumulation),
    "accumulation, each exchanged": Case(two_exchanges, doors=DDP),
    "torch.compile": Case(compiled),
    "resume": Case(resume),
    "resume, model and optimizer alone": Case(lambda cell: resume(cell, whole=False)),
    "OneCycleLR": Case(lambda cell: scheduled(cell, one_cycle)),
    "CosineAnnealingLR": Case(lambda cell: scheduled(cell, cosine)),
    "ReduceLROnPlateau": Case(lambda cell: scheduled(cell, plateau)),
    "step(closure)": Case(closure, doors=DDP),
    "LBFGS": Case(lbfgs, SGD, DDP),
    "frozen at the start": Case(frozen_first),
    "frozen later": Case(frozen_later),
    "unfrozen later": Case(unfrozen),
    "unused layers": Case(unused),
    "unused layers, num_groups=1": Case(lambda cell: unused(cell, num_groups=1), doors=HOROVOD),
    "GAN": Case(gan, more=("topk:momentum=0", "sdagc:momentum=0", "topk:feedback=false,momentum=0")),
    "SGD and AdamW": Case(two_optimizers, SGD),
    "AdamW(amsgrad)": Case(with_optimizer(lambda own: torch.optim.AdamW(own, 0.002, amsgrad=True)), ADAMW),
    "Adam(weight_decay)": Case(with_optimizer(lambda own: torch.optim.Adam(own, 0.002, weight_decay=0.001)), ADAMW),
    "RAdam": Case(with_optimizer(lambda own: torch.optim.RAdam(own, 0.002)), ADAMW),
    "NAdam": Case(with_optimizer(lambda own: torch.optim.NAdam(own, 0.002)), ADAMW),
    "ZeRO": Case(zero_redundancy, ADAMW, DDP),
    "EMA": Case(averaged),
    "join()": Case(join, doors=DDP),
    "bfloat16 parameters": Case(bfloat16, doors=DDP),
    "maximize": Case(maximize),
    "fused": Case(fused),
    "weight_decay": Case(weight_decay),
    "a new optimizer in mid-training": Case(anew),
    "rate finder": Case(rate_finder),
}
