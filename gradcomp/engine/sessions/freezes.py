"""Which parameters are frozen now, and a word about those that were frozen since the exchange was set up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch.nn import Parameter

log = logging.getLogger("gradcomp")

# Names in the word.
MOST_NAMES = 3


class Freezes:
    """The parameters, by name, of which some may be frozen in mid-training."""

    def __init__(self, parameters: Mapping[str, Parameter]):
        self._parameters = parameters
        self._told: set[str] = set()

    def of(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of those among some layers that are frozen."""
        return [i for i, name in enumerate(names) if not self._parameters[name].requires_grad]

    def look(self, rank: int) -> None:
        """Tell once of each layer that was frozen."""
        new = sorted(name for name, each in self._parameters.items() if not each.requires_grad and name not in self._told)
        if not new:
            return
        self._told.update(new)
        names = ", ".join(map(repr, new[:MOST_NAMES])) + (f" and {n} more" if (n := len(new) - MOST_NAMES) > 0 else "")
        log.info(
            "gradcomp: rank %d: frozen now: %s. Their residuals wait until they are unfrozen. Freeze them on all ranks: the "
            "gradients of other ranks move them on all",
            rank,
            names,
        )
