"""auto by every door: dense steps are the door's own to the last bit, and all ranks hold the same weights in any case."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import choices
import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from doors import ALONE, DDP, DOORS, EVERY, Training
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import gradcomp
from gradcomp import telemetry

pytestmark = pytest.mark.slow

STEPS = 40
HIGH = "auto:loss=high"
# The candidates that are tried, of which the last is taken.
TAKEN = [
    *itertools.product(EVERY, [("stock",), ("stock", "half"), ("blocks", "topk"), ("sdagc", "stock")]),
    (DDP, ("topk", "blocks")),
    (DDP, ("sdagc", "stock in bf16")),
]
# Trainings in which stock is taken, by which doors.
STOCK: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (EVERY, {}),
    "momentum": (EVERY, {"momentum": 0.9}),
    "sum": (DOORS, {"op": hvd.Sum, "lr": 0.01}),
    "views": ((DDP,), {"gradient_as_bucket_view": True}),
    "static graph": ((DDP,), {"static_graph": True}),
    "unused": ((DDP,), {"find_unused_parameters": True}),
}
STOCK_CASES = [(door, name) for name, (own, _) in STOCK.items() for door in own]


def alone(door: str) -> str:
    return DDP if door == DDP else ALONE


def run_of(door: str, spec: str | None, model: Any = None, **options: Any) -> Training:
    return Training(door, model, spec, bucket_mb=0.02, **options)


def taken(door: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    with choices.chosen(*wanted):
        run = run_of(door, HIGH)
        return {"weights": run.train(STEPS), "stats": run.handle.stats()}


def by_stock(door: str, name: str, spec: str | None) -> Tensor:
    """Train with one of the door's options. Rank 0 leaves a layer out now and then, where it must be found."""
    run = run_of(door, spec, **STOCK[name][1])
    return run.train(STEPS, lambda step: name == "unused" and step % 4 == 3 and dist.get_rank() == 0)


def every_door(door: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {wanted: taken(door, wanted) for own, wanted in TAKEN if own == door}
    with choices.chosen("stock"):
        for name in (name for own, name in STOCK_CASES if own == door):
            found[name] = by_stock(alone(door), name, None), by_stock(door, name, "auto")
    return found


# Under Horovod.


def two_at_once(door: str) -> tuple[Tensor, Tensor]:
    """Two models with a step each in turn, of which the second is behind by some steps."""
    with choices.chosen("stock", "half"):
        first, second = (run_of(door, "auto", small_net.net(seed)) for seed in (1, 2))
        for step in range(STEPS):
            for run in (first, second)[: 1 + (step > 3)]:
                run.train(1)
    return first.weights, second.weights


def in_bfloat16(door: str) -> tuple[Tensor, dict[str, Any]]:
    """Train a model in bfloat16, which Horovod cannot add up."""
    with choices.chosen("stock", "half", "dense"):
        run = run_of(door, "auto", small_net.net().bfloat16())
        run.data = in_16_bits(run.data, torch.bfloat16)
        return run.train(STEPS), run.handle.stats()["auto"]


def in_16_bits(data: Iterator[tuple[Tensor, Tensor]], form: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x.to(form), y) for x, y in data)


def restored(door: str) -> Tensor:
    """Go back to a commit in the middle of a stock step, as Horovod's elastic mode does after a failure."""
    with choices.chosen("stock"):
        run = run_of(door, "auto")
        run.train(STEPS)
        if door == ALONE:
            next(run.data)
        else:
            run.handle._session.resume.commit()
            run.backward()
            run.handle._session.resume.roll_back()
            run.optimizer.load_state_dict(run.optimizer.state_dict())  # drops the handles of the step
        return run.train(3)


def of_horovod(door: str) -> dict[Any, Any]:
    return {"two": two_at_once(door), "bfloat16": in_bfloat16(door), "restored": (restored(door), restored(ALONE))}


# Under DDP.


def resumed(then: str) -> dict[str, Any]:
    """Save after the choice, and go on in another run: with the same spec, or with the one that was chosen."""
    with choices.chosen("half", "topk"):
        first = run_of(DDP, HIGH)
        first.train(STEPS)
        second = run_of(DDP, then, copy.deepcopy(first.model))
        second.handle.load_state_dict(first.handle.state_dict())
        kept = first.residual(), second.residual()
        return {"kept": kept, "weights": second.train(STEPS), "stats": second.handle.stats()}


def uneven(spec: str | None, way: str) -> Tensor:
    """Train in DDP's join(), with more batches on the first rank. The choice falls while the second one has none left."""
    with choices.chosen(way):
        run = run_of(DDP, spec)
        with run.whole.join():
            run.train(6 if dist.get_rank() else STEPS)
    return run.weights


