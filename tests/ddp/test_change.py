"""change() in mid-training, in DDP on one rank: what the spec before had kept goes at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from one_rank import net, plain, sgd
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp.engine.reducer import Reducer

pytestmark = pytest.mark.usefixtures("group_of_one")
SPECS = ["topk", "sdagc", "orq:levels=5,feedback=true", "gtopk", "gs_sgd", "topk; *bias=dense:feedback=true"]


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Hold that nothing is left to the collector of cycles, which may come dozens of changes later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("spec", SPECS)
def test_a_residual_ends_with_its_spec(spec: str) -> None:
    others = {id(each) for each in gc.get_objects() if type(each) is Reducer}
    body = net()
    model, optimizer = DistributedDataParallel(body), sgd(body.parameters())
    handle = gradcomp.ddp.attach(model, spec, optimizer=optimizer)
    plain(model, optimizer, 0)
    before = [weakref.ref(each) for each in gc.get_objects() if type(each) is Reducer and id(each) not in others]
    assert len(before) == 1
    handle.change("topk:ratio=0.5")
    plain(model, optimizer, 1)
    assert before[0]() is None
