"""sdagc: per-layer standard-deviation thresholds, and every part that can be switched."""

from __future__ import annotations

import math
from collections.abc import Callable

import gradients
import pytest
import torch
from compressors.test_topk import payload, split_bytes, tree_bytes
from torch import Tensor

import gradcomp
from gradcomp.compressors.sdagc import Sdagc
from gradcomp.compressors.sdagc.distribution import laplace_density, merge_moments
from gradcomp.engine.steps.feedback import Feedback

# Entries of the laws' small layers; the other 2640 are in two matrices. The laws' other model is one layer of 60.
SMALL = 248


def _capacity(n: int, lam: float) -> int:
    return math.ceil(1.25 * laplace_density(lam) * n)


def _sparse(n: int, lam: float, wire: str) -> int:
    capacity = _capacity(n, lam)
    return 4 * n if capacity >= n or payload(n, capacity, wire) >= 4 * n else payload(n, capacity, wire)


def _bytes(lam: float, small: str = "none", wire: str = "compact") -> Callable[[int], int]:
    def promised(n: int) -> int:
        few = 0 if small == "none" else SMALL if n > 60 else n
        apart = 4 * few if small == "dense" else _sparse(few, lam, wire) if few else 0
        return apart + (_sparse(n - few, lam, wire) if n > few else 0)

    return promised


def _density(share: float) -> Callable[[int], int]:
    return lambda n: payload(n, math.ceil(1.1 * math.ceil(share * n)))


PROMISED_BYTES: dict[str, Callable[..., int]] = {
    "sdagc": _density(0.01),
    "sdagc:lam=3.3,per=layer,small=dense": _bytes(3.3, "dense"),
    "sdagc:lam=2,small=pool": _bytes(2.0, "pool"),
    "sdagc:lam=1.5,wire=exact": _bytes(1.5, wire="exact"),
    "sdagc:lam=2,sigma=zero,stat=raw": _bytes(2.0),
    "sdagc:lam=2.5,live=false,flush=7": _bytes(2.5),
    "sdagc:density=0.05": _density(0.05),
    "sdagc:lam=0": lambda n: 4 * n,
    "sdagc:lam=2,route=split": lambda n, rank, world: split_bytes(n, _capacity(n, 2.0), world),
    "sdagc:lam=2.5,route=tree": lambda n, rank, world: tree_bytes(n, _capacity(n, 2.5), rank, world),
    "sdagc:lam=2,by_host=true": lambda n, rank, world: (world - 1) * payload(n, _capacity(n, 2.0)),
}

TABLE = {"normal": {100: 2.576, 433: 3.047, 600: 3.144, 1000: 3.291, 2021: 3.484}}
TABLE["laplace"] = {100: 3.256, 433: 4.293, 600: 4.523, 1000: 4.885, 2021: 5.382}


def one(spec: str, value: Tensor) -> tuple[gradcomp.Simulation, Tensor]:
    """The update after one step of one rank and one layer."""
    simulation = gradcomp.Simulation(spec, {"w": tuple(value.shape)}, 1)
    return simulation, simulation.step([{"w": value}])["w"]


@pytest.mark.parametrize("kind", TABLE)
def test_the_density_is_that_of_the_distribution(kind: str) -> None:
    """Within 5 % of n / k; where the table expects fewer than 25,000 entries, that is more than eight deviations of a count."""
    value = gradients.draw(kind, 10_000_000, seed=1)
    for ratio, lam in TABLE[kind].items():
        _, update = one(f"sdagc:lam={lam}", value)
        sent = int(update.count_nonzero())
        assert abs(value.numel() / sent / ratio - 1) < 0.05, f"{kind}, lam={lam}: 1 of {value.numel() / sent:.0f}"


