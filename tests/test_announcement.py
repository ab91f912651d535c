"""What is exchanged is said at the first step: a line on rank 0, and a warning at the user's line where it costs accuracy."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import warnings
from typing import Any

import doors
import pytest
import ranks
import torch
from doors import COMPRESSION, DDP, OWN, Training
from small_net import net
from torch import optim
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters
from gradcomp.networks.memory import Board, MemoryNetwork
from gradcomp.spec import make

REMEDY = "or let the spec be auto, which keeps no residual here"


class OwnStep(optim.AdamW):
    """An optimizer by AdamW that does something else."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


# For each: the optimizer, what is exchanged, and the beginning of the remedy if it costs accuracy.
CASES: dict[str, tuple[Any, str, str]] = {
    "sgd": (lambda ps: optim.SGD(ps, 0.1, momentum=0.9), "SGD's velocities (momentum taken over)", ""),
    "adamw": (lambda ps: optim.AdamW(ps), "AdamW's directions (moments taken over)", ""),
    "no momentum": (lambda ps: optim.SGD(ps, 0.1), "gradients, since SGD has no momentum", ""),
    "amsgrad": (lambda ps: optim.AdamW(ps, amsgrad=True), "gradients, since AdamW has amsgrad", "Make it with amsgrad=False"),
    "radam": (lambda ps: optim.RAdam(ps), "gradients, since RAdam is unknown to the exchange", "Train with torch's"),
    "subclass": (lambda ps: OwnStep(ps), "gradients, since OwnStep has a step() of its own", "Train with torch's"),
    "dampening": (
        lambda ps: optim.SGD(ps, 0.1, momentum=0.9, dampening=0.5),
        "gradients, since SGD has dampening",
        "Make it with dampening=0",
    ),
    "two momenta": (
        lambda ps: optim.SGD([{"params": ps[:2]}, {"params": ps[2:], "momentum": 0.5}], 0.1, momentum=0.9),
        "gradients, since SGD differs in momentum, nesterov or dampening between its groups",
        "Make these equal in all groups",
    ),
}


def session_of(optimizer: Any, model: Any, spec: str) -> Session:
    network = MemoryNetwork(Board(1), 0, 1)
    session = Session(make(spec), Parameters(model.named_parameters()), network, Options(optimizer), Door(name="a door"))
    session.meet()
    session.view.note_exchange()
    return session


def said(session: Session, optimizer: Any, steps: int = 1) -> tuple[list[str], list[warnings.WarningMessage]]:
    """The lines that steps without gradients print, and the warnings."""
    out = io.StringIO()
    with contextlib.redirect_stderr(out), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            optimizer.step()
    return out.getvalue().splitlines(), caught


@pytest.fixture
def no_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has not configured logging. pytest has, for all loggers."""
    monkeypatch.setattr(logging.getLogger("gradcomp"), "hasHandlers", lambda: False)


@pytest.mark.parametrize("case", CASES)
def test_a_line_and_a_warning_at_the_first_step(case: str, no_handlers: None) -> None:
    make_optimizer, exchanges, remedy = CASES[case]
    model = net()
    optimizer = make_optimizer([*model.parameters()])
    session = session_of(optimizer, model, "topk")
    lines, caught = said(session, optimizer, steps=2)
    assert lines == [f"gradcomp: topk over a door exchanges {exchanges}"]
    assert session.reducer.stats()["exchanges"] == exchanges
    assert len(caught) == bool(remedy)
    for warning in caught:
        text = str(warning.message)
        assert text.startswith(f"topk exchanges {exchanges}: ") and remedy in text and REMEDY in text
        assert warning.filename == __file__


@pytest.mark.parametrize("spec", ["orq", "terngrad", "qsgd"])
def test_coarse_rounding_of_gradients_is_warned_of_where_a_momentum_is_missed(spec: str) -> None:
    model = net()
    for optimizer, warns in (optim.RMSprop(model.parameters()), 1), (optim.AdamW(model.parameters()), 0):
        found = said(session_of(optimizer, model, spec), optimizer, steps=2)[1]
        assert len(found) == warns, found
        for each in found:
            text, start = str(each.message), f"{spec} exchanges gradients, since RMSprop is unknown to the exchange: "
            assert text.startswith(start) and "rounded to few levels" in text and "let the spec be blocks" in text
    plain = optim.SGD(model.parameters(), 0.1)
    assert said(session_of(plain, model, spec), plain)[1] == []


@pytest.mark.parametrize(
    "spec",
    ["dense", "half", "blocks", "orq:levels=9", "orq:levels=5", "orq:momentum=0", "topk:momentum=0", "topk:feedback=false"],
)
def test_no_warning_where_nothing_waits_or_the_user_says_so(spec: str) -> None:
    model = net()
    optimizer = optim.RAdam(model.parameters())
    session = session_of(optimizer, model, spec)
    assert said(session, optimizer)[1] == []
    assert session.reducer.stats()["exchanges"].startswith("gradients")


def test_an_optimizer_of_copies_is_warned_of() -> None:
    """It is another optimizer than the session's, whose parameters have no copies in any session."""
    model, twin = net(), net()
    copies = [each.detach().clone().requires_grad_() for each in model.parameters()]
    for spec, optimizer, reason in (
        ("topk", optim.AdamW(copies), "sees them late and sparse.*, or let the spec be auto"),
        ("orq", optim.SGD(copies, 0.1, momentum=0.9), "sees them rounded to few levels.*, or let the spec be blocks"),
        ("blocks", optim.AdamW(copies), ""),
        ("topk:momentum=0", optim.AdamW(copies), ""),
        ("topk", optim.SGD(copies, 0.1), ""),
        ("topk", optim.AdamW(copies[:2]), ""),
        ("topk", optim.AdamW(twin.parameters()), ""),
    ):
        session, other = session_of(None, model, spec), session_of(None, twin, "blocks")
        texts = [str(each.message) for each in said(session, optimizer, steps=2)[1]]
        name = type(optimizer).__name__
        assert len(texts) == bool(reason) and all(
            re.search(f"{name} trains copies of the model's parameters: .* {reason}", each) for each in texts
        ), (spec, name, texts, other)
    with pytest.raises(ValueError, match="float32 ones of bfloat16 weights, leave optimizer= out, and let the spec be blocks"):
        session_of(optim.AdamW(copies), model, "topk")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("second", [optim.SGD, optim.AdamW])
