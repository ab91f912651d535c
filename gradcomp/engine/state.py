"""The state of a session: saved by rank, loaded by any number of ranks, and carried over to another spec.

A rank's share holds residuals and ages by layer, and each compressor's own state by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.by_layer import ByLayer
from gradcomp.core.compressor import Compressor, Layout
from gradcomp.engine.bucket import Bucket
from gradcomp.engine.feedback import Feedback
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.slots import Slots
from gradcomp.engine.updates.progress import Copy, Share

# The format of a state. Increase it when a state's content or a knob's default changes. Those since the oldest load, too. Until
# 9, a residual was of gradients.
FORMAT, OLDEST = 10, 10
# The key of residuals and ages in a share's layers.
_PART = "feedback"


class Place(NamedTuple):
    """A rank's number among the ranks, and their number."""

    rank: int
    ranks: int


class Taken(NamedTuple):
    """The shares that a rank takes from a state, by the rank that saved them, and the factor for their sum.

    of: the place of that residual.
    """

    shares: Mapping[int, Mapping[str, Any]]
    factor: float
    of: Place


def residual_views(reducer: Reducer) -> dict[str, Tensor]:
    """Slice the residuals into layers, by name. Layers without error feedback are left out."""
    views: dict[str, Tensor] = {}
    for bucket in reducer.buckets:
        if bucket.progress is not None:
            bucket.put_back()
            views |= bucket.layout.views(bucket.progress.residual)
    return views


def residuals(reducer: Reducer, slots: Slots) -> dict[str, Tensor]:
    """Copy the residuals, by name, in the parameters' shapes. They are zeros where there is no error feedback."""
    flat = {slot.name: torch.zeros(slot.layer.size, device=slot.layer.device) for slot in slots.slots}
    for bucket in reducer.buckets:
        flat |= bucket.copied_residual()
    return {slot.name: slot.shaped(flat[slot.name]) for slot in slots.slots}


def save_share(
    reducer: Reducer, shapes: Mapping[str, str], *, sums: bool = False, apart: bool = False, copy: Copy = Tensor.clone
) -> dict[str, Any]:
    """Copy all that the next step depends on.

    shapes: the shape and the order of memory of every layer. sums: updates are sums over the ranks, not means. apart: updates
    were exchanged before gradients. copy: copies a layer's array.
    """
    share = _save_progress(reducer, copy)
    for bucket, part, own in zip(reducer.buckets, reducer.part_numbers, share["buckets"], strict=True):
        own["part"] = part
        own["compressor"] = bucket.compressor.save(bucket.inner)
        own["noise"] = None if bucket.progress is None else bucket.progress.noise.save()
    return {"steps": reducer.steps_done, "sums": sums, "apart": apart, "shapes": dict(shapes), **share}


def _save_progress(reducer: Reducer, copy: Copy) -> dict[str, Any]:
    """Copy residuals and ages, by layer, and the steps of each bucket."""
    layers: dict[str, dict[str, Tensor]] = {}
    for bucket in reducer.buckets:
        bucket.put_back()
        if bucket.progress is not None:
            for field, values in bucket.progress.save(copy).items():
                layers.setdefault(field, {}).update(values)
    buckets = [{"layers": list(bucket.layout.names), "steps": bucket.steps} for bucket in reducer.buckets]
    return {"layers": {_PART: layers} if layers else {}, "buckets": buckets}


def load_shares(reducer: Reducer, taken: Taken, steps: int, *, trusted: bool = False) -> Callable[[], None]:
    """Check shares of the same layers and spec. Return a function that loads them, and cannot fail.

    The residual becomes the sum of the shares' times the factor, or zero without any. A compressor's own state comes from the
    first share, and only if a bucket has the same layers; other buckets keep their own.

    steps: that the training has done. trusted: the shares come from this process, and need not be finite.
    """
    own = _readers(taken.shares, trusted)
    loads: list[Callable[[], None]] = []
    inner: list[tuple[Bucket, int, Any]] = []
    for bucket in reducer.buckets:
        bucket.put_back()
        if bucket.progress is not None:
            loads.append(bucket.progress.load([each.share for each in own], taken.factor))
        loads.append(_load_noise(bucket, own))
        inner.append((bucket, *_load_inner(bucket, own, steps)))

    def load() -> None:
        reducer.steps_done = steps
        for each in loads:
            each()
        for bucket, done, state in inner:
            bucket.steps, bucket.inner = done, state

    return load


def _load_noise(bucket: Bucket, own: Sequence[_Reader]) -> Callable[[], None]:
    """Return a function that continues with the first share's comparisons of noise."""
    record, progress = own[0].record(bucket.layout) if own else None, bucket.progress
    if record is None or progress is None or saved.entry(record, "noise") is None:
        return lambda: None
    noise, numbers = progress.noise, saved.numbers_of(record, "noise", 4)
    return lambda: noise.load(numbers)


