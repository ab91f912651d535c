"""A rank that leaves: the others are told within seconds, with an error that Horovod's elastic mode understands."""

from __future__ import annotations

import pytest
import ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("spec, route", [("topk:ratio=0.01", "A"), ("topk:ratio=0.01", "B"), ("dense", "A")])
def test_join_is_named_among_the_causes(spec: str, route: str) -> None:
    """hvd.join() on one rank while another trains: no gather can take part in it, and no carrier comes back right."""
    found = ranks.launch("horovod_ends", 2, {"how": "join", "route": route, "spec": spec}, seconds=60)
    assert found[0]["said"].startswith("HorovodInternalError: "), found
    ours = "gradcomp's exchange failed" in found[0]["said"]
    assert ours or route == "A", found  # along A, Horovod itself may be the first to meet the broken network, at a carrier
    assert not ours or "hvd.join()" in found[0]["said"], found


def test_a_dense_exchange_without_carriers_goes_on_when_a_rank_joins() -> None:
    """It is an allreduce, to which Horovod adds zeros for a rank that joined: as in Horovod's own training."""
    found = ranks.launch("horovod_ends", 2, {"how": "join", "route": "B", "spec": "dense"}, seconds=60)
    assert [rank["said"] for rank in found] == ["nothing was raised"] * 2


@pytest.mark.parametrize("route", ["A", "B"])
def test_a_rank_that_dies_ends_the_step_of_the_others(route: str) -> None:
    found = ranks.launch("horovod_ends", 3, {"how": "die", "route": route, "spec": "topk:ratio=0.01"}, seconds=60, dies={1: 3})
    for rank in found:
        assert rank["said"].startswith("HorovodInternalError: "), found
        assert rank["seconds"] < 20  # the broken connection is seen at once; the rest is a busy machine
