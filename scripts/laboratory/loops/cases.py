"""The cases of the table of loops: usual trainings, as people write them."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from laboratory.loops import optimizers
from laboratory.loops.cell import BATCH, DEVIATION, MEAN, WIDTH, Case, Cell
from laboratory.tasks import digits
from laboratory.tasks.task import accuracy


def in_steps(step: Callable[[Any], object]) -> Callable[[Any], None]:
    """Make a training of so many steps."""

    def play(cell: Cell) -> None:
        for _ in range(cell.steps):
            step(cell)

    return play


def clip(cell: Cell, by: Callable[[Any, float], Any] = nn.utils.clip_grad_norm_, most: float = 1.0) -> None:
    """Clip the gradients between their exchange and the step."""
    for _ in range(cell.steps):
        cell.backward()
        cell.synchronize()
        by(cell.net.parameters(), most)
        cell.synchronized_step()


def scaler(cell: Cell, on_one: bool = False) -> None:
    """Scale the loss, with an overflow now and then. on_one: on one rank alone."""
    scaling = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=30)
    for step in range(cell.steps):
        cell.optimizer.zero_grad()
        overflows = step % 40 == 20 and not (on_one and cell.rank)
        scaling.scale(cell.loss() * (float("inf") if overflows else 1)).backward()
        cell.synchronize()
        scaling.unscale_(cell.optimizer)
        cell.synchronized_step(lambda: scaling.step(cell.optimizer))
        scaling.update()


@in_steps
def accumulation(cell: Cell) -> None:
    """Add up the gradients of two batches: within no_sync(), or by backward_passes_per_step."""
    cell.optimizer.zero_grad()
    for last in (False, True):
        with contextlib.nullcontext() if last or not cell.by_ddp else cell.whole.no_sync():
            (cell.loss() / 2).backward()
    cell.optimizer.step()


@in_steps
def two_exchanges(cell: Cell) -> None:
    """Add up the gradients of two batches, each exchanged."""
    cell.optimizer.zero_grad()
    for _ in range(2):
        (cell.loss() / 2).backward()
    cell.optimizer.step()


def compiled(cell: Cell) -> None:
    cell.whole = torch.compile(cell.whole, backend="aot_eager")
    cell.train()


def resume(cell: Cell, whole: bool = True) -> None:
    """Stop in the middle, and go on with new objects from a checkpoint. whole: it has gradcomp's state, too."""
    cell.train(cell.steps // 2)
    saved = copy.deepcopy((cell.net.state_dict(), cell.optimizer.state_dict()))
    state = cell.handle.state_dict() if cell.handle and whole else None
    cell.whole = cell.optimizer = cell.handle = cell.inner = None
    cell.net = digits.conv(cell.key.seed + 1, WIDTH)
    cell.net.load_state_dict(saved[0])
    cell.wrap()
    cell.optimizer.load_state_dict(saved[1])
    if state is not None:
        cell.handle.load_state_dict(state)
    cell.train(cell.steps - cell.steps // 2)


def scheduled(make: Callable[[Any, int], Any]) -> Case:
    """Make a case of a schedule of learning rates. make: gets the optimizer and the steps."""

    def play(cell: Cell) -> None:
        schedule = make(cell.inner, cell.steps)
        for _ in range(cell.steps):
            cell.optimizer.zero_grad()
            loss = cell.loss()
            loss.backward()
            cell.optimizer.step()
            schedule.step(*([loss.detach()] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))

    return Case(play)


@in_steps
def closure(cell: Cell) -> None:
    def closed() -> Tensor:
        cell.optimizer.zero_grad()
        loss = cell.loss()
        loss.backward()
        return loss.detach()

    cell.optimizer.step(closed)


def climbed(cell: Cell) -> None:
    """Make the first gradient, and call step() with a closure that makes another, as SAM's users do."""

    def again(x: Tensor, y: Tensor) -> Tensor:
        cell.optimizer.zero_grad()
        loss = functional.cross_entropy(cell.whole(x), y)
        loss.backward()
        return loss.detach()

    for _ in range(cell.steps):
        batch = next(cell.batches)
        again(*batch)
        cell.optimizer.step(partial(again, *batch))


def lbfgs(cell: Cell) -> None:
    """Call the closure several times a step, on one batch."""
    for _ in range(cell.steps // 4):
        x, y = next(cell.batches)

        def again(x: Tensor = x, y: Tensor = y) -> Tensor:
            cell.optimizer.zero_grad()
            loss = functional.cross_entropy(cell.whole(x), y)
            loss.backward()
            return loss.detach()

        cell.optimizer.step(again)


def frozen_later(cell: Cell) -> None:
    """Freeze the first layer in mid-training."""
    cell.train(cell.steps // 2)
    cell.net[1].requires_grad_(False)
    cell.train(cell.steps - cell.steps // 2)


def unfrozen(cell: Cell) -> None:
    """Train the last layer alone at first, then all."""
    for layer in cell.net[:-1]:
        layer.requires_grad_(False)
    cell.train(cell.steps // 4)
    cell.net.requires_grad_(True)
    cell.train(cell.steps - cell.steps // 4)


class Unused(nn.Module):
    """A net with a layer that no pass uses, and one that every third pass uses."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net, self.never, self.rare, self.passes = net, nn.Linear(10, 10), nn.Linear(10, 10), 0

    def forward(self, x: Tensor) -> Any:
        self.passes += 1
        found = self.net(x)
        return found if self.passes % 3 else found + self.rare(found)


def with_unused(cell: Cell) -> None:
    cell.net = Unused(cell.net)


def unused(cell: Cell) -> float:
    cell.train()
    return cell.score(cell.net.net)


def discriminator(cell: Cell) -> None:
    torch.manual_seed(cell.key.seed)
    cell.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    cell.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))


def gan(cell: Cell) -> float:
    """Train a discriminator, through which the generator's loss goes, too. Return the percentage that it tells apart."""
    of_generator = torch.optim.SGD(cell.generator.parameters(), 0.0)  # stays as it is: the score has little noise so
    noise = torch.Generator().manual_seed(cell.rank)

    def fake(count: int) -> Tensor:
        made: Tensor = cell.generator(torch.randn(count, 16, generator=noise))
        return (made - MEAN) / DEVIATION

    def loss_of(x: Tensor, real: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(cell.whole(x).flatten(), real)

    for _ in range(cell.steps):
        cell.optimizer.zero_grad()
        pictures = torch.cat([next(cell.batches)[0], fake(BATCH).detach()])
        loss_of(pictures, (torch.arange(len(pictures)) < BATCH).float()).backward()
        cell.optimizer.step()
        of_generator.zero_grad()
        loss_of(fake(BATCH), torch.ones(BATCH)).backward()  # the next zero_grad() drops the discriminator's part
        of_generator.step()
        cell.synchronize()
    with torch.no_grad():
        shown = (cell.net(cell.data["test_x"]) > 0).float().mean(), (cell.net(fake(360)) < 0).float().mean()
    return 50 * float(sum(shown))


def two_optimizers(cell: Cell, first: Callable[[Any], Any], is_for_all: bool = True) -> None:
    """Train matrices by one optimizer and the rest by AdamW. is_for_all: it takes kernels of more dimensions, too."""
    matrices = [each for each in cell.net.parameters() if each.ndim == 2 or (is_for_all and each.ndim > 2)]
    rest = [each for each in cell.net.parameters() if all(each is not other for other in matrices)]
    both: list[Any] = [first(matrices), torch.optim.AdamW(rest, 0.002)]
    if cell.by_ddp:
        cell.wrap(both[0])
    else:
        cell.whole = cell.net
        both = [cell.wrapped(each, cell.net)[0] for each in both]
    for _ in range(cell.steps):
        for each in both:
            each.zero_grad()
        cell.loss().backward()
        for each in both:
            each.step()


def zero_redundancy(cell: Cell) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(cell.net.parameters(), torch.optim.AdamW, lr=0.002)


def averaged(cell: Cell) -> float:
    """Average the weights, and score the average."""
    average = AveragedModel(cell.net, avg_fn=lambda mean, own, count: 0.9 * mean + 0.1 * own)
    for _ in range(cell.steps):
        cell.train(1)
        average.update_parameters(cell.net)
    return cell.score(average)


def stochastic_averaging(cell: Cell) -> float:
    """Average the weights of the last half, at the rate of torch's schedule for it. Score the average."""
    average, schedule = AveragedModel(cell.net), SWALR(cell.inner, cell.inner.param_groups[0]["lr"], anneal_epochs=5)
    cell.train(cell.steps // 2)
    for _ in range(cell.steps - cell.steps // 2):
        cell.train(1)
        schedule.step()
        average.update_parameters(cell.net)
    return cell.score(average)


class LowRank(nn.Module):
    """A matrix and the product of two small ones, as LoRA has it."""

    def __init__(self, rows: int, columns: int, rank: int):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(rank, columns) / columns**0.5), nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def with_adapters(cell: Cell) -> None:
    """Freeze a net that is half trained, on one rank's data, and adapt its linear layers."""
    batches, optimizer = digits.batches(cell.data, 0, 1, BATCH, cell.key.seed), cell.make()
    for _ in range(cell.steps // 4):
        x, y = next(batches)
        optimizer.zero_grad()
        functional.cross_entropy(cell.net(x), y).backward()
        optimizer.step()
    cell.net.requires_grad_(False)
    for layer in cell.net:
        if isinstance(layer, nn.Linear):
            parametrize.register_parametrization(layer, "weight", LowRank(layer.out_features, layer.in_features, 4))


def compiled_step(cell: Cell) -> None:
    """Compile the optimizer's step."""
    cell.optimizer.step = torch.compile(cell.optimizer.step, backend="aot_eager")
    cell.train()


def join(cell: Cell) -> None:
    """Give rank 0 more batches than rank 1, within DDP's join()."""
    with cell.whole.join():
        cell.train(cell.steps if cell.rank == 0 else cell.steps - 10)


def in_bfloat16(cell: Cell) -> None:
    cell.net = cell.net.to(torch.bfloat16)
    cell.data = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in cell.data.items()}
    cell.batches = digits.batches(cell.data, cell.rank, cell.size, BATCH, cell.key.seed)


def bfloat16(cell: Cell) -> float:
    """Train parameters in bfloat16."""
    cell.train()
    return accuracy(cell.net, cell.data, lambda x: x)


@in_steps
def maximize(cell: Cell) -> None:
    """Maximize the negative loss."""
    cell.optimizer.zero_grad()
    (-cell.loss()).backward()
    cell.optimizer.step()


def anew(cell: Cell) -> None:
    """Begin with a new optimizer in mid-training."""
    cell.train(cell.steps // 2)
    if cell.by_ddp:
        cell.optimizer = cell.make()
    else:
        cell.optimizer = cell.handle = cell.inner = None
        gc.collect()  # as Horovod's own optimizer needs it
        cell.wrap()
    cell.train(cell.steps - cell.steps // 2)


def rate_finder(cell: Cell) -> None:
    """Raise the learning rate until the training is lost, restore model and optimizer, and train."""
    before = copy.deepcopy((cell.net.state_dict(), cell.optimizer.state_dict()))
    for _ in range(30):
        cell.train(1)
        cell.optimizer.param_groups[0]["lr"] *= 1.2
    cell.net.load_state_dict(before[0])
    cell.optimizer.load_state_dict(before[1])
    cell.train()


ADAMW, SGD, DDP, HOROVOD = ("adamw",), ("sgd",), ("ddp",), ("horovod",)
FIND = {"find_unused_parameters": True}


def by(make: Callable[..., Any], **options: Any) -> Case:
    """Make a case that trains in the usual way by a relative of AdamW. options: of that, beside its rate."""
    return Case(kinds=ADAMW, optimizer=lambda cell: make(cell.net.parameters(), lr=0.002, **options))


def with_setting(play: Callable[[Any], Any] = Cell.train, **options: Any) -> Case:
    """Make a case with a setting of the kind's optimizer."""
    return Case(play, optimizer=lambda cell: cell.make(**options))


CASES = {
    "base": Case(),
    "clip_grad_norm_": Case(clip),
    "clip_grad_value_": Case(lambda cell: clip(cell, nn.utils.clip_grad_value_, 0.01)),
    "GradScaler": Case(scaler),
    "GradScaler, overflows of one rank": Case(lambda cell: scaler(cell, on_one=True)),
    "accumulation": Case(accumulation, of_horovod={"backward_passes_per_step": 2}),
    "accumulation, each exchanged": Case(two_exchanges, doors=DDP),
    "torch.compile": Case(compiled),
    "resume": Case(resume),
    "resume, model and optimizer alone": Case(lambda cell: resume(cell, whole=False)),
    "OneCycleLR": scheduled(lambda own, n: lr_scheduler.OneCycleLR(own, 2 * own.param_groups[0]["lr"], total_steps=n + 1)),
    "CosineAnnealingLR": scheduled(lr_scheduler.CosineAnnealingLR),
    "ReduceLROnPlateau": scheduled(lambda own, n: lr_scheduler.ReduceLROnPlateau(own, patience=n // 4)),
    "step(closure)": Case(closure, doors=DDP),
    "LBFGS": Case(
        lbfgs, SGD, DDP, optimizer=lambda cell: torch.optim.LBFGS(cell.net.parameters(), 0.1, max_iter=4, history_size=5)
    ),
    "frozen at the start": Case(before=lambda cell: cell.net[1].requires_grad_(False)),
    "frozen later": Case(frozen_later, of_ddp=FIND),
    "unfrozen later": Case(unfrozen, of_ddp=FIND),
    "unused layers": Case(unused, before=with_unused, of_ddp=FIND),
    "unused layers, num_groups=1": Case(unused, doors=HOROVOD, before=with_unused, of_horovod={"num_groups": 1}),
    "GAN": Case(gan, before=discriminator, more=("topk:momentum=0", "sdagc:momentum=0", "topk:feedback=false,momentum=0")),
    "SGD and AdamW": Case(lambda cell: two_optimizers(cell, partial(torch.optim.SGD, lr=0.05, momentum=0.9)), SGD, wraps=False),
    "Muon and AdamW": Case(lambda cell: two_optimizers(cell, partial(torch.optim.Muon, lr=0.02), False), SGD, wraps=False),
    "AdamW(amsgrad)": by(torch.optim.AdamW, amsgrad=True),
    "Adam(weight_decay)": by(torch.optim.Adam, weight_decay=0.001),
    "RAdam": by(torch.optim.RAdam),
    "NAdam": by(torch.optim.NAdam),
    "Adafactor": Case(kinds=ADAMW, optimizer=lambda cell: torch.optim.Adafactor(cell.net.parameters(), lr=0.02)),
    "ASGD": Case(kinds=SGD, optimizer=lambda cell: torch.optim.ASGD(cell.net.parameters(), lr=0.2)),
    "SAM": Case(climbed, doors=DDP, optimizer=lambda cell: optimizers.SAM(cell.make())),
    "Lookahead": Case(doors=DDP, optimizer=lambda cell: optimizers.Lookahead(cell.make())),
    "ZeRO": Case(kinds=ADAMW, doors=DDP, optimizer=zero_redundancy),
    "EMA": Case(averaged),
    "SWA": Case(stochastic_averaging),
    "LoRA": Case(before=with_adapters),
    "join()": Case(join, doors=DDP),
    "bfloat16 parameters": Case(bfloat16, doors=DDP, before=in_bfloat16),
    "bfloat16 parameters, float32 masters": Case(
        bfloat16, SGD, DDP, before=in_bfloat16, optimizer=lambda cell: optimizers.Masters(cell.net.parameters(), 0.05)
    ),
    "maximize": with_setting(maximize, maximize=True),
    "fused": with_setting(fused=True),
    "foreach=False": with_setting(foreach=False),
    "compiled step": Case(compiled_step, doors=DDP),
    "weight_decay": with_setting(weight_decay=0.01),
    "a new optimizer in mid-training": Case(anew),
    "rate finder": Case(rate_finder),
}
