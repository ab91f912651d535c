"""auto: a tournament. Candidates take steps of the training itself, the fastest wins, and they compete again after a change.

`Policy` and `Drift` decide, from seconds alone. `Chooser` has them decide for a session, in turns that all ranks take.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Reduce
from gradcomp.engine.session import Session
from gradcomp.engine.updates.steps import log_on_rank_0
from gradcomp.networks import gather
from gradcomp.spec import LOSSES, Auto, kind_of, make, names

T = TypeVar("T")
# A course yields the number of steps until its next turn, and gets the seconds of each.
Course = Generator[int, list[float], T]

# Steps after a change that do not count: a new reducer allocates its memory, and capacities follow counts some steps later.
SETTLING, SETTLING_RESIDUAL = 1, 4
# Steps of a try that count. A try ends after the first one if that was STOP times as slow as the best candidate.
COUNTED, STOP = 5, 1.3
# Candidates within this factor of the best one are tried twice, and take part in the next tournament on the same link.
NEAR = 1.15
# A candidate that loses more must be this much faster. One that loses less may be slower by the other factor.
WORTH, NO_LONGER = 1.01, 1.005
# The tournaments on the same link whose times are joined. Older ones do not count: times may change little by little.
JOINED = 3
# The steps until the next tournament without any change: noise may have decided one. Twice as many follow one that comes
# out as before, up to MOST_STEPS.
AGAIN, MOST_STEPS = 300, 4800

# A check is odd if the step time differs by the first factor, or a probe by the second. ODD_CHECKS in a row are a change; up to
# MOST_ODD_CHECKS after tournaments that came out as before.
STEP_CHANGED, LINK_CHANGED, ODD_CHECKS, MOST_ODD_CHECKS = 1.25, 2.0, 2, 8
# The share of the time that probes may take, and the steps between two checks: at least, and at most.
PROBING, NEXT_CHECK = 0.0025, (10, 1000)
# The probes at the first check, and where the link seems slower: the fastest one counts. A probe reduces a part of the model's
# entries, up to a limit.
PROBES, PART, LONGEST = 5, 8, 2**18

# A step that takes this many times its neighbours' contains a pause, as for a validation, which is no cost of a tournament.
PAUSE = 3.0


class Candidate(NamedTuple):
    """A way to exchange gradients.

    spec: of the compressor, in canonical form. stock: the widest type in which stock torch or Horovod exchanges the gradients
    in the compressor's place; wider gradients are cast.
    """

    spec: str
    stock: torch.dtype | None = None

    def __str__(self) -> str:
        return {None: self.spec, torch.float32: "stock"}.get(self.stock, "stock in bf16")

    @property
    def keeps_residual(self) -> bool:
        """True if it exchanges updates, and keeps a residual."""
        return make(self.spec).traits.acts_on_updates


# The candidate of the first steps, and the one that users have without gradcomp.
EXACT = Candidate("dense")
STOCK = Candidate("dense", torch.float32)


def candidates(loss: str, stock: Collection[torch.dtype], shared_hosts: bool) -> list[Candidate]:
    """List the candidates, from the one that loses least, which sends the most bytes.

    stock: the types in which the stock framework can exchange the model's gradients; none if it cannot. shared_hosts: all hosts
    have equally many ranks, and several.
    """
    found = [each for each in (STOCK, Candidate("dense", torch.bfloat16)) if each.stock in stock] or [EXACT]
    for each in LOSSES[: LOSSES.index(loss) + 1]:
        plain = [spec for name in names() for spec in kind_of(name).for_auto.get(each, ())]
        if shared_hosts and each != LOSSES[0]:  # ranks of a host add up before they compress, which loses no more
            plain = [one for spec in plain for one in (f"{spec}{',' if ':' in spec else ':'}by_host=true", spec)]
        allowed = [Candidate(str(make(spec))) for spec in plain]
        found += sorted(allowed, key=lambda one: one.keeps_residual)
    return found


def best_of(ordered: Sequence[Candidate], seconds: Mapping[Candidate, float], present: Candidate) -> Candidate:
    """Return the best of the candidates that were tried; `present` if none was. ordered: from the one that loses least.

    A candidate between WORTH and NO_LONGER does not replace the present one, so that candidates do not come and go.
    """
    tried = [each for each in ordered if each in seconds]
    best = present if present in tried or not tried else tried[0]
    for each in tried:
        loses_less = tried.index(each) < tried.index(best)
        if seconds[each] < seconds[best] * (NO_LONGER if loses_less else 1 / WORTH):
            best = each
    return best


class Policy:
    """The tournaments of one training: which candidate takes the next steps, and which one wins. All ranks decide alike.

    seconds: a step's, of each candidate of the last tournament. rest: the steps until the next one, if nothing changes.
    odd_checks: the number of odd checks in a row that are a change.
    """

    def __init__(self) -> None:
        self.seconds: dict[Candidate, float] = {}
        self.rest, self.odd_checks = AGAIN, ODD_CHECKS
        self._history: list[dict[Candidate, float]] = []
        self._stopped, self._slow = set[Candidate](), set[Candidate]()
        self._counted: dict[Candidate, list[float]] = {}

    def forget(self) -> None:
        """Forget the tournaments until now: step times or the link have changed."""
        self._history.clear()
        self._stopped.clear()
        self._slow.clear()

    def choose(
        self, ordered: Sequence[Candidate], present: Candidate
    ) -> Generator[tuple[Candidate, int], Sequence[float] | None, Candidate]:
        """Play a tournament. Yield a candidate and steps to count; return the winner.

        Resumed with the seconds of the candidate's steps, the counted ones last; None if the candidate is out of reach.
        """
        if self.rest == MOST_STEPS:  # something may have changed little by little
            self._slow.clear()
        field = [each for each in ordered if each == present or each not in self._slow]
        self._counted = {}
        for each in reversed(field):  # from the fewest bytes, so that a slow link costs few long steps
            seconds = yield each, 1
            if seconds is not None:
                self._counted[each] = [seconds[-1]]
                if min(seconds) <= STOP * min(self._medians.values()):
                    self._counted[each] += (yield each, COUNTED - 1) or ()
        medians = self._medians
        near = [each for each in field if each in medians and medians[each] <= NEAR * min(medians.values())]
        for each in near if len(near) > 1 else ():  # and back, so that times which drift are no advantage
            self._counted[each] += ((yield each, COUNTED) or ())[-COUNTED:]
        medians = self._medians
        stopped = {each for each, counted in self._counted.items() if len(counted) == 1}
        self._history = [*self._history[1 - JOINED :], {each: medians[each] for each in medians if each not in stopped}]
        self.seconds = medians | self._joined()
        slow = {each for each, seconds in self.seconds.items() if seconds > NEAR * min(self.seconds.values())}
        # A pause may have stopped a try. The next one decides.
        self._slow |= slow & self._stopped | slow - stopped
        self._stopped = stopped
        winner = best_of(ordered, self.seconds, present)
        same = winner == present
        self.rest = min(2 * self.rest, MOST_STEPS) if same else AGAIN
        self.odd_checks = min(2 * self.odd_checks, MOST_ODD_CHECKS) if same else ODD_CHECKS
        return winner

    @property
    def _medians(self) -> dict[Candidate, float]:
        return {each: statistics.median(seconds) for each, seconds in self._counted.items()}

    def _joined(self) -> dict[Candidate, float]:
        """Return the last tournament's seconds, with the ratios of the last ones: they vary less with the machine's load."""
        last = self._history[-1]
        common = [each for each in last if all(each in before for before in self._history)]
        if not common:
            return last
        levels = [statistics.fmean(math.log(each[one]) for one in common) for each in self._history]
        joined = list(zip(self._history, levels, strict=True))
        ratios = {one: [math.log(each[one]) - level for each, level in joined if one in each] for one in last}
        return {one: math.exp(levels[-1] + statistics.fmean(each)) for one, each in ratios.items()}


class Drift:
    """The checks since a tournament, of the time of a step and of a probe of the link, each compared with the first one.

    needed: odd checks in a row that are a change. heeds_steps: step times alone may be one.
    """

    def __init__(self, needed: int, heeds_steps: bool):
        self._needed, self._heeds_steps = needed, heeds_steps
        self.usual: tuple[float, float] | None = None  # the first check
        self._odd = 0
        self.link_changed = False

    @property
    def changed(self) -> bool:
        """True if step times or the link have changed. link_changed: the link has."""
        return self._odd >= self._needed

    def seems_slower(self, probe: float) -> bool:
        """Return True if a probe took so long that others are to confirm it: noise makes a link slower only."""
        return self.usual is not None and probe > LINK_CHANGED * self.usual[1]

    def note(self, step: float, probe: float) -> None:
        """Note the seconds of a step and of a probe. A faster link is a change at once: users lose most until it is seen."""
        self.usual = self.usual or (step, probe)
        usual_step, usual_probe = self.usual
        self.link_changed = _factor(probe, usual_probe) > LINK_CHANGED
        odd = self.link_changed or (self._heeds_steps and _factor(step, usual_step) > STEP_CHANGED)
        self._odd = self._odd + (ODD_CHECKS if probe * LINK_CHANGED < usual_probe else 1) if odd else 0

    def interval(self, step: float, took: float) -> int:
        """Return the steps until the next check, for a step and a check that take these seconds."""
        rare = int(min(max(NEXT_CHECK[0], took / (PROBING * step)), NEXT_CHECK[1]))
        return NEXT_CHECK[0] if self._odd else rare


def _factor(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))


class Chooser:
    """auto on one rank, which replaces its session's compressor in turns. All ranks take them before the same steps.

    session: outlives the chooser, which must not keep it alive. stock: the types in which its door can exchange past it.
    """

    def __init__(self, session: Session, auto: Auto, stock: Sequence[torch.dtype]):
        self._session, self._auto, self._stock = session, auto, stock
        layers = session.slots.layers.values()
        self._device = next((layer.device for layer in layers), torch.device("cpu"))
        self._probed = max(1, min(LONGEST, sum(layer.size for layer in layers) // PART))
        self._changes = 0
        self._begin(EXACT)

    def __str__(self) -> str:
        return str(self._auto)

    def _begin(self, present: Candidate) -> None:
        self._present, self._policy = present, Policy()
        self._refused: dict[Candidate, str] = {}
        self._choices, self._last = 0, dict[str, Any](reason="the first steps are measured")
        self._said: Candidate | None = None  # that rank 0 has named in a line
        self._times: list[float] = []
        self._ended, self._turn, self._timed = time.perf_counter(), 0.0, True
        self._spent, self._steps = 0.0, 0  # of a tournament
        self._course = self._run()
        self._left = next(self._course)

    @property
    def due(self) -> bool:
        """True if a turn comes before the next exchange."""
        return self._left <= 0

    def take(self) -> None:
        """Take the turn."""
        times, self._times = self._times, []
        began = time.perf_counter()
        self._left = self._course.send(times)
        self._turn += time.perf_counter() - began

    def note_step(self) -> None:
        """Note a finished step. Its seconds do not contain its turn."""
        if self._timed:
            self._wait()
        now = time.perf_counter()
        self._times.append(now - self._ended - self._turn)
        self._spent += self._turn
        self._ended, self._turn, self._left = now, 0.0, self._left - 1

    def restart(self, spec: str) -> Compressor:
        """Begin anew in a meeting: the ranks may be others, or go on from another state. Return the spec's compressor."""
        self._begin(Candidate(spec))
        return make(spec)

    def exchanges(self, content: str) -> str:
        """Describe what the ranks exchange, and why. content: of the present candidate's updates."""
        trial = self._timed or not self._choices
        why = "which auto tries" if trial else f"as auto chose after step {self._last['after_step']}"
        return f"{self._present}, {why}: {content}"

    def report(self) -> dict[str, Any]:
        """Return the choice, and its reason."""
        refused = {str(candidate): why for candidate, why in self._refused.items()}
        known = {"loss": self._auto.loss, "way": str(self._present), "changes": self._changes, "choices": self._choices}
        return {**known, "refused": refused, **self._last}

    def _run(self) -> Course[None]:
        yield 1 + SETTLING  # the network may not be initialised before
        if self._session.network.world.size == 1:
            self._to(self._candidates()[0])
            self._timed, self._choices = False, 1
            self._note_choice("one rank exchanges nothing", {}, 0.0)
            while True:
                yield NEXT_CHECK[1]
        heeds_steps = True
        while True:
            self._timed = True
            yield from self._choose()
            self._timed = False
            drift = yield from self._watch(heeds_steps)
            # The steps of some trainings always vary. Step times are then no reason for one tournament after the other.
            heeds_steps = not drift.changed or drift.link_changed
            if drift.changed:
                self._policy.forget()

    def _candidates(self) -> list[Candidate]:
        session = self._session
        # The session itself must exchange gradients that are watched.
        stock = self._stock[:1] if session.reducer.observer is not None else self._stock
        return candidates(self._auto.loss, stock, session.network.world.shares_hosts)

    def _choose(self) -> Course[None]:
        """Play a tournament, and go on with its winner."""
        ordered = self._candidates()
        self._spent, self._steps = 0.0, 0
        game = self._policy.choose(ordered, self._present)
        candidate, counted = next(game)
        while True:
            before, seconds = self._changes, None
            if self._to(candidate):
                settling = SETTLING_RESIDUAL if candidate.keeps_residual else SETTLING
                steps = (settling if self._changes > before else 0) + counted
                seconds = self._means((yield from self._take_steps(steps)))
            try:
                candidate, counted = game.send(seconds)
            except StopIteration as end:
                winner: Candidate = end.value
                break
        seconds_of = self._policy.seconds
        self._to(winner)
        usual = seconds_of.get(self._present, 0.0)
        (cost,) = self._means([self._spent - self._steps * usual])
        self._choices += 1
        self._note_choice(_reason(self._present, seconds_of), seconds_of, cost)
        if self._present != self._said:
            self._said = self._present
            text = f"gradcomp: auto uses {self._present} after step {self._last['after_step']}: {self._last['reason']}"
            log_on_rank_0(text, self._session.network)

    def _note_choice(self, reason: str, seconds: Mapping[Candidate, float], cost: float) -> None:
        tried = {str(candidate): each for candidate, each in seconds.items()}
        self._last = {"reason": reason, "after_step": self._session.reducer.steps_done, "seconds": tried, "cost_seconds": cost}

    def _watch(self, heeds_steps: bool) -> Course[Drift]:
        """Check steps and the link now and then, until they have changed, or for long."""
        yield SETTLING_RESIDUAL
        drift, left, next_check = Drift(self._policy.odd_checks, heeds_steps), self._policy.rest, NEXT_CHECK[0]
        while not drift.changed and left > 0:
            steps = min(next_check, left)
            times = yield steps
            left -= steps
            began, count = time.perf_counter(), PROBES if drift.usual is None else 1
            fastest = self._fastest(count)
            step, probe, took = self._means([statistics.median(times), fastest, (time.perf_counter() - began) / count])
            if drift.seems_slower(probe):
                (probe,) = self._means([min(fastest, self._fastest(PROBES - 1))])
            drift.note(step, probe)
            next_check = drift.interval(step, took)
        return drift

    def _fastest(self, probes: int) -> float:
        """Return the seconds of the fastest of some probes. A short exchange comes before each, in which ranks wait."""
        found = []
        for _ in range(probes):
            self._session.network.start(Reduce(torch.zeros(1, device=self._device)), "auto's choice, short")()
            self._wait()
            began = time.perf_counter()
            self._session.network.start(Reduce(torch.zeros(self._probed, device=self._device)), "auto's choice, long")()
            self._wait()
            found.append(time.perf_counter() - began)
        return min(found)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _take_steps(self, count: int) -> Course[list[float]]:
        """Take some steps of a tournament, and count their seconds among its cost, without pauses."""
        seconds = yield count
        least = min(seconds)
        self._spent += sum(each if each < PAUSE * least else least for each in seconds)
        self._steps += len(seconds)
        return seconds

    def _to(self, candidate: Candidate) -> bool:
        """Go on with another candidate. Return False if the session has another one: this one does not suit the training."""
        if candidate != self._present and candidate not in self._refused:
            self._install(candidate)
        return candidate == self._present

    def _install(self, candidate: Candidate) -> bool:
        """Install a candidate, on all ranks in the same turn. Return False if it does not suit the training."""
        if candidate.spec == self._present.spec:
            self._session.resume.change(None, candidate.stock)
        else:
            try:
                self._session.resume.change(make(candidate.spec), candidate.stock)
            except ValueError as error:  # on all ranks alike
                self._refused[candidate] = str(error)
                return False
        self._present, self._changes = candidate, self._changes + 1
        return True

    def _means(self, own: Sequence[float]) -> list[float]:
        """Return the means of some figures over the ranks, equal on all of them."""
        network = self._session.network
        figures = torch.tensor(own, dtype=torch.float64).to(network.device)
        every = gather(network, figures, f"auto's choice, figures {len(own)}")()
        return [statistics.fmean(each) for each in zip(*(of_rank.tolist() for of_rank in every), strict=True)]


def _reason(chosen: Candidate, seconds: Mapping[Candidate, float]) -> str:
    if chosen not in seconds:
        return "no other candidate suits the training now"
    first, *others = sorted(seconds, key=lambda each: (each != chosen, seconds[each]))
    beside = ", ".join(f"{each} {1e3 * seconds[each]:.3g} ms" for each in others)
    return f"a step takes {1e3 * seconds[first]:.3g} ms" + (f", beside {beside}" if beside else "")
