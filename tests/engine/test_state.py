"""States: checked whole before anything is copied, refused by name, and shared out anew among another number of ranks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from laws import SHAPES, draw

import gradcomp
from gradcomp.engine.state import FORMAT, OLDEST

SPECS = [
    "topk:ratio=0.03",
    "topk:ratio=0.03,momentum=0.9",
    "sdagc:lam=2,small=pool",
    "sdagc:lam=2",
    "sdagc:density=0.05",
    "orq:sigmas=1.5",
    "gtopk:ratio=0.03,warmup=20",
    "lgc:dense=2,learn=2,ratio=0.02",
    "lgc:dense=1,learn=1,ratio=0.02,instance=server",
    "topk:ratio=0.03,by_host=true",
    "orq:sigmas=1.5,by_host=true",
]
every_spec = pytest.mark.parametrize("spec", SPECS)


def trained(spec: str, world: int = 2, steps: int = 3) -> gradcomp.Simulation:
    simulation = gradcomp.Simulation(spec, SHAPES, world)
    for step in range(steps):
        simulation.step(draw("normal", step, world))
    return simulation


def of_ranks(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Part a simulation's state into the states of its ranks, as doors give them."""
    return [{**state, "of_rank": {rank: share}} for rank, share in state["of_rank"].items()]


def mean(simulation: gradcomp.Simulation, world: int) -> dict[str, torch.Tensor]:
    """Return the residuals as a part of the mean update."""
    every = [simulation.residual(rank) for rank in range(world)]
    return {name: sum(own[name].double() for own in every) / world for name in SHAPES}  # type: ignore[misc]