def test_of_two_optimizers_without_a_list_one_with_momentum_is_missed(second: Any, given: bool) -> None:
    model = net()
    first = optim.SGD([*model.parameters()][:2], 0.1)
    other = second([*model.parameters()][2:], 0.1)
    session = session_of(first if given else None, model, "topk")
    found = [str(each.message) for each in said(session, first)[1] + said(session, other)[1] + said(session, first)[1]]
    if second is optim.SGD:
        assert found == []
    else:
        assert len(found) == 1 and "AdamW does not train all layers that are exchanged" in found[0]
        assert "Pass the list of all optimizers of the model" in found[0]


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
def test_an_optimizer_that_trains_more_than_the_model_is_told_to_train_less(kind: Any) -> None:
    """A list of optimizers would not help."""
    models = net(), net()
    optimizer = kind([each for model in models for each in model.parameters()], 0.1)
    sessions = [session_of(optimizer, model, "topk") for model in models]
    found = [str(each.message) for session in sessions for each in said(session, optimizer)[1]]
    if kind is optim.SGD:
        assert found == []
    else:
        assert len(found) == len(models)
        assert all("AdamW trains parameters that are not exchanged here" in each for each in found)
        assert all("Give each model inside DDP an optimizer of its own" in each and REMEDY in each for each in found)


def test_another_spec_may_warn_and_says_no_second_line(no_handlers: None) -> None:
    model = net()
    optimizer = optim.RAdam(model.parameters())
    session = session_of(optimizer, model, "dense")
    assert len(said(session, optimizer)[0]) == 1
    session.replace(make("topk"))
    lines, caught = said(session, optimizer, steps=2)
    assert lines == [] and len(caught) == 1


def by_hand() -> list[str]:
    """Exchange without any step, and then with one of an optimizer that was not passed."""
    ranks.join()
    logging.getLogger("gradcomp").hasHandlers = lambda: False  # type: ignore[method-assign]
    out, run = io.StringIO(), Training(DDP, net(), "topk", given=False)
    with contextlib.redirect_stderr(out):
        for _ in range(12):
            run.whole.zero_grad()
            run.whole(torch.ones(2, 20)).square().mean().backward()
        run.optimizer.step()
    return out.getvalue().splitlines()


@pytest.mark.slow
def test_a_program_that_moves_its_weights_by_hand_is_told_too() -> None:
    first, other = ranks.launch(by_hand, 2)
    assert first == [
        "gradcomp: topk over DDP exchanges gradients, since no optimizer is known; no optimizer has stepped yet",
        "gradcomp: topk over DDP exchanges gradients, since SGD has no momentum",
    ]
    assert other == []


def test_who_configures_logging_gets_a_record(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.INFO, logger="gradcomp"):
        assert said(session_of(optimizer, model, "topk"), optimizer)[0] == []
    assert [each.levelname for each in caplog.records] == ["INFO"]


def test_a_level_silences_the_line(no_handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("gradcomp"), "level", logging.WARNING)
    model = net()
    optimizer = optim.SGD(model.parameters(), 0.1)
    assert said(session_of(optimizer, model, "topk"), optimizer) == ([], [])


