"""The meeting of all ranks before they exchange gradients: they compare terms, share state, and learn their hosts."""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Compressor
from gradcomp.core.requests import Field, Gather, Purpose, Request, Send
from gradcomp.engine.reducer import Reducer
from gradcomp.engine.state import Place, scale_state
from gradcomp.messages import payload as payloads
from gradcomp.messages import structure
from gradcomp.networks import Connection
from gradcomp.networks.waits import in_words

log = logging.getLogger("gradcomp")

T = TypeVar("T")
# A flow yields where it is about to wait for the other ranks. Flows of ranks in one process then go on in lock-step.
Flow = Generator[None, None, T]

# The first bytes of a record.
MAGIC = b"gradcomp"
# Bytes of a term's entry in a record: the digest of its text, and the beginning of the text.
_DIGEST = 16
_TEXT = 112
_ENTRY = _DIGEST + _TEXT


def run(flow: Flow[T]) -> T:
    """Run a flow of one rank to its end, and return its result. It blocks where it waits for other ranks."""
    try:
        while True:
            next(flow)
    except StopIteration as end:
        result: T = end.value
        return result


class Facts(NamedTuple):
    """A rank's facts, which may differ between ranks.

    steps: the steps that it has done. ranks: the number of ranks that shared its residual; 0 = the residual is empty yet.
    rank: its number among them. loaded: 1 if a state was loaded since the last meeting. met: 1 if it has met others before.
    name: a random name for the meeting. unlike: 1 if its optimizers may keep other numbers than the other ranks'. apart: 1 if
    updates were exchanged before.
    """

    steps: int = 0
    ranks: int = 0
    rank: int = 0
    loaded: int = 0
    met: int = 0
    name: int = 0
    unlike: int = 0
    apart: int = 0


_FACTS = struct.Struct(f"<{len(Facts._fields)}q")
_HEAD = len(MAGIC) + _FACTS.size


def record(terms: Mapping[str, str], facts: Facts = Facts()) -> Tensor:  # noqa: B008 - it never changes
    """Make a rank's record, of fixed size: its facts, and for each term a digest of its text and the text's beginning."""
    entries = b"".join(
        hashlib.blake2b(data, digest_size=_DIGEST).digest() + data[:_TEXT].ljust(_TEXT)
        for data in [text.encode(errors="backslashreplace") for text in terms.values()]
    )
    return torch.frombuffer(bytearray(MAGIC + _FACTS.pack(*facts) + entries), dtype=torch.uint8)


def check_terms(terms: Mapping[str, str], records: Sequence[Tensor], numbers: Sequence[int] | None = None) -> list[Facts]:
    """Raise an error that names every term in which a rank differs from the first. Return the facts of all ranks.

    All ranks hold the same records, so that all raise the same error. numbers: of the ranks in the whole job, if they differ.
    """
    numbers = numbers or range(len(records))
    every = [bytes(record.tolist()) for record in records]
    for rank, text in enumerate(every):
        if not text.startswith(MAGIC):
            raise ValueError(
                f"rank {numbers[rank]} sent other bytes than its terms to the meeting of all ranks: begin the exchange, and "
                "call set_spec() and load_state_dict(), on all ranks at the same step, with the same version of gradcomp"
            )
    differences = []
    for i, term in enumerate(terms):
        begin = _HEAD + i * _ENTRY
        entries = [text[begin : begin + _ENTRY] for text in every]
        other = next((rank for rank, entry in enumerate(entries) if entry != entries[0]), None)
        if other is not None:
            differ = {numbers[rank]: _readable(entries[rank]) for rank in (0, other)}
            differences.append(f"{term}: " + ", ".join(f"rank {number} has {text}" for number, text in differ.items()))
    if differences:
        raise ValueError(
            "the ranks do not agree and cannot exchange gradients; make these equal on all ranks: " + "; ".join(differences)
        )
    return [Facts(*_FACTS.unpack(text[len(MAGIC) : _HEAD])) for text in every]


def _readable(entry: bytes) -> str:
    digest, text = entry[:_DIGEST], entry[_DIGEST:].decode(errors="replace").strip()
    return f"{text!r}" + (f" (digest {digest.hex()[:8]})" if len(text) > _TEXT - 8 else "")


