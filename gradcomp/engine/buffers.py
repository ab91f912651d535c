"""The buffers of a model under local steps: those that changed become their means, and go back with the weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp import saved
from gradcomp.core.requests import Reduce
from gradcomp.engine.roll_call import RollCall, take_that_of_rank_0
from gradcomp.engine.updates.steps import warn_user
from gradcomp.networks import Answer, Connection

_UNLIKE = (
    "the buffer {name!r} has another shape or type on some ranks (here {form}), so it stays each rank's own until all are "
    "alike. Nothing is lost if it is a table that grows with each rank's inputs; otherwise give it one shape on all ranks"
)


class Buffers:
    """The buffers of a model, found by name: a module may put another tensor in a buffer's place.

    names: of those that become means: of floating-point numbers in more than 8 bits, and there at set-up. The others stay each
    rank's own. common: after the last synchronization.
    """

    def __init__(self, model: torch.nn.Module, network: Connection):
        self._model, self._network = model, network
        self.names = [name for name, each in self.present.items() if each.is_floating_point() and each.dtype.itemsize > 1]
        self.common: dict[str, Tensor] = {}
        self._sent: dict[str, Tensor] = {}
        self._answers: dict[torch.dtype, Answer] = {}
        self._unlike: set[str] = set()  # those that were warned of

    @property
    def present(self) -> dict[str, Tensor]:
        """The buffers of now."""
        return dict(self._model.named_buffers())

    @property
    def number(self) -> int:
        """A number of the shapes and types of those that become means."""
        return _number([_form(self.present.get(name)) for name in self.names])

    @torch.no_grad()
    def begin_at_those_of_rank_0(self) -> None:
        """Give all ranks rank 0's, of any type. All ranks have the same names."""
        present = self.present
        unlike = self._find_unlike([*present])
        for name, each in present.items():
            if name not in unlike:
                take_that_of_rank_0(each, self._network, f"buffer {name}")
        self.common = {name: present[name].detach().clone() for name in self.names}

    def changed(self) -> list[bool]:
        """Say which have changed since the last synchronization."""
        present = self.present
        return [name in present and _differ(present[name], self.common[name]) for name in self.names]

    def begin(self, changed: Sequence[bool], are_alike: bool) -> None:
        """Begin to exchange those that have changed on any rank. are_alike: the numbers of all ranks are the same."""
        present = self.present
        unlike = set() if are_alike else self._find_unlike(self.names)
        names = [name for name, each in zip(self.names, changed, strict=True) if each and name in present]
        self._sent = {name: present[name].detach().clone() for name in names if name not in unlike}
        for wide, sent in self._by_type().items():
            flat = torch.cat([each.to(self._network.device, wide).reshape(-1) for each in sent.values()])
            self._answers[wide] = self._network.start(Reduce(flat / self._network.world.size), f"buffers in {wide}")

    @torch.no_grad()
    def end(self, succeeded: bool) -> int:
        """Take the means, if an exchange is under way. Return the bytes sent.

        If the weights' exchange failed, return to those of the last synchronization, but for what has another shape now.
        """
        present, count = self.present, 0
        for wide, sent in self._by_type().items():
            means = self._answers[wide]()
            assert isinstance(means, Tensor)
            count += means.numel() * means.element_size()
            for (name, before), mean in zip(sent.items(), means.split([each.numel() for each in sent.values()]), strict=True):
                if succeeded:
                    self._take(name, present.get(name), before, mean.to(before.device).view(before.shape))
        self._answers, self._sent = {}, {}
        for name in self.names if not succeeded else ():
            if name in present and present[name].shape == self.common[name].shape:
                present[name].copy_(self.common[name])
        return count

    def _by_type(self) -> dict[torch.dtype, dict[str, Tensor]]:
        """Sort those that are sent by the type of their sums."""
        found: dict[torch.dtype, dict[str, Tensor]] = {}
        for name, each in self._sent.items():
            found.setdefault(torch.promote_types(each.dtype, torch.float32), {})[name] = each
        return found

    def _take(self, name: str, buffer: Tensor | None, sent: Tensor, mean: Tensor) -> None:
        """Make a buffer the mean, plus what changed in the meantime. Entries that a rank spoilt go back on all ranks."""
        if (last := self.common[name]).shape == mean.shape:
            mean = torch.where(mean.isfinite() | ~last.isfinite(), mean, last.to(mean))
        self.common[name] = mean.to(sent.dtype)
        if buffer is not None and buffer.shape == sent.shape:  # not replaced in the meantime
            now, sent = buffer.to(mean), sent.to(mean)
            later = torch.where(now.isfinite() & sent.isfinite(), mean + (now - sent), now)
            buffer.copy_(torch.where((now == sent) | now.isnan(), mean, later))

    def _find_unlike(self, names: Sequence[str]) -> set[str]:
        """Find those that are unlike on some ranks, and warn of new ones. All ranks call it, with the same names."""
        if not names:
            return set()
        present, call = self.present, RollCall(self._network)
        call.begin([_number(_form(present.get(name))) for name in names], [])
        unlike = {name for name, *of_ranks in zip(names, *call.end(), strict=True) if len({*of_ranks}) > 1}
        for name in sorted(unlike - self._unlike):
            warn_user(_UNLIKE.format(name=name, form=_form(present.get(name))))
        self._unlike |= unlike
        return unlike

    # A saved state.

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Copy all buffers of now, and those that become means as they were after the last synchronization."""
        return {of: {name: each.detach().clone() for name, each in named.items()} for of, named in self._both().items()}

    def _both(self) -> dict[str, dict[str, Tensor]]:
        return {"now": self.present, "common": self.common}

    def _saved(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
        """Go through what is loaded: key, name, buffer. A table that is not saved with the model may have grown, or be gone."""
        unsaved = {
            f"{at}.{name}".lstrip(".") for at, each in self._model.named_modules() for name in each._non_persistent_buffers_set
        }
        for of, named in self._both().items():
            table = saved.table(state, of)
            for name, own in named.items():
                if name not in unsaved or getattr(table.get(name), "shape", None) == own.shape:
                    yield of, name, own

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit. An infinity, as of a mask, is also in the model, or in the state's other copy."""
        for of, name, own in self._saved(state):
            bad = ~saved.is_finite(saved.tensor(state[of], name, own.shape, dtype=own.dtype, finite=False).cpu())
            other = saved.table(state, "common" if of == "now" else "now").get(name)
            for known in (own, other):
                if isinstance(known, Tensor) and known.shape == bad.shape:
                    bad &= saved.is_finite(known.cpu())
            if bad.any():
                raise ValueError(f"{name} is not finite in the state: {saved.REMEDY}")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a state that was checked."""
        for of, name, own in self._saved(state):
            own.copy_(state[of][name])


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"


def _number(forms: Sequence[str] | str) -> int:
    """Number a text: a roll call carries 24 bits."""
    return zlib.crc32(repr(forms).encode()) & 0xFFFFFF


def _differ(now: Tensor, before: Tensor) -> bool:
    """Say whether two tensors differ. NaN is like NaN."""
    before = before.to(now.device)
    if now.shape != before.shape or now.dtype != before.dtype:
        return True
    return not torch.equal(now, before) and bool(((now != before) & ~(now.isnan() & before.isnan())).any())