def test_masks_only_move_entries() -> None:
    """What travels exactly and what stays are the same floats, bit for bit, for several steps with momentum."""
    torch.manual_seed(0)
    simulation = gradcomp.Simulation("sdagc:lam=2,wire=exact,momentum=0.9", {"w": (300, 50)}, 1)
    velocity, value = torch.zeros(300, 50), torch.zeros(300, 50)
    before = torch.ones(300, 50, dtype=torch.bool)
    for _ in range(4):
        grad = torch.randn(300, 50)
        velocity = 0.9 * velocity + grad
        value = value + velocity
        update = simulation.step([{"w": grad}])["w"]
        sigma = value.double().std(correction=0)
        left = simulation.residual(0)["w"]
        sent = update != 0
        assert torch.equal(sent, value.abs() > 2 * sigma)
        assert torch.equal(torch.where(sent, update, left), value) and not left[sent].any()
        value, velocity, before = left, torch.where(sent & ~before, 0.0, velocity), sent


def test_lam_zero_is_plain_momentum_sgd() -> None:
    torch.manual_seed(0)
    simulation = gradcomp.Simulation("sdagc:lam=0,momentum=0.5", {"w": (40, 50)}, 1)
    velocity = torch.zeros(40, 50)
    for _ in range(3):
        grad = torch.randn(40, 50)
        velocity = 0.5 * velocity + grad
        assert torch.equal(simulation.step([{"w": grad}])["w"], velocity)  # all is sent, so nothing waits


def test_each_layer_has_its_threshold() -> None:
    torch.manual_seed(0)
    shapes = {"loud": (200, 100), "quiet": (200, 100)}
    grads = {"loud": 1000 * torch.randn(200, 100), "quiet": torch.randn(200, 100)}
    update = gradcomp.Simulation("sdagc:lam=2.5,per=layer", shapes, 1).step([grads])
    assert all(150 < update[name].count_nonzero() < 350 for name in shapes)
    together = gradcomp.Simulation("sdagc:lam=2.5", shapes, 1).step([grads])
    assert together["quiet"].count_nonzero() == 0 < together["loud"].count_nonzero()


def test_small_layers_go_dense_or_in_a_pool() -> None:
    torch.manual_seed(0)
    shapes = {"w": (100, 100), "bias": (2000,), "tiny": (10, 10)}
    grads = {name: torch.randn(shape) for name, shape in shapes.items()}
    dense = gradcomp.Simulation("sdagc:small=dense", shapes, 1)
    update = dense.step([grads])
    assert torch.equal(update["bias"], grads["bias"]) and torch.equal(update["tiny"], grads["tiny"])
    assert len(dense._reducers[0].buckets) == 2  # both in one reduction
    pool = gradcomp.Simulation("sdagc:small=pool,lam=2", shapes, 1)
    update = pool.step([grads])
    sigma = torch.cat([grads["tiny"].view(-1), grads["bias"]]).std(correction=0)
    for name in ("bias", "tiny"):
        assert torch.equal(update[name] != 0, grads[name].abs() > 2 * sigma)
    assert pool.residual(0)["bias"].count_nonzero() > 1000


def test_a_long_vector_is_no_bias() -> None:
    _, update = one("sdagc:lam=3.3,small=dense", torch.randn(70_000))
    assert 0 < update.count_nonzero() < 200


@pytest.mark.parametrize("live,sent", [("true", 1), ("false", 0)])
def test_liveness(live: str, sent: int) -> None:
    """Of ten entries none can be 3.3 deviations from their mean: without the rule the layer would never send."""
    _, update = one(f"sdagc:lam=3.3,live={live}", torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1.5, 1, -1]))
    assert update.count_nonzero() == sent


@pytest.mark.parametrize("spec", ["sdagc", "sdagc:lam=0.1,live=false"])
def test_a_layer_without_gradient_sends_nothing(spec: str) -> None:
    simulation, update = one(spec, torch.zeros(50, 50))
    assert not update.any()
    assert simulation._reducers[0].buckets[0].state.flag.item() == 0


