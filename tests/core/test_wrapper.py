"""The law of wrappers: what a compressor can do alone it can do inside of any wrapper, new abilities and wrappers included."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

import gradcomp
import gradcomp.engine
from gradcomp.core.by_host import ByHost
from gradcomp.core.compressor import Acc, Compressor, Layer, Layout, Steps, Traits
from gradcomp.core.requests import World, reduce
from gradcomp.core.wrapper import Wrapper
from gradcomp.engine.feedback import Feedback
from gradcomp.knobs import knob
from gradcomp.native.memory import Memory, Update

LAYOUT = Layout(("a", "b"), (6, 4), torch.device("cpu"))
OTHER = Layer(4, torch.device("cpu"))


NONE = Traits(fed_back=False)


@dataclass(frozen=True)
class Probe(Compressor):
    """Has every ability, and notes in its state what was asked of it."""

    number: int = knob(1, "to tell one from another")
    own: Traits = NONE

    @property
    def traits(self) -> Traits:
        return self.own

    def init(self, layout: Layout, seed: int) -> dict[str, Any]:
        return {"entries": layout.total, "seed": seed}

    def exchange(self, acc: Acc, state: dict[str, Any], world: World) -> Steps:
        state["exchanged by"] = self.number
        update = yield from reduce(acc.residual.clone(), 1 / world.size)
        acc.residual.zero_()
        return Update(update)

    def refuses(self, feedback: bool) -> str | None:
        return f"refused {self.number}" if self.number == 7 else None

    def misfit(self, names: Sequence[str]) -> str | None:
        return "no b" if [*names] == ["a"] else None

    def choose(self, name: str, layer: Layer) -> Compressor:
        return self if name == "a" else replace(self, number=2)

    def ease(self, progress: float) -> Compressor:
        return replace(self, number=int(100 * progress))

    def save(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"saved": state["seed"]}

    def load(self, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        state["loaded"] = saved["saved"]

    def save_shared(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"shared": state["seed"]}

    def load_shared(self, state: dict[str, Any], saved: Mapping[str, Any]) -> None:
        state["adopted"] = saved["shared"]

    def stats(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"figure": state["entries"]}


def wrappers() -> list[type[Wrapper]]:
    for module in pkgutil.iter_modules(gradcomp.engine.__path__):
        importlib.import_module(f"gradcomp.engine.{module.name}")
    found, waiting = [], Wrapper.__subclasses__()
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if not inspect.isabstract(kind) and kind.__module__.startswith("gradcomp."):
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


every = pytest.mark.parametrize("kind", wrappers(), ids=lambda kind: kind.__name__)
WORLD = World(0, 1, (0,))


def run(compressor: Compressor, state: Any) -> None:
    """One exchange by a rank that is alone."""
    acc = Acc(torch.arange(10.0), Memory())
    steps = compressor.exchange(acc, state, WORLD)
    request = next(steps)
    while True:
        reply: Any = {} if hasattr(request, "payloads") else request.tensor
        try:
            request = steps.send(reply)
        except StopIteration:
            return


@every
def test_every_ability_is_forwarded(kind: type[Wrapper]) -> None:
    wrapper = kind(Probe())
    state = wrapper.init(LAYOUT, 7)
    run(wrapper, state)
    inner = wrapper.inner_state(state)
    assert inner["exchanged by"] == 1
    assert wrapper.refuses(True) is None
    assert wrapper.misfit(["a"]) == "no b" and wrapper.misfit(["a", "b"]) is None
    assert wrapper.choose("a", OTHER) is wrapper
    assert wrapper.choose("b", OTHER) == replace(wrapper, inner=Probe(2))
    assert wrapper.ease(0.5) == replace(wrapper, inner=Probe(50))
    saved = wrapper.save(state)
    assert "{'saved': 7}" in str(saved)
    wrapper.load(state, saved)
    run(wrapper, state)
    assert wrapper.inner_state(state)["loaded"] == 7
    assert wrapper.stats(state) == {"figure": 10}
    wrapper.load_shared(state, wrapper.save_shared(state))
    run(wrapper, state)
    assert kind is ByHost or wrapper.inner_state(state)["adopted"] == 7  # ByHost makes the inner state anew
    assert str(wrapper).startswith(f"{__name__}.Probe:number=1") and wrapper.name == f"{__name__}.Probe"
    assert str(replace(wrapper, inner=Probe(3))).startswith(f"{__name__}.Probe:number=3")


def test_these_are_all_abilities_and_all_wrappers() -> None:
    """Who adds one adds it to the probe above, and to the wrappers' base."""
    abilities = {name for name, value in vars(Compressor).items() if not name.startswith("_") and callable(value)}
    assert abilities == {
        "init",
        "exchange",
        "refuses",
        "misfit",
        "choose",
        "ease",
        "save",
        "load",
        "save_shared",
        "load_shared",
        "stats",
    }
    assert abilities - {"exchange"} <= set(vars(Wrapper))
    assert {*wrappers()} == {ByHost, Feedback}


