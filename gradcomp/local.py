"""Local steps: the ranks train by themselves for many steps, and then exchange how far they came.

A. Douillard and others, "DiLoCo" (2023): after H steps, the mean over ranks of start minus now is the gradient of an outer step
from the common start. A. Sarfi and others, "SparseLoCo" (2025), send the largest entries of it, with error feedback.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch

from gradcomp import saved
from gradcomp.aliases import either
from gradcomp.core.by_host import between_hosts
from gradcomp.core.compressor import Compressor
from gradcomp.engine.bucket import GRADIENT_TYPES
from gradcomp.engine.buffers import Buffers
from gradcomp.engine.fragments import Fragment, divided, with_those_gone
from gradcomp.engine.meeting import run
from gradcomp.engine.outside_steps import OutsideSteps
from gradcomp.engine.phases import Door
from gradcomp.engine.reducer import Options
from gradcomp.engine.roll_call import RollCall, take_that_of_rank_0, words_of_unlike
from gradcomp.engine.session import Session
from gradcomp.engine.slots import Parameters, Slots
from gradcomp.engine.updates.optimizers import note_apart
from gradcomp.engine.updates.steps import calling_scaler, log_on_rank_0, warn_user
from gradcomp.engine.weight_copies import WeightCopies
from gradcomp.sites import check_sites, find_model, find_ranks, refuse_attached
from gradcomp.spec import auto_of, make

__all__ = ["LocalSteps"]

# The steps between synchronizations, and the outer step, where the user leaves them open.
EVERY, RATE, MOMENTUM = 30, 0.9, 0.7

# How often a sparse spec has to send an entry in a training, at least and on average.
SENDS = 10

_NOT_YET = "auto chooses by the time of a step, and most local steps send nothing; write a spec, such as sign"
_SELDOM = (
    "in {rounds} synchronizations {spec} sends an entry {sends:.2g} times on average, and many changes come late or never: "
    "send a share of {share:.2g} or more, or sign"
)
_NOTHING = "the model has no parameter that is trained; unfreeze some before LocalSteps()"
_FORM = "{name!r} is {form}; local steps exchange float32, float16 and bfloat16"
_PARAMETERS = (
    "the optimizer and the model have different parameters that are trained, such as {name}: its steps would not be exchanged. "
    "Pass one optimizer of all trained parameters; after an unfreezing or add_param_group(), flush() and make new LocalSteps"
)
_MISSING = (
    "the states of {missing} of {ranks} ranks are missing in the list: what they did after the last synchronization is left "
    "out, and what their residuals held. If these ranks are not gone, load the list of all ranks' states on every rank"
)
_FAILED = (
    "the weights of some rank were not finite: all ranks return to the weights and buffers after the last synchronization, "
    "and the steps since then are lost, except for what a residual keeps"
)


class LocalStats(TypedDict):
    """Figures of local steps on this rank.

    exchanges: what the ranks exchange, in words. steps: of the optimizer, also those that a GradScaler skipped.
    synchronizations: begun, of the whole model. bytes_sent: of the last exchange, of a fragment, and between sites if there are
    any. bytes_sent_total: of all. payload_ratio, or compression: the bytes of all steps' gradients as float32 over
    bytes_sent_total; None before the first synchronization.
    """

    exchanges: str
    steps: int
    synchronizations: int
    bytes_sent: int
    bytes_sent_total: int
    compression: float | None
    payload_ratio: float | None


class LocalSteps:
    """An optimizer whose ranks exchange their weight changes every so many steps, and nothing in between.

    All ranks begin with rank 0's weights and buffers. Floating-point buffers that change, such as BatchNorm's, are averaged.

    Args:
        model: The model, without DistributedDataParallel; or with one over the ranks of this rank's site: gradients are then
            exchanged within a site, and weight changes between sites. All sites have the same number of ranks.
        optimizer: The optimizer that takes the steps. Schedulers keep acting on it.
        spec: "name:knob=value", or a compressor.
        every: The steps from one synchronization to the next, or sync_every; 30 by default.
        outer_lr: The learning rate of the outer step; None: 0.9.
        outer_momentum: Its Nesterov momentum; None: 0.7.
        rounds: The planned synchronizations, if known: gradcomp warns of a sparse spec that sends too little in these.
        fragments: The parts of the model, or num_fragments, that are exchanged in turn, each while the next every / fragments
            steps run; 1 by default.
        seed: The seed of random draws, equal on all ranks.

    Raises:
        TypeError: The model or the optimizer exchanges gradients itself.
        ValueError: A spec or a number does not fit, or the ranks do not agree.
        RuntimeError: There is no network, or attach() has the model's updates exchanged in every step.

    Example:
        >>> local = gradcomp.local.LocalSteps(model, optimizer, "sign", sync_every=32)
        >>> for inputs, targets in batches:
        ...     local.zero_grad()
        ...     loss_of(model(inputs), targets).backward()
        ...     local.step()
        >>> local.flush()
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        spec: str | Compressor = "sign",
        *,
        every: int | None = None,
        sync_every: int | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        rounds: int | None = None,
        fragments: int | None = None,
        num_fragments: int | None = None,
        seed: int = 0,
    ):
        model, site = find_model(model, optimizer)
        if auto_of(spec) is not None:
            raise ValueError(_NOT_YET)
        self._every = every = _whole("every", either(EVERY, every=every, sync_every=sync_every))
        count = _whole("fragments", either(1, fragments=fragments, num_fragments=num_fragments))
        parameters = Parameters(model.named_parameters())
        weights = {slot.name: slot.parameter for slot in parameters.slots}
        if not weights:
            raise ValueError(_NOTHING)
        if other := [(name, each.dtype) for name, each in weights.items() if each.dtype not in GRADIENT_TYPES]:
            raise ValueError(_FORM.format(name=other[0][0], form=other[0][1]))
        if self._every % count or count > len(weights):
            raise ValueError(f"fragments={count} must divide every={every}, and be at most {len(weights)}, the parameters")
        rate, momentum = _number("outer_lr", outer_lr, RATE), _number("outer_momentum", outer_momentum, MOMENTUM)
        if momentum >= 1:
            raise ValueError(f"outer_momentum={outer_momentum!r} must be below 1")
        self._model, self._optimizer, self._has_sites = model, optimizer, bool(site)
        self._counts = dict.fromkeys(("steps", "in_round", "synchronizations", "bytes_sent", "bytes_sent_total"), 0)
        self._under_way: Fragment | None = None
        self._weights, self._unlike = [*weights.values()], ""  # the error of ranks that have parted
        self._check_parameters()
        self._network, compressor = find_ranks(next(iter(weights.values())).device, site), make(spec)
        if rounds is not None and 0 < (share := compressor.traits.share) * _whole("rounds", rounds) < SENDS:
            warn_user(_SELDOM.format(rounds=rounds, spec=compressor, sends=share * rounds, share=SENDS / rounds))
        if site:
            compressor = between_hosts(compressor)
        self._roll_call, self._buffers = RollCall(self._network), Buffers(model, self._network)
        self._owes_buffers = self._have_unlike_buffers = False
        terms = f"every={self._every}, outer_lr={rate}, outer_momentum={momentum}, fragments={count}"
        door = Door(agreed={"local steps": terms, "buffers": ", ".join(self._buffers.present)})

        def session(slots: Slots) -> Session:
            return Session(compressor, slots, self._network, Options(seed=seed + len(self._fragments), names=[*weights]), door)

        self._fragments: list[Fragment] = []
        copies = WeightCopies(optimizer)
        for part in divided(weights, count):
            self._fragments.append(Fragment(part, copies, session, rate, momentum))
        for fragment in self._fragments:
            fragment.session.meet()
        if site:
            check_sites(self._network)
        self._begin_at_those_of_rank_0()
        self._outside = OutsideSteps(optimizer)
        log_on_rank_0(f"gradcomp: {compressor} exchanges weight changes after every {every} local steps", self._network)

    def _begin_at_those_of_rank_0(self) -> None:
        """Give all ranks rank 0's weights and buffers, and make them the common start."""
        for name, each in self._model.named_parameters():
            take_that_of_rank_0(each, self._network, f"weights of {name}")
        self._buffers.begin_at_those_of_rank_0()
        for fragment in self._fragments:
            fragment.begin_at_weights()

    def _begin_at_loaded(self) -> None:
        """Begin anew if any rank has loaded weights before its first step: they would count as progress. All ranks, once."""
        if self._roll_call.is_first:
            has_loaded = not self._outside.count and any(any(each.moved()) for each in self._fragments)
            self._roll_call.begin((False, 0, self._buffers.number), [has_loaded])
            self._end_roll_call()
            if self._roll_call.flags[0]:
                self._begin_at_those_of_rank_0()

    _step_supports_amp_scaling = True  # a GradScaler calls step() in every step then: see _is_skipped()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer, for a GradScaler."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the optimizer, and synchronize if it is due."""
        self._begin_at_loaded()
        with self._outside.inside():
            loss = None if self._is_skipped() else self._optimizer.step() if closure is None else self._optimizer.step(closure)
        self._counts["steps"] += 1
        self._counts["in_round"] += 1
        part, rest = divmod(self._counts["in_round"], interval := self._every // len(self._fragments))
        if not rest:
            self._check_parameters()
            self._apply()
            part = (part - 1) % len(self._fragments)  # the round is longer after one that failed
            moved = self._call_roll(False, [part])
            if len(self._fragments) > 1:
                self._begin(part, self._of(part, moved))
            else:
                self._end_roll_call()
                self._begin(part)
                self._apply()
        elif rest == interval // 2 and self._under_way is not None:
            self._end_roll_call()
            self._under_way.session.reducer.advance()  # the second message of an exchange that has two
        return loss

    def _is_skipped(self) -> bool:
        """Unscale the gradients in a GradScaler's step(), which calls this one always: ranks count the steps that it skips."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is not None and bool(found):
            return True
        scaler = None if scale is None else calling_scaler()
        of_inner = {} if scaler is None else scaler._per_optimizer_states[id(self._optimizer)]
        if scale is not None and getattr(of_inner.get("stage"), "name", "READY") == "READY":  # not by unscale_(optimizer)
            for grad in (each.grad for group in self.param_groups for each in group["params"] if each.grad is not None):
                grad.div_(scale.to(grad.device))
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let the optimizer forget the gradients."""
        self._optimizer.zero_grad(set_to_none)

    def flush(self) -> None:
        """Synchronize now if any rank has moved since the last time, so that all have equal weights. All ranks call it.

        Raises:
            RuntimeError: Another rank synchronizes after a step in the meantime. It raises there, too.
        """
        self._begin_at_loaded()
        self._check_parameters()
        self._apply()
        self._call_roll(True, range(len(self._fragments)))
        self._end_roll_call()
        if self._counts["steps"]:
            self._outside.pause()
        if not any(self._roll_call.flags):
            for fragment in self._fragments:
                fragment.go_back(forgets=False)
            return
        for part in range(len(self._fragments)):
            self._begin(part)
            self._apply(keeps_own=False)

    def stats(self) -> LocalStats:
        """Return figures of the steps on this rank.

        Example:
            >>> local.stats()["bytes_sent_total"]
        """
        entries = sum(each.numel() for fragment in self._fragments for each in fragment.weights.values())
        counts, sent = self._counts, self._counts["bytes_sent_total"]
        ratio = 4 * entries * counts["steps"] / sent if sent else None
        return {
            "exchanges": f"progress of {self._every} steps",
            "steps": counts["steps"],
            "synchronizations": counts["synchronizations"],
            "bytes_sent": counts["bytes_sent"],
            "bytes_sent_total": sent,
            "compression": ratio,
            "payload_ratio": ratio,
        }

    def state_dict(self) -> dict[str, Any]:
        """Copy all that this rank's next step depends on, its weights among it. All ranks call it, and each saves its own.

        An exchange of a fragment that is under way ends first.

        Example:
            >>> torch.save(local.state_dict(), f"rank-{rank}.pt")
        """
        self._begin_at_loaded()
        self._apply()
        return {
            "every": self._every,
            "counts": dict(self._counts),
            "buffers": self._buffers.state_dict(),
            "optimizer": (optimizer := copy.deepcopy(self._optimizer.state_dict())),
            "form": saved.form(optimizer),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, with the same spec, fragments and model. All ranks call it, between two steps.

        A list of the ranks' states serves any number of ranks: a rank without one begins at the common start, with the inner
        optimizer of the first. The list need not have the states of ranks that are gone.

        Args:
            state: The result of state_dict() on this rank, or the same list on all ranks, of the results of all or some.

        Raises:
            ValueError: The state does not fit, or is damaged.
        """
        states = [state] if isinstance(state, Mapping) else list(state) if isinstance(state, Sequence) else []
        with self._fragments[0].session.resume.refusing_together() as facts, saved.reading():
            if not states or not all(isinstance(each, Mapping) and "fragments" in each for each in states):
                raise ValueError("load_state_dict() got no state of LocalSteps; pass state_dict()'s result, or a list of them")
            for each in states:
                self._check_state(each)
            parts = [[*each] for each in zip(*[saved.sequence(each, "fragments") for each in states], strict=True)]
            parts = parts if isinstance(state, Mapping) else [with_those_gone(each) for each in parts]
            flows = [fragment.loading(every, facts) for fragment, every in zip(self._fragments, parts, strict=True)]
            for flow in flows:
                next(flow)
            rank = self._network.world.rank
            own = states[0] if isinstance(state, Mapping) else states[rank] if rank < len(states) else None
            given = states[0] if own is None else own
            facts.append(f"{given['counts']['in_round']} steps after the last synchronization")
        self._apply()
        for flow in flows:
            run(flow)
        self._optimizer.load_state_dict(given["optimizer"])
        for i, fragment in enumerate(self._fragments):
            fragment.load_state_dict(states[0]["fragments"][i], None if own is None else own["fragments"][i])
        if missing := len(parts[0]) - len(states):
            warn_user(_MISSING.format(missing=missing, ranks=missing + len(states)))
        self._buffers.load_state_dict(given["buffers"])
        note_apart(self._weights)
        self._roll_call.is_first = False
        self._counts = {name: given["counts"][name] for name in self._counts}

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a rank's state that does not fit, or is damaged."""
        parts = saved.sequence(state, "fragments")
        if [[*fragment.starts] for fragment in self._fragments] != [[*saved.table(part, "starts")] for part in parts]:
            raise ValueError(
                "the state is of a model with other parameters, or of other fragments; load it as it was saved: with the same "
                "model and fragments="
            )
        if (every := saved.read_int(state, "every", 1)) != self._every:
            raise ValueError(f"the state has every={every}, and LocalSteps() got every={self._every}: make them equal")
        for name in self._counts:
            saved.read_int(saved.table(state, "counts"), name)
        for fragment, part in zip(self._fragments, parts, strict=True):
            fragment.check(part)
        self._buffers.check(saved.table(state, "buffers"))
        saved.check_optimizer(state, self._optimizer)

    def _call_roll(self, flushes: bool, parts: Sequence[int]) -> list[bool]:
        """Begin to tell the other ranks what this one begins: the exchange of these fragments. Return the flags."""
        flags: list[bool] = []
        for i, fragment in enumerate(self._fragments):
            flags += fragment.moved() if i in parts else [False] * len(fragment.weights)
        flags += self._buffers.changed() if len(self._fragments) - 1 in parts else [False] * len(self._buffers.names)
        self._roll_call.begin((flushes, self._counts["in_round"], self._buffers.number), flags)
        return flags

    def _of(self, part: int, flags: list[bool]) -> list[bool]:
        """Return a fragment's flags in a roll call: which layers have moved. Those of the buffers come last."""
        begin = sum(len(each.weights) for each in self._fragments[:part])
        return flags[begin : begin + len(self._fragments[part].weights)] if part < len(self._fragments) else flags[begin:]

    def _begin(self, part: int, moved: list[bool] | None = None) -> None:
        """Begin the exchange of a fragment. None is under way. moved: on this rank; None if the roll call has ended."""
        self._under_way = self._fragments[part]
        note_apart(self._weights)  # where gradients are exchanged next, the optimizer's state has to be averaged
        self._under_way.begin(self._of(part, self._roll_call.flags) if moved is None else moved, len(self._fragments) > 1)
        if part == len(self._fragments) - 1:
            self._counts["in_round"] = 0
            self._counts["synchronizations"] += 1
            self._owes_buffers = True
            if moved is None:
                self._begin_buffers()

    def _begin_buffers(self) -> None:
        """Begin the exchange of the buffers, which waits for the end of the roll call."""
        if self._owes_buffers:
            self._owes_buffers = False
            self._buffers.begin(self._of(len(self._fragments), self._roll_call.flags), not self._have_unlike_buffers)

    def _end_roll_call(self) -> None:
        """End the roll call, if one is under way. Refuse ranks that began unlike exchanges, at the first wait after it."""
        if not (places := self._roll_call.end()):
            return
        self._unlike = words_of_unlike([each[:2] for each in places], self._every)
        if self._unlike:
            raise RuntimeError(self._unlike)
        self._have_unlike_buffers = len({number for *_, number in places}) > 1
        self._begin_buffers()

    def _check_parameters(self) -> None:
        """Refuse an optimizer of other parameters than those that are exchanged, and a model that trains others.

        Refuse one whose updates attach() has all ranks exchange in every step.
        """
        if not self._has_sites:
            refuse_attached(self._model)
        exchanged = {id(each) for each in self._weights}
        stepped = {id(each) for group in self.param_groups for each in group["params"] if each.requires_grad}
        names = {id(each): repr(name) for name, each in self._model.named_parameters()}
        trained = {id(each) for each in self._model.parameters() if each.requires_grad}
        if other := (trained - exchanged) | (trained & exchanged) ^ stepped:
            raise RuntimeError(_PARAMETERS.format(name=names.get(min(other), "one that is not in the model")))

    def _apply(self, keeps_own: bool = True) -> None:
        """End the exchange under way, if any, and take its outer step. keeps_own: see Fragment.end()."""
        if self._unlike:  # its messages would never come
            raise RuntimeError(self._unlike)
        if (fragment := self._under_way) is None:
            return
        self._end_roll_call()
        self._under_way = None
        moved = self._of(self._fragments.index(fragment), self._roll_call.flags)
        succeeded = fragment.end(moved, keeps_own and not self._has_sites)
        traffic = fragment.session.reducer.traffic
        sent = (traffic.between_hosts if self._has_sites else traffic.sent) + self._buffers.end(succeeded)
        if not succeeded:  # one that stayed would spoil the others again
            warn_user(_FAILED)
            is_finite = all(each.is_finite for each in self._fragments)
            for each in self._fragments:
                each.go_back(forgets=not is_finite)
        self._counts["bytes_sent"] = sent
        self._counts["bytes_sent_total"] += sent


def _whole(name: str, given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, numbers.Integral) or int(given) < 1:
        raise ValueError(f"{name}={given!r} must be a whole number, 1 or more")
    return int(given)


def _number(name: str, given: Any, default: float) -> float:
    if given is None:
        return default
    if not isinstance(given, numbers.Real) or not 0 <= float(given) < float("inf"):
        raise ValueError(f"{name}={given!r} must be a number that is not negative")
    return float(given)


def __dir__() -> list[str]:
    return __all__
