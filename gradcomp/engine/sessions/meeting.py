"""A meeting of all ranks before they exchange gradients: they compare terms, share state and learn their hosts."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradcomp.core.requests import Field, Gather, Purpose, Request, Send
from gradcomp.engine.sessions import agreement
from gradcomp.engine.sessions.agreement import Facts
from gradcomp.engine.steps.reducer import Reducer
from gradcomp.messages import payload as payloads
from gradcomp.messages import structure
from gradcomp.networks import Connection
from gradcomp.networks.waits import in_words

log = logging.getLogger("gradcomp")


class Meeting:
    """One meeting. All ranks make the same calls in the same order.

    facts: every rank's, once they have compared their terms. leader: the rank whose state the others adopt where they differ.
    joins: this rank is new to a training that goes on, and what it has loaded counts for nothing.
    """

    def __init__(self, network: Connection):
        self._network, self._rank = network, network.world.rank
        self.facts: list[Facts] = []
        self.leader = 0
        self.joins = False

    def compare(self, terms: Mapping[str, str], own: Facts, leader: int | None = None) -> Facts:
        """Check that the terms are equal on all ranks, and that no share of a residual is missing. Return the leader's facts.

        leader: the rank to follow; by default the first of those that have done the most steps.
        """
        own = own._replace(name=secrets.randbits(62))
        record = agreement.record(terms, own)
        self.facts = agreement.check(terms, [reply.cpu() for reply in self._gather(record, "agreement")])
        if leader is not None and self.facts[leader].met:
            self.joins = not own.met
            self.facts = [each if each.met else Facts(name=each.name) for each in self.facts]
        steps = [facts.steps for facts in self.facts]
        self.leader = steps.index(max(steps)) if leader is None else leader
        self._check_shares()
        return self.facts[self.leader]

    def of_leader(self, own: str) -> str:
        """Return the leader's text on all ranks."""
        lengths = [int(reply) for reply in self._gather(torch.tensor([len(own.encode())]), "text")]
        return self._send(own.encode(), lengths[self.leader], "text of the leader").decode()

    def share(self, reducer: Reducer) -> None:
        """Compare the state that all ranks must share. Where it differs, all ranks adopt the leader's."""
        own = structure.write(shared_state(reducer))
        host, digest = (
            int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
            for text in (self._network.host.encode(), own)
        )
        replies = [reply.tolist() for reply in self._gather(torch.tensor([host, digest, len(own)]), "hosts")]
        hosts, digests, sizes = zip(*replies, strict=True)
        if len({*digests}) > 1:
            adopt(reducer, structure.read(self._send(own, sizes[self.leader], "state")))
        self._network.hosts = hosts
        self._network.meeting = f"{self.facts[0].name:x}"

    def _check_shares(self) -> None:
        """Refuse a loaded state of which a rank's share is missing. Name the ranks that left and took theirs along."""
        ranks = max(facts.ranks for facts in self.facts)
        missing = sorted({*range(ranks)} - {facts.rank for facts in self.facts if facts.ranks == ranks})
        loaded = [rank for rank, facts in enumerate(self.facts) if facts.loaded]
        steps = {facts.steps for facts in self.facts if facts.steps or facts.loaded}
        if loaded and missing:
            raise ValueError(
                f"a state of {ranks} ranks was loaded on {in_words(loaded)}, but nobody loaded that of {in_words(missing)}; "
                "call load_state_dict() on every rank with the rank's own state, or with the list of all ranks' states"
            )
        if loaded and len(steps) > 1:
            every = ", ".join(str(facts.steps) for facts in self.facts)
            raise ValueError(
                f"the ranks loaded states of different steps: {every}; load states that all ranks saved after the same step"
            )
        if missing and self._rank == self.leader:
            log.warning(
                "gradcomp: %s of %d left; the gradients that waited in the residual there are lost. The other ranks go on "
                "after step %d",
                in_words(missing),
                ranks,
                self.facts[self.leader].steps,
            )

    def _send(self, own: bytes, size: int, name: str) -> bytes:
        """Send the leader's bytes to all ranks."""
        form, device = (Field("bytes", torch.uint8, size),), self._network.device
        payload = payloads.empty(form, device)
        leads = self._rank == self.leader
        if leads:
            payload["bytes"].copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        outgoing = dict.fromkeys(self._network.world.others, payload) if leads else {}
        received: Any = self._start(Send(outgoing, () if leads else (self.leader,), form, device, Purpose.MEETING), name)
        return own if leads else received[self.leader]["bytes"].cpu().numpy().tobytes()

    def _gather(self, tensor: Tensor, name: str) -> list[Tensor]:
        replies: Any = self._start(Gather(payloads.wrap(tensor.to(self._network.device)), Purpose.MEETING), name)
        return [reply["bytes"].cpu() for reply in replies]

    def _start(self, request: Request, name: str) -> Any:
        return self._network.start(request, name)()


def shared_state(reducer: Reducer) -> dict[str, Any]:
    """Copy the state that all ranks must share."""
    return {"steps": reducer.steps_done, "buckets": [bucket.save_shared() for bucket in reducer.buckets]}


def adopt(reducer: Reducer, shared: Mapping[str, Any]) -> None:
    """Continue with the shared state of another rank."""
    reducer.steps_done = shared["steps"]
    for bucket, of_bucket in zip(reducer.buckets, shared["buckets"], strict=True):
        bucket.load_shared(of_bucket)