REFUSED, RATES = "refused", "unused"
TRAITS: dict[str, list[Any]] = {"momentum": [0.5], "rates": ["used", "needed"]}
# The traits that a wrapper does not copy. Feedback becomes outermost as well.
AMENDED: dict[tuple[type[Wrapper], str, Any], Any] = {
    (ByHost, "rates", "needed"): REFUSED,
    (ByHost, "rates", "used"): RATES,
    (ByHost, "ends", True): REFUSED,
    **{(kind, "outermost", True): REFUSED for kind in wrappers()},
}


@every
@pytest.mark.parametrize(
    "trait,value", [(field.name, value) for field in fields(Traits) for value in TRAITS.get(field.name, [True])]
)
def test_every_trait_is_copied_amended_or_refused(kind: type[Wrapper], trait: str, value: Any) -> None:
    inner = Probe(own=replace(NONE, **{trait: value}))
    wanted = AMENDED.get((kind, trait, value), value)
    if wanted == REFUSED:
        with pytest.raises(ValueError, match=r"cannot wrap|cannot use by_host"):
            kind(inner)
    else:
        assert getattr(kind(inner).traits, trait) == wanted


def test_a_compressor_refuses_the_same_inside_of_wrappers() -> None:
    for inner in (Probe(7), ByHost(Probe(7))):
        with pytest.raises(ValueError, match="refused 7"):
            Feedback(inner)


@every
def test_a_wrapper_keeps_a_loaded_state_before_its_first_exchange(kind: type[Wrapper]) -> None:
    wrapper = kind(Probe())
    first, second = wrapper.init(LAYOUT, 7), wrapper.init(LAYOUT, 8)
    run(wrapper, first)
    saved = wrapper.save(first)
    wrapper.load(second, saved)
    assert isinstance(wrapper.stats(second), dict) and isinstance(wrapper.save_shared(second), dict)
    again = wrapper.init(LAYOUT, 9)
    wrapper.load(again, wrapper.save(second))
    run(wrapper, again)
    assert "loaded" in wrapper.inner_state(again)


def test_a_state_saved_before_the_first_step_can_be_loaded() -> None:
    for spec in ("sdagc:by_host=true", "orq:by_host=true", "topk:by_host=true"):
        fresh, other = (gradcomp.Simulation(spec, {"w": (3000,)}, 4, ranks_per_host=2) for _ in range(2))
        other.load_state_dict(fresh.state_dict())
        other.step([{"w": torch.ones(3000)} for _ in range(4)])


def test_figures_are_there_by_host() -> None:
    """The wrappers pass an algorithm's own figures on."""
    simulation = gradcomp.Simulation(ByHost(Probe()), {"w": (10,)}, 4, ranks_per_host=2)
    simulation.step([{"w": torch.ones(10)} for _ in range(4)])
    assert simulation.stats()["figure"] == 5