def in_closures(way: str) -> tuple[Tensor, str]:
    """Train with closures: a turn may come within one, after its step has begun."""
    with choices.chosen("stock", "sdagc", "topk", way):
        run = run_of(DDP, HIGH)

        def closure() -> None:
            run.optimizer.zero_grad()
            run.backward()

        for _ in range(STEPS):
            run.optimizer.step(closure)
    return run.weights, run.handle.stats()["auto"]["way"]


class Hybrid(torch.optim.Optimizer):
    """Steps matrices itself, and leaves the other layers to inner optimizers."""

    def __init__(self, layers: Any):
        layers = [*layers]
        super().__init__(layers, {})
        self.inner = [torch.optim.AdamW([each], 0.002) for each in layers if each.dim() < 2]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.param_groups[0]["params"]:
            if each.dim() > 1:
                each -= 0.02 * each.grad
        for inner in self.inner:
            inner.step()


def with_inner_optimizers(way: str) -> tuple[Tensor, str]:
    """Train with steps within a step, whose own layers travel last. Then let one rank join() the other."""
    with choices.chosen("stock", "sdagc", "topk", way):
        model = small_net.net()
        run = run_of(DDP, HIGH, model, inner=Hybrid(model.parameters()), given=False)
        before = run.train(STEPS)
        run.handle.change(HIGH)
        run.train(8)
        with run.whole.join():
            run.train(STEPS * dist.get_rank())
    return torch.cat([before, run.weights]), run.handle.stats()["auto"]["way"]


def watched() -> list[str]:
    """Train under the eyes of telemetry. What is watched, the session exchanges itself, and never in bf16."""
    run = run_of(DDP, "auto:loss=none")
    telemetry.watch(run.handle, every=1)
    run.train(STEPS)
    return [*run.handle.stats()["auto"]["seconds"]]


def changed() -> dict[str, Any]:
    """Begin auto in mid-training, and end it."""
    with choices.chosen("stock", "half"):
        run = run_of(DDP, "topk")
        run.train(3)
        run.handle.change("auto")
        run.train(STEPS)
        way = run.handle.stats()["auto"]["way"]
        run.handle.change("topk")
        return {"way": way, "fixed": "auto" not in run.handle.stats(), "weights": run.train(3)}


def of_ddp(door: str) -> dict[Any, Any]:
    odd = dist.get_rank() == 1
    found: dict[Any, Any] = {("uneven", way): uneven(HIGH, way) for way in ("stock", "blocks", "topk")}
    found |= {(act.__name__, way): act(way) for act in (in_closures, with_inner_optimizers) for way in ("stock", "topk")}
    return found | {
        "uneven": uneven(None, "stock"),
        "watched": watched(),
        "changed": changed(),
        "resumed": resumed(HIGH),
        "fixed": resumed("topk"),
        "unequal": small_net.refused(lambda: run_of(DDP, "auto" if odd else "auto:loss=none")),
        "not auto": small_net.refused(lambda: run_of(DDP, "auto" if odd else "dense")),
    }


def program(door: str) -> dict[Any, Any]:
    doors.join(door)
    return every_door(door) | (of_ddp if door == DDP else of_horovod)(door)


@ranks.once
def found(door: str) -> list[dict[Any, Any]]:
    return ranks.launch(program, 2, door)


@pytest.mark.parametrize("door, name", STOCK_CASES)
def test_stock_steps_are_the_doors_own(door: str, name: str) -> None:
    for own in found(door):
        assert torch.equal(*own[name])


@pytest.mark.parametrize("door, wanted", TAKEN)
def test_all_ranks_take_it_and_hold_the_same_weights(door: str, wanted: tuple[str, ...]) -> None:
    first, second = (own[wanted] for own in found(door))
    assert torch.equal(first["weights"], second["weights"]) and first["weights"].isfinite().all()
    for own in (first, second):
        auto = own["stats"]["auto"]
        assert auto["way"] == wanted[-1] and auto["reason"] == "a test wants it" and {*auto["seconds"]} == {*wanted}
        assert own["stats"]["steps"] == STEPS
        what = "updates" if wanted[-1] in ("topk", "sdagc") else "gradients"
        assert own["stats"]["exchanges"] == f"{wanted[-1]}, as auto chose after step {auto['after_step']}: {what}"
        assert (own["stats"]["bytes_sent"] == own["stats"]["bytes_dense"]) == (wanted[-1] == "stock")
    assert first["stats"]["auto"]["seconds"] == second["stats"]["auto"]["seconds"]


@pytest.mark.parametrize("door", DOORS)
def test_after_a_failed_stock_step_no_result_of_it_is_left(door: str) -> None:
    for own in found(door):
        assert torch.equal(*own["restored"])