def _number(text: bytes) -> int:
    """Digest a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class Owner(NamedTuple):
    """The place at which a residual was made; of 0 ranks before the first meeting.

    scaled_for: the world size that the residual is scaled for. loaded: it was loaded since the last meeting.
    """

    place: Place = Place(0, 0)
    scaled_for: int = 0
    loaded: bool = False


class Snapshot(NamedTuple):
    """A rank's share of a state in main memory, with the compressor and the owner of the residual."""

    compressor: Compressor
    share: dict[str, Any]
    owner: Owner


class Membership:
    """One rank among the others, and its meetings with them. All ranks make the calls of a meeting in the same order.

    owner: of its residual. axes: of the mesh beside the network; their ranks meet, too. unlike: optimizers of this rank, and in
    a meeting those of any, may keep other numbers than other ranks'. were_apart: updates were exchanged before, on some rank.
    """

    def __init__(self, network: Connection):
        self._network = network
        self.met_in: object = None  # the network's generation in which the ranks met last
        self._ever_met = self.unlike = self.were_apart = False
        self.owner = Owner()
        self.axes: list[Membership] = []
        # Of the present meeting: its generation, every rank's facts, and the rank to follow. grows: a rank joins.
        self._generation: object = None
        self.grows = False
        self._facts: list[Facts] = []
        self._leader = 0

    @property
    def place(self) -> Place | None:
        """Return this rank's place; None before the network is initialised."""
        return Place(self._network.world.rank, self._network.world.size) if self._network.ready else None

    @property
    def saved_place(self) -> Place:
        """Return the place under which a saved share of this rank's residual is read again."""
        place = self.owner.place
        if place.ranks == self.owner.scaled_for and place.ranks:
            return place
        here = self.place or Place(0, 1)  # a rank outside its process set trains by itself
        return Place(here.rank, self.owner.scaled_for or here.ranks)

    def invalidate(self) -> None:
        """Make the ranks meet again before their next exchange."""
        self.met_in = None

    def note_unlike(self) -> None:
        """Make the ranks meet again before their next exchange, and average what their optimizers keep."""
        self.unlike, self.met_in = True, None

    def note_loaded(self, of: Place, ranks: int) -> None:
        """Note the owner of a residual that was loaded. ranks: of the state, if this rank's place is unknown."""
        place = self.place
        self.restore(Owner(of, place.ranks if place else ranks, loaded=True))

    def restore(self, owner: Owner) -> None:
        """Note the owner of a residual that replaced this rank's. The ranks then meet again."""
        self.owner, self.met_in = owner, None

    def compare(self, terms: Mapping[str, str], steps: int, leader: int | None, apart: bool = False) -> Flow[tuple[int, bool]]:
        """Begin a meeting: wait for the other ranks, and check that all terms are equal, and no share of a residual is missing.

        Return the leader's steps, and whether this rank is new to a training that goes on, so that its loaded state counts for
        nothing. See Session.meet(). steps: the steps that this rank has done. apart: it has exchanged updates before. The rest
        of the meeting is settle().
        """
        self._generation, owner = self._network.generation, self.owner
        self._network.prepare()
        name, place = secrets.randbits(62), owner.place
        history = int(owner.loaded), int(self._ever_met)
        own = Facts(steps, place.ranks, place.rank, *history, name, int(self.unlike), int(apart))
        records = yield from self._gather(record(terms, own), "agreement")
        facts = check_terms(terms, records, self._network.world.numbers)
        self.unlike, self.were_apart = any(each.unlike for each in facts), any(each.apart for each in facts)
        joins = leader is not None and bool(facts[leader].met) and not own.met
        self.grows = leader is not None and bool(facts[leader].met) and not all(each.met for each in facts)
        if leader is None:
            leader = max(range(len(facts)), key=lambda rank: facts[rank].steps)
        elif facts[leader].met:
            facts = [each if each.met else Facts(name=each.name) for each in facts]
        self._facts, self._leader = facts, leader
        self._check_shares()
        if joins:
            self.owner = Owner()
        return facts[leader].steps, joins

    def of_leader(self, own: str) -> Flow[str]:
        """Return the leader's text on all ranks."""
        lengths = yield from self._gather(torch.tensor([len(own.encode())]), "text")
        text = yield from self._send(own.encode(), int(lengths[self._leader]), "text of the leader")
        return text.decode()

    def settle(self, reducer: Reducer, sums: bool) -> Flow[None]:
        """End a meeting: share the state, and scale the residual to the number of ranks. sums: updates are sums, not means."""
        rank, size = self._network.world[:2]
        yield from self._share(reducer)
        if self.owner.scaled_for not in (0, size) and not sums:
            scale_state(reducer, size / self.owner.scaled_for)
        self.owner = Owner(Place(rank, size), size)
        self.met_in, self._ever_met = self._generation, True

    def agree(self, text: str, refused: Exception | None) -> Flow[Exception | None]:
        """Return why this rank refuses its state: for its own reason, or since another one does, or has another text."""
        for each in (self, *self.axes):
            terms = {"the loaded state": text if refused is None else str(refused)}
            each._network.prepare()
            records = yield from each._gather(record(terms), "loaded state")
            try:
                check_terms(terms, records, each._network.world.numbers)
            except ValueError as differ:
                refused = refused or differ
        return refused

    def _share(self, reducer: Reducer) -> Flow[None]:
        """Compare the state that all ranks must share. All ranks adopt the leader's if it differs."""
        buckets = [bucket.save_shared() for bucket in reducer.buckets]
        own = structure.write({"steps": reducer.steps_done, "buckets": buckets})
        host, digest = map(_number, (self._network.host.encode(), own))
        replies = yield from self._gather(torch.tensor([host, digest, len(own)]), "hosts")
        hosts, digests, sizes = zip(*[reply.tolist() for reply in replies], strict=True)
        if len({*digests}) > 1:
            shared = structure.read((yield from self._send(own, sizes[self._leader], "state")))
            reducer.steps_done = shared["steps"]
            for bucket, theirs in zip(reducer.buckets, shared["buckets"], strict=True):
                bucket.load_shared(theirs)
        self._network.hosts = tuple(hosts)
        self._network.meeting = f"{self._facts[0].name:x}"

    def learn_hosts(self) -> Flow[None]:
        """Learn the hosts of all ranks, in a meeting that shares nothing else."""
        replies = yield from self._gather(torch.tensor([_number(self._network.host.encode())]), "hosts")
        self._network.hosts = tuple([int(reply) for reply in replies])

    def _check_shares(self) -> None:
        """Refuse a loaded state without some rank's share. Name the ranks that left and took theirs along."""
        ranks = max(facts.ranks for facts in self._facts)
        missing = sorted({*range(ranks)} - {facts.rank for facts in self._facts if facts.ranks == ranks})
        loaded = [rank for rank, facts in enumerate(self._facts) if facts.loaded]
        steps = {facts.steps for facts in self._facts if facts.steps or facts.loaded}
        if loaded and missing:
            raise ValueError(
                f"a state of {ranks} ranks was loaded on {in_words(loaded)}, but no rank loaded that of {in_words(missing)}; "
                "call load_state_dict() on every rank with the rank's own state, or with the list of all ranks' states"
            )
        if loaded and len(steps) > 1:
            every = ", ".join(str(facts.steps) for facts in self._facts)
            raise ValueError(
                f"the ranks loaded states of different steps: {every}; load states that all ranks saved after the same step"
            )
        if missing and self._network.world.rank == self._leader:
            log.warning(
                "gradcomp: %s of %d left; what their residuals held, if any, is lost. The other ranks continue after step %d",
                in_words(missing),
                ranks,
                self._facts[self._leader].steps,
            )

    def _send(self, own: bytes, size: int, name: str) -> Flow[bytes]:
        """Send the leader's bytes to all ranks."""
        form, device = (Field("bytes", torch.uint8, size),), self._network.device
        payload = payloads.empty(form, device)
        leads = self._network.world.rank == self._leader
        if leads:
            payload["bytes"].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        outgoing = dict.fromkeys(self._network.world.others, payload) if leads else {}
        request = Send(outgoing, () if leads else (self._leader,), form, device, Purpose.MEETING)
        received = yield from self._ask(request, name)
        return own if leads else received[self._leader]["bytes"].cpu().numpy().tobytes()

    def _gather(self, tensor: Tensor, name: str) -> Flow[list[Tensor]]:
        request = Gather(payloads.wrap(tensor.to(self._network.device)), Purpose.MEETING)
        replies = yield from self._ask(request, name)
        return [reply["bytes"].cpu() for reply in replies]

    def _ask(self, request: Request, name: str) -> Flow[Any]:
        answer = self._network.start(request, name)
        yield
        return answer()
