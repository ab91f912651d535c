"""The looks after a choice: what steps and the link take now, whether that has changed, and when to look again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

# The part of the steps' time that looking at them may take, and the steps between two looks, at least and at most. After an odd
# look the next one comes as soon as it may.
LOOKING, NEXT_LOOK = 0.0025, (10, 1000)
# A step time that differs by this factor, or a link's by the other one, at so many looks in a row, is a change. A look at which
# the link is faster counts LOOKS times: noise makes it slower only.
STEP_CHANGED, LINK_CHANGED, LOOKS = 1.25, 2.0, 2
# The probes whose fastest tells what is usual, and whether a link is slower now.
PROBES = 5


class Looks:
    """The looks since one choice, which all ranks take together.

    probe: sends a long message, and returns its seconds. means: takes means over the ranks. needed: odd looks in a row that
    are a change. patient_until: the step before which a change of step times alone is none.
    """

    def __init__(
        self, probe: Callable[[], float], means: Callable[[Sequence[float]], list[float]], needed: int, patient_until: float
    ):
        self._probe, self._means, self._needed, self._patient_until = probe, means, needed, patient_until
        self._usual: tuple[float, float] | None = None  # the seconds of a step and of a probe
        self._odd = 0
        self.link_changed = False
        self.interval = NEXT_LOOK[0]

    @property
    def changed(self) -> bool:
        """True if steps or the link have changed. link_changed: the link has."""
        return self._odd >= self._needed

    def take(self, seconds: Sequence[float], step: int) -> None:
        """Look. seconds: of the steps since the last look. step: those done."""
        began = time.perf_counter()
        count = 1 if self._usual else PROBES
        fastest = self._fastest(count)
        usual_now, link, took = self._means([statistics.median(seconds), fastest, (time.perf_counter() - began) / count])
        if self._usual is not None and link > LINK_CHANGED * self._usual[1]:
            (link,) = self._means([min(fastest, self._fastest(PROBES - 1))])
        self._usual = self._usual or (usual_now, link)
        before, link_before = self._usual
        steps_changed = _apart(usual_now, before) > STEP_CHANGED and step >= self._patient_until
        self.link_changed = _apart(link, link_before) > LINK_CHANGED
        more = LOOKS if link * LINK_CHANGED < link_before else 1
        self._odd = self._odd + more if steps_changed or self.link_changed else 0
        rare = int(min(max(NEXT_LOOK[0], took / (LOOKING * usual_now)), NEXT_LOOK[1]))
        self.interval = NEXT_LOOK[0] if self._odd else rare

    def _fastest(self, count: int) -> float:
        return min(self._probe() for _ in range(count))


def _apart(one: float, other: float) -> float:
    return max(one, other) / max(1e-9, min(one, other))