def saved_parts(shares: Mapping[int, Mapping[str, Any]], shapes: Mapping[str, str]) -> dict[str, Hashable] | None:
    """Check that shares are of layers of these shapes and orders of memory.

    Return the part of each layer, as the first share's buckets have it. None: all are of one part.
    """
    for rank, share in shares.items():
        _check_shapes(shapes, share, f"rank {rank}: " if len(shares) > 1 else "")
    records = saved.sequence(next(iter(shares.values())), "buckets") if shares else ()
    parts = {name: saved.read_int(each, "part", 0) for each in records for name in saved.names(each, "layers")}
    return {name: parts.get(name, 0) for name in shapes} if len({*parts.values()}) > 1 else None


class _Reader(NamedTuple):
    """One rank's share. records: of its buckets, by each of their layers."""

    share: Share
    records: Mapping[str, Mapping[str, Any]]

    def record(self, layout: Layout) -> Mapping[str, Any] | None:
        """Return the record of the bucket with these layers."""
        found = self.records.get(layout.names[0])
        return found if found is None or tuple(found["layers"]) == layout.names else None


def _readers(shares: Mapping[int, Mapping[str, Any]], trusted: bool) -> list[_Reader]:
    readers = []
    for rank, share in shares.items():
        records = {name: each for each in saved.sequence(share, "buckets") for name in saved.names(each, "layers")}
        layers = saved.table_or_empty(saved.table_or_empty(share, "layers"), _PART)
        readers.append(_Reader(Share(layers, trusted, prefix=f"rank {rank}: " if len(shares) > 1 else ""), records))
    return readers


def _load_inner(bucket: Bucket, own: Sequence[_Reader], steps: int) -> tuple[int, Any]:
    """Return a bucket's steps, and the compressor's state, as the first share has them."""
    record = own[0].record(bucket.layout) if own else None
    if own and record is None:
        return steps, bucket.inner
    inner = bucket.compressor.init(bucket.layout, bucket.seed)
    if record is None:
        return steps, inner
    bucket.compressor.load(inner, saved.table_or_empty(record, "compressor"))
    return saved.read_int(record, "steps"), inner


def _check_shapes(shapes: Mapping[str, str], share: Mapping[str, Any], prefix: str) -> None:
    """Refuse a share of a model with other layers."""
    theirs = saved.table(share, "shapes")
    if different := sorted(map(str, shapes.keys() ^ theirs.keys())):
        raise ValueError(
            f"{prefix}the state does not fit the model: only one of them has {', '.join(different[:3])}; load it into the "
            "model that saved it, and freeze layers after the exchange is made"
        )
    for name, shape in shapes.items():
        if theirs[name] != shape:
            raise ValueError(
                f"{prefix}the state does not fit the model: {name!r} has shape {shape!r}, in the state "
                f"{saved.shown(theirs[name])}; load it into the model that saved it"
            )


def in_main_memory(value: Any) -> Any:
    """Copy all tensors of a share to main memory."""
    if isinstance(value, Tensor):
        return value.to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: in_main_memory(each) for key, each in value.items()}
    return [in_main_memory(each) for each in value] if isinstance(value, list) else value


# --- The shares of several ranks, as files hold them


