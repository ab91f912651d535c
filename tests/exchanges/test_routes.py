"""The allgather of sparse entries refuses a malformed payload."""

from __future__ import annotations

import pytest
import torch

from gradcomp.core.compressor import Acc
from gradcomp.core.requests import World
from gradcomp.exchanges import routes
from gradcomp.messages import payload
from gradcomp.messages.sparse import CODECS
from gradcomp.native import kernels
from gradcomp.native.memory import Memory


def test_a_malformed_payload_raises_and_names_the_rank() -> None:
    for form in ("compact", "exact"):
        acc = Acc(torch.randn(100_000), Memory())
        taken = CODECS[form].allocate(acc, 50)
        kernels.take_topk(acc.residual, 50, *taken.unpacked)
        steps = routes.allgather(acc, taken, World(0, 2))
        request = next(steps)
        broken = payload.read(request.payload.form, request.payload.bytes.clone())
        broken["header"][0] = -5
        with pytest.raises(ValueError, match="the payload of rank 1 is malformed: its header holds the count -5"):
            steps.send([request.payload, broken])
