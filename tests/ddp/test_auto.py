"""auto under DDP: dense steps are DDP's own to the last bit, and whatever it takes, all ranks hold the same weights."""

from __future__ import annotations

import copy
from typing import Any

import choices
import pytest
import ranks
import small_net
import torch
import torch.distributed as dist
from ddp_run import ALONE, DdpRun
from torch import Tensor

import gradcomp
from gradcomp import telemetry

pytestmark = pytest.mark.slow

TAKEN = (
    ("stock",),
    ("stock", "half"),
    ("stock", "orq:levels=5,momentum=0"),
    ("half", "topk"),
    ("topk", "sdagc"),
    ("sdagc", "stock in bf16"),
)
STEPS = 40
OPTIONS = ("", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")


def trained(wanted: tuple[str, ...]) -> dict[str, Any]:
    with choices.chosen(*wanted):
        run = DdpRun("auto:loss=high")
        weights = run.train(STEPS)
    return {"weights": weights, "stats": run.handle.stats(), "state": run.handle.state_dict()}


def trained_with(options: str, spec: str | None) -> Tensor:
    """Train with one of DDP's options; without unused layers that must be found, every layer is used."""
    run = DdpRun(spec, **({options: True} if options else {}))
    skips = options == "find_unused_parameters"
    return run.train(STEPS, lambda step: skips and step % 4 == 3 and dist.get_rank() == 0)


def resumed(wanted: tuple[str, ...], then: str) -> dict[str, Any]:
    """Save after the choice, and go on in another run: with the same spec, or with the one that was chosen."""
    with choices.chosen(*wanted):
        first = DdpRun("auto:loss=high")
        first.train(STEPS)
        second = DdpRun(then, copy.deepcopy(first.plain))
        second.handle.load_state_dict(first.handle.state_dict())
        kept = first.handle.residual(), second.handle.residual()
        return {"kept": kept, "weights": second.train(STEPS), "stats": second.handle.stats()}


def uneven(spec: str | None, *wanted: str) -> Tensor:
    """Train in DDP's join(), with more batches on the first rank. The choice falls while the second one has none left."""
    with choices.chosen(*wanted or ("stock",)):
        run = DdpRun(spec)
        with run.whole.join():
            run.train(6 if dist.get_rank() else STEPS)
    return run.weights


def watched() -> dict[str, Any]:
    """Train under the eyes of telemetry. What is watched, the session exchanges itself, and never in bf16."""
    run = DdpRun("auto:loss=none")
    telemetry.watch(run.handle, every=1)
    run.train(STEPS)
    return run.handle.stats()["auto"]


def other_model() -> tuple[str, Tensor, Tensor]:
    """Load the state of another model, which is refused, and go on as if nobody had tried."""
    with choices.chosen("half", "topk"):
        untouched, run = (DdpRun("auto:loss=high") for _ in range(2))
        for each in (untouched, run):
            each.train(STEPS)
        state = DdpRun("half", torch.nn.Linear(3, 3)).handle.state_dict()
        said = small_net.refused(lambda: run.handle.load_state_dict(state))
        return said, untouched.train(STEPS), run.train(STEPS)


def program() -> dict[Any, Any]:
    ranks.join()
    found: dict[Any, Any] = {wanted: trained(wanted) for wanted in TAKEN}
    with choices.chosen("stock"):
        for options in OPTIONS:
            found[options] = trained_with(options, ALONE), trained_with(options, "auto")
    for way in ("stock", "half", "topk"):
        found["uneven", way] = uneven("auto:loss=high", way)
    found["uneven"] = uneven(ALONE)
    found["watched"] = watched()
    found["other model"] = other_model()
    found["resumed"] = resumed(("half", "topk"), "auto:loss=high")
    found["fixed"] = resumed(("half", "topk"), "topk")
    found["unequal"] = small_net.refused(lambda: DdpRun("auto" if dist.get_rank() else "auto:loss=none"))
    found["not auto"] = small_net.refused(lambda: DdpRun("auto" if dist.get_rank() else "dense"))
    with choices.chosen("stock", "half"):
        run = DdpRun("topk")
        run.train(3)
        run.handle.change("auto")
        run.train(STEPS)
        found["changed"] = run.handle.stats(), run.weights
        run.handle.change("topk")
        found["fixed again"] = run.handle.stats(), run.train(3)
    return found


@ranks.once
def found() -> list[dict[Any, Any]]:
    return ranks.launch(program, 2)


@pytest.mark.parametrize("options", OPTIONS)
def test_stock_steps_are_ddps_own(options: str) -> None:
    for own in found():
        alone, ours = own[options]
        assert torch.equal(alone, ours)


@pytest.mark.parametrize("way", ["stock", "half", "topk"])
def test_a_rank_without_batches_takes_its_turns(way: str) -> None:
    first, second = (own["uneven", way] for own in found())
    assert torch.equal(first, second) and first.isfinite().all()
    if way == "stock":
        assert torch.equal(first, found()[0]["uneven"])


@pytest.mark.parametrize("wanted", TAKEN)
def test_all_ranks_take_it_and_hold_the_same_weights(wanted: tuple[str, ...]) -> None:
    first, second = (own[wanted] for own in found())
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()
    for own in (first, second):
        auto = own["stats"]["auto"]
        assert auto["way"] == wanted[-1] and auto["reason"] == "a test wants it"
        assert set(auto["seconds"]) == set(wanted)
        assert own["stats"]["steps"] == STEPS
        assert (own["stats"]["bytes_sent"] == own["stats"]["bytes_dense"]) == (wanted[-1] == "stock")
    assert first["stats"]["auto"]["seconds"] == second["stats"]["auto"]["seconds"]


def test_a_state_resumes_with_what_waits() -> None:
    for name in ("resumed", "fixed"):
        first, second = (own[name] for own in found())
        assert torch.equal(first["weights"], second["weights"])
        before, after = first["kept"]
        assert all(torch.equal(before[layer], after[layer]) for layer in before) and any(each.any() for each in before.values())
    assert found()[0]["resumed"]["stats"]["auto"]["way"] == "topk"
    assert "auto" not in found()[0]["fixed"]["stats"]


def test_ranks_that_disagree_about_auto_are_told() -> None:
    for own in found():
        assert "auto: rank 0 has 'auto:loss=none', rank 1 has 'auto'" in own["unequal"]
        assert "auto: rank 0 has 'off', rank 1 has 'auto'" in own["not auto"]


def test_change_begins_auto_and_ends_it() -> None:
    for own in found():
        assert own["changed"][0]["auto"]["way"] == "half"
        assert "auto" not in own["fixed again"][0]
    for name in ("changed", "fixed again"):
        assert torch.equal(found()[0][name][1], found()[1][name][1])


def test_a_candidate_past_telemetry_is_not_offered() -> None:
    for own in found():
        assert {*own["watched"]["seconds"]} == {"stock", "half"}


def test_a_state_of_another_model_changes_nothing() -> None:
    for own in found():
        said, untouched, tried = own["other model"]
        assert "the state does not fit the model" in said and torch.equal(untouched, tried)


def test_a_lone_rank_stays_with_ddp(group_of_one: None) -> None:
    run = DdpRun("auto")
    run.train(5)
    auto = run.handle.stats()["auto"]
    assert (auto["way"], auto["reason"], auto["choices"]) == ("stock", "one rank exchanges nothing", 1)


def test_auto_is_no_compressor() -> None:
    with pytest.raises(ValueError, match="auto is no compressor: it chooses one while real ranks train"):
        gradcomp.make("auto")
    with pytest.raises(ValueError, match="auto is no compressor"):
        gradcomp.Simulation("auto", {"w": (3,)}, 2)
    assert "loss=high" in gradcomp.describe("auto:loss=high")


def test_wrong_knobs_get_a_sentence(group_of_one: None) -> None:
    for spec, sentence in (
        ("auto:los=high", r"auto has no knob 'los' \(did you mean 'loss'"),
        ("auto:loss=medium", "must be one of none, low, high"),
        ("auto; *.bias=dense", "auto is no compressor"),
    ):
        with pytest.raises(ValueError, match=sentence):
            DdpRun(spec)