def test_a_constant_layer_is_not_stuck() -> None:
    """sigma is 0 and everything exceeds it: as much as fits travels now, the rest in the next steps."""
    simulation, update = one("sdagc:lam=3.3,cap=0.1", torch.full((100, 100), 2.0))
    first = int(update.count_nonzero())
    assert 0 < first < 10_000
    for _ in range(60):
        simulation.step([{"w": torch.zeros(100, 100)}])
    assert not simulation.residual(0)["w"].any()


def test_a_burst_is_cut_to_its_largest_wherever_they_stand() -> None:
    torch.manual_seed(0)
    value = torch.randn(200, 500) * 1e-3
    spikes = torch.randperm(value.numel())[:3000]
    value.view(-1)[spikes] = 1 + torch.rand(3000)
    simulation, update = one("sdagc:lam=3.3,cap=0.001", value)
    capacity = math.ceil(1.25 * laplace_density(3.3) * value.numel())
    sent = update.view(-1).nonzero().view(-1)
    assert sent.numel() == capacity
    assert torch.equal(sent, value.view(-1).abs().topk(capacity).indices.sort().values)
    assert simulation.residual(0)["w"].count_nonzero() >= value.numel() - capacity


def test_the_capacity_follows_the_entries_that_pass() -> None:
    """After eight steps the payload has room for what the busiest rank needed, alike on all ranks."""
    simulation = gradcomp.Simulation("sdagc:lam=2", {"w": (300, 500)}, 3)
    sizes = []
    for step in range(30):
        torch.manual_seed(step)
        simulation.step([{"w": torch.randn(300, 500) ** 3} for _ in range(3)])
        assert len(set(simulation.bytes_sent)) == 1
        sizes.append(simulation.bytes_sent[0])
    assert len(set(sizes[:8])) == 1 and sizes[8] != sizes[0]
    buckets = [reducer.buckets[0].state.inner.capacity for reducer in simulation._reducers]
    assert len({capacity.entries for capacity in buckets}) == 1


def test_sigma_shared_over_ranks() -> None:
    """A rank with large gradients sends more, one with small ones less, than each would by its own sigma."""
    torch.manual_seed(0)
    grads = [{"w": torch.randn(300, 300)}, {"w": 5 * torch.randn(300, 300)}]
    simulation = gradcomp.Simulation("sdagc:lam=4,shared=true,live=false,wire=exact", {"w": (300, 300)}, 2)
    simulation.step(grads)
    both = torch.cat([own["w"] for own in grads]).double()
    tau = 4 * both.std(correction=0)
    for rank, own in enumerate(grads):
        assert torch.equal(simulation.residual(rank)["w"] == 0, own["w"].abs() > tau)


def test_statistics_of_several_ranks_are_those_of_all_entries() -> None:
    parts = [torch.randn(1000).double() + rank for rank in range(3)]
    moments = [torch.stack([x.mean(), (x - x.mean()).square().sum(), x.min(), x.max(), torch.tensor(1000.0)]) for x in parts]
    found = merge_moments([own.view(1, 5).double() for own in moments], 1, torch.tensor([1000.0], dtype=torch.float64))[0]
    whole = torch.cat(parts)
    assert math.isclose(found[0], whole.mean(), rel_tol=1e-12)
    assert math.isclose(found[1] / 1000, whole.var(correction=0), rel_tol=1e-12)
    assert found[2] == parts[1].min() and found[3] == parts[1].max()


def test_an_embedding_is_judged_by_the_rows_that_were_used() -> None:
    """Of 2,000 rows 20 have a gradient: over all entries sigma is so small that nearly all of these would travel."""
    torch.manual_seed(0)
    value = torch.zeros(2000, 64)
    value[::100] = torch.randn(20, 64)
    _, skip = one("sdagc:lam=2.5,cap=1", value)
    used = value.count_nonzero()
    assert skip.count_nonzero() < 0.03 * used


def test_sigma_from_zero() -> None:
    torch.manual_seed(0)
    value = torch.randn(200, 200) + 10
    _, update = one("sdagc:lam=1.5,sigma=zero,live=false,wire=exact", value)
    assert not update.any()  # the root mean square is 10


