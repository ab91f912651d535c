"""States as files hold them: the shares of one rank or of several, with format, spec and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gradcomp import saved
from gradcomp.engine.states import checkpoint

# The format of a state. Increase it when a state's content or a knob's default changes.
FORMAT = 7


class Place(NamedTuple):
    """A rank's number among the ranks, and their number."""

    rank: int
    ranks: int


class Taken(NamedTuple):
    """The shares that a rank takes from a state, by the rank that saved them, and the factor for their sum.

    of: the place whose residual the rank then has. adam: the shares whose mean of Adam's moments a rank without shares takes.
    """

    shares: Mapping[int, Mapping[str, Any]]
    factor: float
    of: Place
    adam: Mapping[int, Mapping[str, Any]] = {}


def pack(spec: str, ranks: int, shares: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Make a state. Its keys tell the ranks' shares apart, also where a tool collects the states of all ranks in one file."""
    return {
        "format": FORMAT,
        "spec": spec,
        "ranks": ranks,
        "of_rank": {str(rank): dict(share) for rank, share in shares.items()},
    }


class States:
    """The shares of one state, or of a list of states, checked to belong together."""

    def __init__(self, given: Any, spec: str):
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        states = list(given) if is_list else [given]
        if not states:
            raise ValueError("load_state_dict() got an empty list; pass the states of all ranks")
        self.ranks = 0
        self.shares: dict[int, Mapping[str, Any]] = {}
        for state in states:
            if not isinstance(state, Mapping):
                raise TypeError(
                    f"load_state_dict() got a {type(state).__name__}; pass the result of state_dict(), or a list of the "
                    "results of all ranks"
                )
            self._add(state, spec)
        self.steps = checkpoint.saved_steps(self.shares)
        self.sums = any(share.get("sums") is True for share in self.shares.values())

    def take(self, here: Place | None) -> Taken:
        """Choose a rank's shares. A new rank has none: nothing waits there, and it takes the mean of all moments of Adam.

        An update is a mean over the ranks. The factor keeps the sum of what waits: an entry of one rank of two weighs half, and
        of one rank of four a quarter, unless updates are sums.
        """
        if here is None:
            if len(self.shares) > 1:
                raise RuntimeError(
                    "load_state_dict() got the states of several ranks before hvd.init(), or outside the process set; call "
                    "hvd.init() first, or pass this rank's own state"
                )
            (rank,) = self.shares
            return Taken(self.shares, 1.0, Place(rank, self.ranks))
        rank, ranks = here
        factor = 1.0 if self.sums else ranks / self.ranks
        if self.ranks == ranks and rank in self.shares:
            return Taken({rank: self.shares[rank]}, 1.0, here)
        if self.ranks != ranks and len(self.shares) == self.ranks:
            of_rank = {each: self.shares[each] for each in range(rank, self.ranks, ranks)}
            return Taken(of_rank, factor, here, {} if of_rank else self.shares)
        if self.ranks < ranks and rank in self.shares:
            return Taken({rank: self.shares[rank]}, factor, Place(rank, self.ranks))
        found = ", ".join(map(str, sorted(self.shares)))
        remedy = "pass the list of all ranks' states, on all ranks"
        if self.ranks == ranks:
            remedy = "pass this rank's own state, or the list of all ranks' states"
        raise ValueError(f"the state is of rank {found} of {self.ranks}, but this is rank {rank} of {ranks}; {remedy}")

    def _add(self, state: Mapping[str, Any], spec: str) -> None:
        if not {"format", "spec"} & state.keys():
            inside = next(
                (repr(key) for key, value in state.items() if isinstance(value, Mapping) and "of_rank" in value), None
            )
            raise ValueError(
                f"this is no state of gradcomp: it has {', '.join(map(repr, [*state][:4])) or 'nothing'}; pass "
                + (f"its entry {inside}" if inside else "the result of state_dict() of the handle or Compression")
            )
        if (found := state.get("format", 1)) != FORMAT:
            raise ValueError(
                f"the state has format {found}, but this gradcomp reads format {FORMAT}: another version saved it; continue "
                "with that version, or without the state"
            )
        if not isinstance(theirs := saved.entry(state, "spec"), str):
            raise ValueError(f"the state has the spec {theirs!r}, which is no text; the state is damaged; load another one")
        if theirs != spec:
            raise ValueError(
                f"the state was saved with {theirs!r} and cannot continue with {spec!r}; use the same spec: {theirs!r}, "
                f"and then change({spec!r})"
            )
        ranks = saved.read_int(state, "ranks", 1)
        if self.ranks not in (0, ranks):
            raise ValueError(
                f"the states are of {self.ranks} and of {ranks} ranks; load states that all ranks saved after the same step"
            )
        self.ranks = ranks
        shares = saved.table(state, "of_rank")
        if not shares:
            raise ValueError("the state has no rank's share: the state is damaged; load another one")
        for key, share in shares.items():
            rank = saved.check_int(int(key) if str(key).isdecimal() else key, "of_rank", 0, ranks - 1)
            if rank in self.shares:
                raise ValueError(f"the states of rank {rank} were passed twice; pass the state of each rank once")
            if not isinstance(share, Mapping):
                raise ValueError(f"of_rank holds a {type(share).__name__}: the state is damaged; load another one")
            self.shares[rank] = share


def spec_of(state: Any) -> str | None:
    """Find the spec of a state, or of a list of states. Return None if there is none to be read."""
    first = state if isinstance(state, Mapping) else next(iter(state), None) if isinstance(state, Sequence) else None
    spec = first.get("spec") if isinstance(first, Mapping) else None
    return spec if isinstance(spec, str) else None