@pytest.mark.parametrize("door", DOORS)
def test_two_optimizers_take_their_turns_apart(door: str) -> None:
    first, second = (own["two"] for own in found(door))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("door", DOORS)
def test_where_horovod_cannot_add_up_it_is_not_offered(door: str) -> None:
    for own in found(door):
        weights, auto = own["bfloat16"]
        assert weights.isfinite().all() and torch.equal(weights, found(door)[0]["bfloat16"][0])
        assert auto["way"] == "dense" and {*auto["seconds"]} == {"dense", "half"}


@pytest.mark.parametrize("way", ["stock", "blocks", "topk"])
def test_a_rank_without_batches_takes_its_turns(way: str) -> None:
    first, second = (own["uneven", way] for own in found(DDP))
    assert torch.equal(first, second) and first.isfinite().all()
    assert way != "stock" or torch.equal(first, found(DDP)[0]["uneven"])


@pytest.mark.parametrize("way", ["stock", "topk"])
@pytest.mark.parametrize("act", [in_closures, with_inner_optimizers])
def test_a_turn_in_the_middle_of_a_step_parts_no_ranks(act: Any, way: str) -> None:
    first, second = (own[act.__name__, way] for own in found(DDP))
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all()
    assert first[1] == second[1] == way


def test_a_state_resumes_with_the_residual() -> None:
    for name in ("resumed", "fixed"):
        first, second = (own[name] for own in found(DDP))
        assert torch.equal(first["weights"], second["weights"])
        before, after = first["kept"]
        assert all(torch.equal(before[layer], after[layer]) for layer in before) and any(each.any() for each in before.values())
    assert found(DDP)[0]["resumed"]["stats"]["auto"]["way"] == "topk"
    assert "auto" not in found(DDP)[0]["fixed"]["stats"]


def test_ranks_that_disagree_about_auto_are_told() -> None:
    for own in found(DDP):
        assert "auto: rank 0 has 'auto:loss=none', rank 1 has 'auto'" in own["unequal"]
        assert "auto: rank 0 has 'off', rank 1 has 'auto'" in own["not auto"]


def test_change_begins_auto_and_ends_it() -> None:
    first, second = (own["changed"] for own in found(DDP))
    assert first["way"] == second["way"] == "half" and first["fixed"] and second["fixed"]
    assert torch.equal(first["weights"], second["weights"])


def test_a_candidate_past_telemetry_is_not_offered() -> None:
    for own in found(DDP):
        assert {*own["watched"]} == {"stock", "half"}


def last_of_three() -> dict[Any, Any]:
    """The gradients of one more step by the chosen way of stock, and by DDP's own."""
    ranks.join()
    found = {}
    for way, form in (("stock", torch.float32), ("stock in bf16", torch.float32), ("stock", torch.bfloat16)):
        for view in (False, True):
            options = {"gradient_as_bucket_view": view}
            with choices.chosen(way):
                run = Training(DDP, small_net.net().to(form), "auto", **options)
                run.data = in_16_bits(run.data, form)
                run.train(STEPS)
                stats = run.handle.stats()
            each = 4 if way == "stock" and form == torch.float32 else 2
            assert (stats["auto"]["way"], stats["bytes_sent"]) == (way, each * run.weights.numel())
            assert ("stock in bf16" in map(str, run.handle._session.turns._candidates())) == (form == torch.float32)
            same = Training(DDP, copy.deepcopy(run.model), None, **options)
            if way != "stock":  # torch refuses its hook on CPUs, but not a call of it
                same.whole.register_comm_hook(None, lambda state, bucket: bf16_compress_hook(state, bucket))
            batch = next(run.data)
            for own in 2 * (run.whole, same.whole):  # DDP arranges its buckets anew after the first pass
                own.zero_grad(set_to_none=False)
                small_net.backward(own, batch)
            found[way, form, view] = [torch.cat([p.grad.flatten() for p in each.model.parameters()]) for each in (run, same)]
    return found


def test_on_three_ranks_the_ways_of_stock_are_ddps_own_to_the_last_bit() -> None:
    for own in ranks.launch(last_of_three, 3):
        assert all(torch.equal(ours, alone) for ours, alone in own.values())


def test_auto_is_no_compressor() -> None:
    with pytest.raises(ValueError, match="auto is not a compressor: it chooses one while real ranks train"):
        gradcomp.make("auto")
    with pytest.raises(ValueError, match="auto is not a compressor"):
        gradcomp.Simulation("auto", {"w": (3,)}, 2)
    assert "loss=high" in gradcomp.describe("auto:loss=high")
