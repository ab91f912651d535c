"""A rank leaves: the others are told within seconds, with an error that Horovod's elastic mode understands."""

from __future__ import annotations

import os
import time

import doors
import horovod.torch as hvd
import pytest
import ranks
import small_net

pytestmark = pytest.mark.slow


def program(how: str, door: str, spec: str) -> None:
    """Train while rank 1 leaves, by hvd.join() or by dying; report what the others are told, and when."""
    hvd.init()
    model = small_net.net()
    optimizer = doors.sgd(door, model, spec, bucket_mb=0.015)
    data = doors.batches()
    small_net.train(model, optimizer, data, 3)
    hvd.barrier()
    start = time.monotonic()
    if hvd.rank() != 1:
        said = small_net.refused(lambda: small_net.train(model, optimizer, data, 100))
        if said == "nothing was raised":
            hvd.join()
    elif how == "join":
        said = small_net.refused(hvd.join)
    else:
        os._exit(3)
    ranks.report({"said": said, "seconds": time.monotonic() - start})
    time.sleep(1)  # the others could take a rank's end for the error, and some do not hear of it before
    os._exit(0)  # Horovod is broken and cannot be shut down


@pytest.mark.parametrize(
    "spec, door", [("topk:ratio=0.01", doors.COMPRESSION), ("topk:ratio=0.01", doors.OWN), ("dense", doors.COMPRESSION)]
)
def test_join_is_named_among_the_causes(spec: str, door: str) -> None:
    """hvd.join() on one rank while another trains: no gather can take part in it, and no carrier comes back right."""
    found = ranks.launch(program, 2, "join", door, spec, seconds=60)
    assert found[0]["said"].startswith("HorovodInternalError: "), found
    ours = "gradcomp's exchange failed" in found[0]["said"]
    # With carriers Horovod itself may be the first to meet the broken network, at a carrier.
    assert ours or door == doors.COMPRESSION, found
    assert not ours or "hvd.join()" in found[0]["said"], found


def test_a_dense_exchange_without_carriers_goes_on_when_a_rank_joins() -> None:
    """It is an allreduce, to which Horovod adds zeros for a rank that joined: as in Horovod's own training."""
    found = ranks.launch(program, 2, "join", doors.OWN, "dense", seconds=60)
    assert [rank["said"] for rank in found] == ["nothing was raised"] * 2


@pytest.mark.parametrize("door", doors.DOORS)
def test_a_rank_that_dies_ends_the_step_of_the_others(door: str) -> None:
    found = ranks.launch(program, 3, "die", door, "topk:ratio=0.01", seconds=60, dies={1: 3})
    for rank in found:
        assert rank["said"].startswith("HorovodInternalError: "), found
        assert rank["seconds"] < 20  # the broken connection is seen at once; the rest is a busy machine