def test_sam_is_momentum_on_the_summed_gradient() -> None:
    """An entry sent every T steps moves as momentum SGD does on the sums of T gradients; one buffer is enough."""
    torch.manual_seed(0)
    simulation = gradcomp.Simulation("sdagc:lam=0,sam=0.9,flush=0,wire=exact", {"w": (40, 40)}, 1)
    assert simulation._reducers[0].buckets[0].state.velocity is None
    # lam=0 with room for all is a dense step; a threshold no entry reaches, and a flush, make steps of T = 3.
    simulation = gradcomp.Simulation("sdagc:lam=16,live=false,sam=0.9,flush=3", {"w": (40, 40)}, 1)
    velocity = torch.zeros(40, 40)
    for _ in range(4):
        grads = [torch.randn(40, 40) for _ in range(3)]
        updates = [simulation.step([{"w": grad}])["w"].clone() for grad in grads]
        velocity = 0.9 * velocity + sum(grads)
        assert not updates[0].any() and not updates[1].any()
        torch.testing.assert_close(updates[2], velocity, rtol=1e-5, atol=1e-5)  # sums in another order


def test_flush_sends_everything() -> None:
    simulation = gradcomp.Simulation("sdagc:flush=3", {"w": (100, 100)}, 2)
    for step in range(6):
        simulation.step([{"w": torch.randn(100, 100)} for _ in range(2)])
        assert bool(simulation.residual(1)["w"].any()) == (step % 3 != 2)


def test_staleness_divides_by_the_steps_an_entry_waited() -> None:
    simulation = gradcomp.Simulation("sdagc:lam=16,lr_revision=staleness", {"w": (8, 8)}, 1)
    grad = torch.zeros(8, 8)
    grad[2, 3] = 1.0
    other = torch.zeros(8, 8)
    other[4, 4], other[2, 3] = 8.0, 1.0
    simulation.step([{"w": other}])  # 8 goes, the 1 waits
    update = simulation.step([{"w": grad}])["w"]
    assert update[2, 3] == 1.0  # 1 + 1, gathered in two steps
    assert simulation.residual(0)["w"][2, 3] == 0


def test_staleness_by_layer_divides_by_the_mean() -> None:
    spec = "sdagc:lam=1.5,lr_revision=per_layer,cap=1,live=false,wire=exact"
    simulation = gradcomp.Simulation(spec, {"w": (8, 8)}, 1)
    grad = torch.zeros(8, 8)
    grad[0, 0] = 4.0
    simulation.step([{"w": grad}])
    simulation.step([{"w": torch.zeros(8, 8)}])
    both = torch.zeros(8, 8)
    both[0, 0], both[1, 1] = 4.0, 8.0
    update = simulation.step([{"w": both}])["w"]
    if update[0, 0] != 0:  # waited 2 and 3 steps: 2.5 on average
        assert update[0, 0] == pytest.approx(4 / 2.5) and update[1, 1] == pytest.approx(8 / 2.5)
    else:
        assert update[1, 1] == pytest.approx(8 / 3)


def test_its_spec() -> None:
    assert gradcomp.make("sdagc:lam=3.3,momentum=0.9") == Feedback(Sdagc(lam=3.3), momentum=0.9)
    for bad in ("lam=-1", "lam=nan", "density=1", "stat=median", "small=no", "sam=1", "cap=0", "wire=morse", "lr_revision=x"):
        with pytest.raises(ValueError, match=f"sdagc: {bad} must be"):
            gradcomp.make(f"sdagc:{bad}")
    with pytest.raises(ValueError, match=r"momentum=0\.9 acts on top of sdagc:sam=0\.9's own momentum 0\.9"):
        gradcomp.make("sdagc:sam=0.9,momentum=0.9")
    with pytest.raises(ValueError, match="needs the learning rates: pass optimizer="):
        gradcomp.Simulation("sdagc:density=0.01,lr_revision=density", {"w": (3,)}, 1)