def pack(spec: str, ranks: int, shares: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Make a state. Its keys tell the ranks' shares apart, also where a tool collects the states of all ranks in one file."""
    of_rank = {str(rank): dict(share) for rank, share in shares.items()}
    return {"format": FORMAT, "spec": spec, "ranks": ranks, "of_rank": of_rank}


def saved_residual(state: Mapping[str, Any], name: str, like: Tensor) -> Tensor:
    """Return a layer's residual in the state of one rank, which was checked, in the form of a tensor; zeros without one."""
    (share,) = state["of_rank"].values()
    found = share["layers"].get(_PART, {}).get("residual", {}).get(name)
    return torch.zeros_like(like) if found is None else found.to(like).view(like.shape)


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
        self.steps: int = _equal(self.shares, "steps", saved.read_int)
        self.sums: bool = _equal(self.shares, "sums", saved.read_bool)
        # Older states of this format have no such entry.
        self.apart = any(saved.read_bool(share, "apart") for share in self.shares.values() if "apart" in share)

    def take(self, here: Place | None) -> Taken:
        """Choose a rank's shares. A new rank has none: its residual is empty.

        An update is a mean over the ranks. The factor keeps the sum of the residuals: an entry of one rank of two weighs half,
        and of one rank of four a quarter, unless updates are sums.
        """
        if here is None:
            if len(self.shares) > 1:
                raise RuntimeError(
                    "load_state_dict() got the states of several ranks, but this rank's place is unknown: the network is not "
                    "initialized, or not for this rank; initialize it first, or pass this rank's own state"
                )
            (rank,) = self.shares
            return Taken(self.shares, 1.0, Place(rank, self.ranks))
        rank, ranks = here
        factor = 1.0 if self.sums else ranks / self.ranks
        if self.ranks == ranks and rank in self.shares:
            return Taken({rank: self.shares[rank]}, 1.0, here)
        if self.ranks != ranks and len(self.shares) == self.ranks:
            of_rank = {each: self.shares[each] for each in range(rank, self.ranks, ranks)}
            return Taken(of_rank, factor, here)
        if self.ranks < ranks and rank in self.shares:
            return Taken({rank: self.shares[rank]}, factor, Place(rank, self.ranks))
        found = ", ".join(map(str, sorted(self.shares)))
        remedy = "pass the list of all ranks' states, on all ranks"
        if self.ranks == ranks:
            remedy = (
                "pass this rank's own state, or the list of all ranks' states; where only this one was saved, leave "
                "load_state_dict() out on all ranks: residual and momentum begin at zero"
            )
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
        if not isinstance(found := state.get("format", 1), int) or not OLDEST <= found <= FORMAT:
            raise ValueError(
                f"the state has format {saved.shown(found)}, but this gradcomp reads formats {OLDEST} to {FORMAT}: another "
                "version saved it; continue with that version, or without the state"
            )
        if not isinstance(theirs := saved.entry(state, "spec"), str):
            raise ValueError(f"the state has the spec {saved.shown(theirs)}, which is no text; it is damaged; load another one")
        if theirs != spec:
            raise ValueError(
                f"the state was saved with {theirs!r} and cannot continue with {spec!r}; use the same spec: {theirs!r}, "
                f"and then set_spec({spec!r})"
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
    """Find the spec of a state, or of a list of states. Return None if there is none."""
    first = state if isinstance(state, Mapping) else next(iter(state), None) if isinstance(state, Sequence) else None
    spec = first.get("spec") if isinstance(first, Mapping) else None
    return spec if isinstance(spec, str) else None


def _equal(shares: Mapping[int, Mapping[str, Any]], name: str, read: Callable[[Any, str], Any]) -> Any:
    """Return a value that the shares of all ranks have alike."""
    first, *others = [(rank, read(share, name)) for rank, share in shares.items()]
    for rank, value in others:
        if value != first[1]:
            raise ValueError(
                f"the states are of different {name}: that of rank {first[0]} has {first[1]}, that of rank {rank} has {value}; "
                "load states that all ranks saved after the same step"
            )
    return first[1]


# --- Another spec, and another number of ranks


def successor(compressor: Compressor, old: Reducer) -> Compressor:
    """Prepare a compressor to follow an old reducer: add error feedback if the old one has residuals to carry over."""
    if not old.keeps_residual:
        return compressor
    if isinstance(compressor, ByLayer):
        rules = tuple((pattern, successor(chosen, old)) for pattern, chosen in compressor.rules)
        return ByLayer(rules, successor(compressor.default, old))
    if not isinstance(compressor, Feedback):
        return Feedback(compressor)
    if compressor.feedback:
        return compressor
    if compressor.inner.traits.fed_back:
        raise ValueError(f"{compressor} would lose the residual, which has not been sent yet; use a spec with error feedback")
    try:
        return replace(compressor, feedback=True)
    except ValueError as error:
        raise ValueError(f"{compressor} would lose the residual, which has not been sent yet; {error}") from None


def carry(old: Reducer, new: Reducer) -> Reducer:
    """Copy residuals, and the ages of their entries, from one reducer to another with the same layers. Return the new one."""
    before = Share(_save_progress(old, copy=lambda view: view)["layers"].get(_PART, {}), trusted=True, partial=True)
    for bucket in new.buckets:
        if bucket.progress is not None and before.layers.get("residual", {}).keys() & {*bucket.layout.names}:
            bucket.progress.load([before], 1.0)()
    new.steps_done = old.steps_done
    return new


def regroup(old: Reducer, new: Reducer) -> Reducer:
    """Carry over all that buckets of other groups of layers can go on with, under the same spec. Return the new reducer."""
    carry(old, new)
    before = {name: bucket for bucket in old.buckets for name in bucket.layout.names}
    for bucket in new.buckets:
        theirs = before[bucket.layout.names[0]]
        bucket.steps = theirs.steps
        if theirs.layout == bucket.layout:  # as from a file: the seed of what is drawn is that of the bucket's number
            bucket.compressor.load(bucket.inner, bucket.compressor.save(theirs.inner))
            if bucket.progress is not None and theirs.progress is not None:
                bucket.progress.noise.load(theirs.progress.noise.save())
    return new


def scale_state(reducer: Reducer, factor: float) -> None:
    """Multiply the residuals for another number of ranks, and cut them at the largest magnitude. At 0 all is forgotten."""
    for bucket in reducer.buckets:
        bucket.put_back()
        if bucket.progress is not None:
            bucket.progress.scale(factor)