def program(door: str) -> dict[str, Any]:
    """Train a step or two by a door, with optimizers that are taken over and one that is not."""
    doors.join(door)
    found = {}
    for case, spec, given in (
        ("adamw", "topk", True),
        ("adamw", "auto", True),
        ("radam", "topk", True),
        ("sgd", "topk", False),
    ):
        model = net()
        inner = CASES[case][0]([*model.parameters()])
        out = io.StringIO()
        with contextlib.redirect_stderr(out), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = (
                Training(door, model, spec, inner=inner, given=given)
                if door != OWN
                else Training(door, model, spec, inner=inner)
            )
            run.train(2)
        texts = [(str(each.message), each.filename) for each in caught if "exchanges gradients" in str(each.message)]
        found[f"{case} {spec}"] = (out.getvalue().splitlines(), texts, run.handle.stats()["exchanges"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("door", [DDP, COMPRESSION, OWN])
def test_by_every_door(door: str) -> None:
    name = "DDP" if door == DDP else "Horovod"
    for rank, found in enumerate(ranks.launch(program, 2, door)):
        lines, texts, now = found["adamw topk"]
        line = f"gradcomp: topk over {name} exchanges AdamW's directions (moments taken over)"
        assert (lines, texts) == ([line] * (rank == 0), []) and now in line
        lines, texts, now = found["sgd topk"]  # not given: known from the first step on
        assert lines == [f"gradcomp: topk over {name} exchanges SGD's velocities (momentum taken over)"] * (rank == 0)
        lines, texts, now = found["adamw auto"]
        assert texts == [] and now == "dense, which auto tries: gradients"
        assert lines == [f"gradcomp: auto over {name} begins with dense, and chooses after some steps"] * (rank == 0)
        lines, texts, now = found["radam topk"]
        assert len(texts) == len(lines) == (rank == 0) and all(file.endswith("doors.py") for _, file in texts)


def clipped(run: Training, steps: int) -> None:
    """Clip after the exchange, as usual loops do."""
    for _ in range(steps):
        run.optimizer.zero_grad()
        run.backward()
        clip_grad_norm_(run.model.parameters(), 0.1)
        run.optimizer.step()


def dropped(run: Training, rank: int) -> None:
    """Drop the update of every other pass, as the discriminator of a GAN."""
    for _ in range(10):
        run.train(1)
        run.backward()


def scaled(run: Training, rank: int) -> None:
    scaling = GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        run.optimizer.zero_grad()
        scaling.scale(run.whole(next(run.data)[0]).sum()).backward()
        run.apply(scaling)


def without_moments(run: Training, rank: int) -> None:
    run.train(2)
    Training(DDP, run.model, "topk", inner=run.optimizer).train(2)


def removed_on_rank_1(run: Training, rank: int) -> None:
    run.backward()
    if rank == 1:
        run.model.first.weight.grad = None
    run.optimizer.step()


# For each: a training, a part of its warning, and the ranks that say it.
WARNED: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "clip": (lambda run, rank: clipped(run, 4), "were clipped to a norm of", (0,)),
    "dropped": (dropped, "take blocks or auto for both", (0,)),
    "scaled": (scaled, "does not know its scale", (0,)),
    "without moments": (without_moments, "goes on without the moments", (0,)),
    "removed": (removed_on_rank_1, "was set to None", (1,)),
}


def warned() -> dict[str, list[str]]:
    """Train so that something is to be warned of; and go on with a clip that a saved state knows."""
    ranks.join()
    rank, found = doors.rank(DDP), {}
    cases = {name: case[0] for name, case in WARNED.items()}
    resumed = Training(DDP, net(), "topk", momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = Training(DDP, net(), "topk", momentum=0.9)
        clipped(first, 4)
    resumed.handle.load_state_dict(first.handle.state_dict())
    cases["resumed"] = lambda run, rank: clipped(resumed, 4)
    for name, act in cases.items():
        run = Training(DDP, net(), "topk", momentum=0.9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act(run, rank)
        found[name] = [f"{linecache.getline(each.filename, each.lineno).strip()}: {each.message}" for each in caught]
    return found


@pytest.mark.slow
def test_rank_0_alone_warns_of_what_all_ranks_know_and_a_resumed_clip_is_known() -> None:
    for rank, found in enumerate(ranks.launch(warned, 2)):
        for name, (_, part, speakers) in WARNED.items():
            assert sum(part in each for each in found[name]) == (rank in speakers), (rank, name, found[name])
            line = ".backward(" if name == "dropped" else ".step("
            assert all(line in each.partition(":")[0] for each in found[name]), (name, found[name])
        assert found["resumed"] == []