def state_bits(value: Any) -> Any:
    """Replace the tensors of a state by their bytes, so that == compares."""
    if isinstance(value, torch.Tensor):
        return bytes(value.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: state_bits(each) for key, each in value.items()}
    return [state_bits(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_a_state_says_what_it_is() -> None:
    state = trained("topk:ratio=0.03,wire=compact", 3).state_dict()
    assert (state["format"], state["spec"], state["ranks"], [*state["of_rank"]]) == (
        FORMAT,
        "topk:ratio=0.03",
        3,
        ["0", "1", "2"],
    )
    assert state["of_rank"]["1"]["shapes"] == {name: str(tuple(shape)) for name, shape in SHAPES.items()}


@every_spec
@pytest.mark.parametrize("new", [1, 3, 4, 8])
def test_another_number_of_ranks_keeps_the_residuals(spec: str, new: int) -> None:
    """Of 4 ranks, in one state or in a list of the ranks' states, in any order; then training goes on."""
    first = trained(spec, 4)
    state = first.state_dict()
    for given in (state, of_ranks(state)[::-1]):
        second = gradcomp.Simulation(spec, SHAPES, new)
        second.load_state_dict(given)
        before, after = mean(first, 4), mean(second, new)
        for name in SHAPES:
            torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=1e-6)
        for rank in range(4, new):
            assert not any(part.any() for part in second.residual(rank).values())
        assert second.stats()["steps"] == 3
        for step in range(3, 6):
            second.step(draw("normal", step, new))


NAME = next(iter(SHAPES))
NAN = float("nan")


GONE = object()


def damage(state: Any, value: Any, *path: Any) -> None:
    """Put another value at a place of a state, or nothing. NAN makes a tensor NAN."""
    *way, last = path
    for key in way:
        state = state[key]
    if value is GONE:
        del state[last]
    elif value is NAN:
        state[last].fill_(NAN)
    else:
        state[last] = value


ONE = ("of_rank", "1")
BUCKET = (*ONE, "buckets", 0)
INNER = (*BUCKET, "compressor")
RESIDUAL = (*ONE, "layers", "feedback", "residual")
SDAGC, LGC, ORQ, BY_HOST, TOPK = (
    "sdagc:lam=2,small=none",
    "lgc:dense=1,learn=2,ratio=0.02",
    "orq:sigmas=1.5",
    "topk:ratio=0.03,by_host=true",
    "topk:ratio=0.03,momentum=0.9",
)
DAMAGES = [
    (TOPK, None, ("spec",), "the state has the spec None, which is no text"),
    (TOPK, GONE, ("spec",), "the state has no 'spec'"),
    (TOPK, GONE, ("format",), f"the state has format 1, but this gradcomp reads formats {OLDEST} to {FORMAT}"),
    (TOPK, 2, ("format",), f"the state has format 2, but this gradcomp reads formats {OLDEST} to {FORMAT}"),
    (TOPK, FORMAT + 1, ("format",), f"the state has format {FORMAT + 1}, but this gradcomp reads formats {OLDEST} to {FORMAT}"),
    (TOPK, 0, ("ranks",), "ranks=0 in the state must be a whole number of at least 1"),
    (TOPK, GONE, ("of_rank",), "the state has no 'of_rank'"),
    (TOPK, {}, ("of_rank", "7"), "of_rank=7 in the state must be a whole number of at least 0 and at most 1"),
    (TOPK, None, ONE, "of_rank holds a NoneType"),
    (TOPK, -3, (*ONE, "steps"), "steps=-3 in the state must be a whole number of at least 0"),
    (TOPK, 2, (*ONE, "steps"), "the states are of different steps: that of rank 0 has 3, that of rank 1 has 2"),
    (TOPK, GONE, (*RESIDUAL, NAME), f"the residual of '{NAME}' is not in the state"),
    (TOPK, None, (*RESIDUAL, NAME), f"the residual of '{NAME}' is a NoneType in the state, not a tensor"),
    (TOPK, NAN, (*RESIDUAL, NAME), f"the residual of '{NAME}' is not finite"),
    (TOPK, torch.ones(1).double(), (*RESIDUAL, NAME), f"the residual of '{NAME}' is of type torch.float64"),
    (BY_HOST, [1], (*INNER, "place"), "place=1 in the state must be"),
    (BY_HOST, [], (*INNER, "place"), "place=0 in the state must be"),
    (TOPK, "(7, 7)", (*ONE, "shapes", NAME), "does not fit the model: "),
    (TOPK, GONE, (*ONE, "buckets"), "the state has no 'buckets'"),
    (TOPK, -1, (*BUCKET, "steps"), "steps=-1 in the state must be"),
    (TOPK, None, (*BUCKET, "compressor"), "compressor is a NoneType in the state, not a dict"),
    (SDAGC, torch.tensor([NAN, 0.1]), (*INNER, "lam"), "lam is not finite"),
    (SDAGC, -1, (*INNER, "steps"), "steps=-1 in the state must be"),
    (SDAGC, 10**9, (*INNER, "capacity", "entries"), "entries=1000000000 in the state must be"),
    (SDAGC, [1] * 99, (*INNER, "capacity", "known"), "known has 99 values in the state, not 0 to 8"),
    (SDAGC, [NAN, 0], (*INNER, "set_for"), "set_for=nan in the state must be"),
    (SDAGC, GONE, (*INNER, "capacity"), "the state has no 'capacity'"),
    (LGC, None, (*INNER, "coder"), "its coder is None"),
    (LGC, -5, (*INNER, "phases", "steps"), "steps=-5 in the state must be"),
    (LGC, [1], (*INNER, "phases", "left"), "left has 1 values in the state, not 2 to 2"),
    (LGC, GONE, (*INNER, "error", "square"), "the state has no 'square'"),
    (LGC, NAN, (*INNER, "coder", "taps"), "taps is not finite"),
    (ORQ, "3", (*INNER, "steps"), "steps='3' in the state must be"),
]


@pytest.mark.parametrize("spec, value, path, sentence", DAMAGES, ids=[sentence for *_, sentence in DAMAGES])
def test_a_damaged_state_is_refused_by_name_and_leaves_all_as_it_was(
    spec: str, value: Any, path: tuple[Any, ...], sentence: str
) -> None:
    state = copy.deepcopy(trained(spec).state_dict())
    damage(state, value, *path)
    simulation, undisturbed = trained(spec, steps=5), trained(spec, steps=5)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        simulation.load_state_dict(state)
    grads = draw("normal", 9, 2)
    ours, theirs = simulation.step(grads), undisturbed.step(grads)
    assert all(torch.equal(ours[name], theirs[name]) for name in SHAPES)


@every_spec
def test_a_state_that_was_loaded_stays_as_it_is(spec: str) -> None:
    """A commit or a state in memory is loaded again after a second failure."""
    before, after = trained(spec), trained(spec, steps=5)
    state = before.state_dict()
    kept = copy.deepcopy(state)
    after.load_state_dict(state)
    for step in range(3, 6):
        after.step(draw("normal", step, 2))
    assert state_bits(state) == state_bits(kept)


def test_states_that_do_not_belong_together_are_refused() -> None:
    first, second = of_ranks(trained("topk:ratio=0.03").state_dict())
    late = of_ranks(trained("topk:ratio=0.03", steps=4).state_dict())
    wide = of_ranks(trained("topk:ratio=0.03", world=3).state_dict())
    simulation = gradcomp.Simulation("topk:ratio=0.03", SHAPES, 2)
    for states, sentence in (
        ([], "an empty list"),
        ([first, first], "the states of rank 0 were passed twice"),
        ([first, late[1]], "the states are of different steps: that of rank 0 has 3, that of rank 1 has 4"),
        ([first, wide[1]], "the states are of 2 and of 3 ranks"),
        ([first], "the state is of rank 0 of 2, but this is rank 1 of 2; pass this rank's own state, or the list of all"),
        (wide[:2], "the state is of rank 0, 1 of 3, but this is rank 0 of 2; pass the list of all ranks' states, on all ranks"),
    ):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            simulation.load_state_dict(states)
    with pytest.raises(TypeError, match=r"load_state_dict\(\) got a str; pass the result of state_dict\(\)"):
        simulation.load_state_dict("state.pt")  # type: ignore[arg-type]
    simulation.load_state_dict([second, first])


@pytest.mark.parametrize("new", [1, 2, 8])
def test_the_largest_residuals_stay_finite_at_another_number_of_ranks(new: int) -> None:
    first = gradcomp.Simulation(TOPK, SHAPES, 4)
    first.step([{name: torch.full(shape, 3e38) for name, shape in SHAPES.items()} for _ in range(4)])
    second = gradcomp.Simulation(TOPK, SHAPES, new)
    second.load_state_dict(first.state_dict())
    for rank in range(new):
        assert all(part.isfinite().all() for part in second.residual(rank).values())


def test_a_warm_up_that_a_change_began_goes_on() -> None:
    """Its steps are fewer than the training's."""
    first = gradcomp.Simulation("topk:ratio=0.01", SHAPES, 2)
    for step in range(30):
        first.step(draw("normal", step, 2))
    first.change("topk:ratio=0.01,warmup=20")
    first.step(draw("normal", 40, 2))
    second = gradcomp.Simulation("topk:ratio=0.01,warmup=20", SHAPES, 2)
    second.load_state_dict(first.state_dict())
    for simulation in (first, second):
        simulation.step(draw("normal", 41, 2))
    assert first.bytes_sent == second.bytes_sent


def test_another_dict_is_told_apart_from_an_older_state() -> None:
    simulation = trained(TOPK)
    whole = {"model": {}, "step": 3, "gradcomp": simulation.state_dict()}
    with pytest.raises(
        ValueError, match="this is no state of gradcomp: it has 'model', 'step', 'gradcomp'; pass its entry 'gradcomp'"
    ):
        simulation.load_state_dict(whole)
    with pytest.raises(ValueError, match="it has 'weight'; pass the result of state_dict"):
        simulation.load_state_dict({"weight": 1})


# --- Another spec


@pytest.mark.parametrize(
    "after,kept",
    [
        ("sdagc:lam=2", "sdagc:lam=2"),
        ("topk:ratio=0.2", "topk:ratio=0.2"),
        ("dense", "dense:feedback=true"),
        ("sdagc; bias=dense", "sdagc; bias=dense:feedback=true"),
    ],
)
def test_changing_the_spec_carries_the_residual_over(after: str, kept: str) -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 2)
    simulation.step(draw("normal", 0, 2))
    before = [simulation.residual(rank) for rank in range(2)]
    simulation.change(after)
    assert simulation._sessions[0].spec == kept
    for rank in range(2):
        assert all(torch.equal(simulation.residual(rank)[name], before[rank][name]) for name in SHAPES)
    grads = draw("normal", 1, 2)
    update = simulation.step(grads)
    for name in SHAPES:
        left = sum(simulation.residual(rank)[name] for rank in range(2)) / 2
        wanted = sum(before[rank][name] + grads[rank][name] for rank in range(2)) / 2
        torch.testing.assert_close(left + update[name], wanted, rtol=1e-6, atol=1e-6)  # float32 sums in another order
    assert simulation.stats()["steps"] == 2


def test_changing_keeps_the_ages_of_entries() -> None:
    simulation = gradcomp.Simulation("topk:ratio=0.01,momentum=0.9", SHAPES, 1)
    simulation.step(draw("normal", 0, 1))
    before = simulation.state_dict()["of_rank"]["0"]["layers"]["feedback"]["ages"]
    simulation.change("sdagc:momentum=0.5,small=none")
    after = simulation.state_dict()["of_rank"]["0"]["layers"]["feedback"]["ages"]
    assert before and all(torch.equal(before[name], after[name]) for name in before)


def test_a_change_copies_no_state_of_the_old_compressor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of no use to another one, and to copy lgc's would wait for its training."""
    simulation = trained("lgc:dense=1,learn=1,ratio=0.02", 1)
    before = simulation.residual(0)
    for bucket in simulation._reducers[0].buckets:
        monkeypatch.setattr(type(bucket.compressor), "save", lambda *_: 1 / 0)
    simulation.change("topk:ratio=0.02")
    assert all(torch.equal(simulation.residual(0)[name], before[name]) for name in SHAPES)
