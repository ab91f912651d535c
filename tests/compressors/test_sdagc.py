"""sdagc: thresholds by standard deviation, the steering of lam, and the capacity that follows counts eight steps later."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import gradients
import pytest
import torch
from compressors.test_topk import payload, split_bytes, tree_bytes
from torch import Tensor

import gradcomp
from gradcomp.compressors.sdagc import Capacity, Sdagc, laplace_density, rounded_up
from gradcomp.core.requests import Field, Payload
from gradcomp.engine.feedback import Feedback
from gradcomp.messages import payload as payloads
from gradcomp.native.memory import DELAY

# Entries of a bucket whose lam is steered.
N = 200_000
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
    "sdagc:lam=3.3,scope=layer,small=dense": _bytes(3.3, "dense"),
    "sdagc:lam=2,small=pool": _bytes(2.0, "pool"),
    "sdagc:lam=1.5,wire=exact": _bytes(1.5, wire="exact"),
    "sdagc:lam=2.5,flush=7": _bytes(2.5),
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


def test_a_momentum_only_shares_entries_by_age() -> None:
    """Of each residual, 1 - 0.9 to the power of its age is offered. Those above the threshold go, and the rest stays."""
    torch.manual_seed(0)
    simulation = gradcomp.Simulation("sdagc:lam=2,wire=exact,momentum=0.9", {"w": (300, 50)}, 1)
    shares = torch.tensor([1 - 0.9**age for age in range(255)])
    left, ages = torch.zeros(300, 50), torch.zeros(300, 50, dtype=torch.int64)
    for _ in range(4):
        grad = torch.randn(300, 50)
        ages += 1
        whole = left + grad / (1 - 0.9)
        offered = shares[ages] * whole
        update = simulation.step([{"w": grad}])["w"]
        sent = update != 0
        assert torch.equal(sent, offered.abs() > 2 * offered.double().std(correction=0))
        torch.testing.assert_close(update[sent], offered[sent])
        left = whole - torch.where(sent, offered, 0.0)
        torch.testing.assert_close(simulation.residual(0)["w"], left)
        ages[sent] = 0
    assert 0 < int((ages == 0).sum()) < ages.numel()


def test_each_layer_has_its_threshold() -> None:
    torch.manual_seed(0)
    shapes = {"loud": (200, 100), "quiet": (200, 100)}
    grads = {"loud": 1000 * torch.randn(200, 100), "quiet": torch.randn(200, 100)}
    update = gradcomp.Simulation("sdagc:lam=2.5,scope=layer", shapes, 1).step([grads])
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


def test_a_layer_below_its_threshold_sends_its_largest_entry() -> None:
    """Of ten entries none can be 3.3 deviations from their mean: without the rule the layer would never send."""
    _, update = one("sdagc:lam=3.3", torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1.5, 1, -1]))
    assert update.nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("spec", ["sdagc", "sdagc:lam=0.1"])
def test_a_layer_without_gradient_sends_nothing(spec: str) -> None:
    simulation, update = one(spec, torch.zeros(50, 50))
    assert not update.any()
    assert simulation._reducers[0].buckets[0].progress.statistics.flag.item() == 0


def test_a_constant_layer_is_not_stuck() -> None:
    """sigma is 0 and everything exceeds it: as much as fits travels now, the rest in the next steps."""
    simulation, update = one("sdagc:lam=3.3,cap=0.1", torch.full((100, 100), 2.0))
    first = int(update.count_nonzero())
    assert 0 < first < 10_000
    for _ in range(60):
        simulation.step([{"w": torch.zeros(100, 100)}])
    assert not simulation.residual(0)["w"].any()


@pytest.mark.parametrize("route", ["allgather", "split", "tree"])
def test_the_capacity_follows_the_entries_that_want_to_travel(route: str) -> None:
    """After eight steps a payload has space for the entries of the busiest rank: more in a burst, then fewer. All agree."""
    simulation = gradcomp.Simulation(f"sdagc:lam=3,small=none,route={route}", {"w": (200, 200)}, 4)
    sizes = []
    for step in range(60):
        heavy = 20 <= step < 40
        torch.manual_seed(step)
        simulation.step([{"w": torch.randn(200, 200) ** (3 if heavy else 1)} for _ in range(4)])
        sizes.append(max(simulation.bytes_sent))
        assert len({reducer.buckets[0].inner.capacity.entries for reducer in simulation._reducers}) == 1
    assert len(set(sizes[:DELAY])) == 1 and sizes[20 + DELAY] > sizes[20]
    assert max(sizes[30:44]) > 1.2 * sizes[19] and sizes[-1] < 0.9 * max(sizes)


def test_an_embedding_is_judged_by_the_rows_that_were_used() -> None:
    """Of 2,000 rows 20 have a gradient: over all entries sigma is so small that nearly all of these would travel."""
    torch.manual_seed(0)
    value = torch.zeros(2000, 64)
    value[::100] = torch.randn(20, 64)
    _, skip = one("sdagc:lam=2.5,cap=1", value)
    used = value.count_nonzero()
    assert skip.count_nonzero() < 0.03 * used


def test_sam_is_momentum_on_the_summed_gradient() -> None:
    """An entry sent every T steps moves as momentum SGD does on the sums of T gradients; one buffer is enough."""
    torch.manual_seed(0)
    # lam=0 is a dense step. Here only the largest entry passes, and a flush makes steps of T = 3.
    simulation = gradcomp.Simulation("sdagc:lam=16,sam=0.9,flush=3", {"w": (40, 40)}, 1)
    velocity, alone = torch.zeros(40, 40), torch.zeros(40, 40, dtype=torch.bool)
    for _ in range(4):
        grads = [torch.randn(40, 40) for _ in range(3)]
        updates = [simulation.step([{"w": grad}])["w"].clone() for grad in grads]
        velocity = 0.9 * velocity + sum(grads)
        assert updates[0].count_nonzero() == updates[1].count_nonzero() == 1
        alone |= (updates[0] != 0) | (updates[1] != 0)
        torch.testing.assert_close(updates[2][~alone], velocity[~alone], rtol=1e-5, atol=1e-5)  # sums in another order


def test_flush_sends_everything_and_all_ages_begin_anew() -> None:
    simulation = gradcomp.Simulation("sdagc:flush=3,momentum=0.9", {"w": (100, 100)}, 2)
    for step in range(6):
        simulation.step([{"w": torch.randn(100, 100)} for _ in range(2)])
        assert bool(simulation._reducers[1].buckets[0].progress.ages.any()) == (step % 3 != 2)
    simulation = gradcomp.Simulation("sdagc:flush=3", {"w": (100, 100)}, 2)
    for step in range(6):
        simulation.step([{"w": torch.randn(100, 100)} for _ in range(2)])
        assert bool(simulation.residual(1)["w"].any()) == (step % 3 != 2)


def test_its_spec() -> None:
    assert gradcomp.make("sdagc:lam=3.3,momentum=0.9") == Feedback(Sdagc(lam=3.3), momentum=0.9)
    with pytest.raises(ValueError, match="needs the learning rates: pass optimizer="):
        gradcomp.Simulation("sdagc:density=0.01,lr_revision=density", {"w": (3,)}, 1)


def counted(count: int) -> list[Payload]:
    """Make the payloads of two ranks, of which the second one wanted to send `count` entries."""
    received = [payloads.empty((Field("header", torch.int32, 2),), torch.device("cpu")) for _ in range(2)]
    for each, own in zip(received, (1, count), strict=True):
        each["header"].copy_(torch.tensor([own, 0]))
    return received


def entries_after(counts: list[int], capacity: Capacity) -> list[int]:
    """List the capacity after each of these counts."""
    seen = []
    for count in counts:
        capacity.observe(counted(count))
        seen.append(capacity.entries)
    return seen


def test_a_count_has_its_effect_eight_steps_later() -> None:
    seen = entries_after([128] * 20 + [5000] + [128] * 20, Capacity(128, 10_000))
    assert seen[: 20 + DELAY - 1] == [128] * (20 + DELAY - 1), "a count is read before its copy has ended"
    assert seen[20 + DELAY - 1] == rounded_up(5000)


def test_the_capacity_shrinks_once_eight_counts_are_smaller() -> None:
    seen = entries_after([5000] * 8 + [100] * 40, Capacity(100, 10_000))
    assert seen[DELAY - 1 : 8 + 2 * DELAY - 2] == [rounded_up(5000)] * (DELAY + 7)
    assert set(seen[8 + 2 * DELAY - 2 :]) == {rounded_up(100)}


def test_a_saved_capacity_continues_alike() -> None:
    counts = [100] * 5 + [5000] + [100] * 30
    whole, first, second = (Capacity(100, 10_000) for _ in range(3))
    expected = entries_after(counts, whole)
    before = entries_after(counts[:11], first)
    second.load(first.save())
    assert before + entries_after(counts[11:], second) == expected


@pytest.mark.parametrize("wanted", [0.02, 0.001])
@pytest.mark.parametrize("louder", [1, 2])
def test_a_bucket_sends_its_share(wanted: float, louder: int) -> None:
    """It does so, too, if gradients double and halve every 20 steps. The largest entries of the residual are nearly equal."""
    simulation = gradcomp.Simulation(f"sdagc:density={wanted},wire=exact", {"w": (500, 400)}, 2)
    shares = []
    for step in range(120):
        torch.manual_seed(step)
        grads = [torch.randn(500, 400) * (louder if step // 20 % 2 else 1) for _ in range(2)]
        before = simulation.residual(0)["w"].clone()
        simulation.step([{"w": grad} for grad in grads])
        taken = (simulation.residual(0)["w"] != before + grads[0]).sum().item()
        shares.append(taken / (wanted * N))
        assert simulation.bytes_sent[0] < 8 * 1.1 * wanted * N + 200
    assert 0.9 < statistics.fmean(shares[30:]) < 1.1
    assert min(shares[30:]) > (0.7 if louder == 1 else 0.25) and max(shares) < 1.11


def test_the_density_follows_the_rate_from_its_highest_on() -> None:
    """A warm-up of the rate sends fewer entries, too. Its rate does not count as the highest."""
    w = torch.nn.Parameter(torch.zeros(N))
    optimizer = torch.optim.SGD([w], lr=0.1)
    simulation = gradcomp.Simulation(
        "sdagc:lr_revision=density,wire=exact", {"w": (N,)}, 1, optimizer=optimizer, named_parameters=[("w", w)]
    )
    sent = []
    for rate in (0.1, 1.0, 0.1):
        optimizer.param_groups[0]["lr"] = rate
        simulation.step([{"w": torch.randn(N, generator=torch.Generator().manual_seed(1))}])
        sent.append(simulation.bytes_sent[0])
    assert sent[0] == sent[1] and sent[2] == pytest.approx(sent[1] / 10, rel=0.02)


@pytest.mark.parametrize("density", [0.4, 0.6, 0.9])
@pytest.mark.parametrize("route", ["tree", "allgather", "split"])
def test_much_is_sent_dense(density: float, route: str) -> None:
    simulation = gradcomp.Simulation(f"sdagc:density={density},route={route}", {"w": (20_000,)}, 2)
    simulation.step([{"w": torch.randn(20_000)} for _ in range(2)])
    assert max(simulation.bytes_sent) <= 1.2 * 80_000  # a split's parts have slack


@pytest.mark.parametrize("density,of_freedom", [(0.6, 30.0), (0.3, 2.0), (0.01, 2.0)])
def test_a_share_far_from_the_usual_is_reached(density: float, of_freedom: float) -> None:
    """The thresholds are well below half a deviation, and beyond heavy tails."""
    torch.manual_seed(0)
    simulation = gradcomp.Simulation(f"sdagc:density={density}", {"w": (N,)}, 1)
    drawn = torch.distributions.StudentT(of_freedom)
    sent = [int(simulation.step([{"w": drawn.sample((N,))}])["w"].count_nonzero()) for _ in range(60)]
    assert 0.85 < statistics.fmean(sent[30:]) / (density * N) < 1.1


def test_a_change_of_density_begins_anew() -> None:
    simulation = gradcomp.Simulation("sdagc:density=0.02", {"w": (500, 400)}, 1)
    for step in range(3):
        torch.manual_seed(step)
        simulation.step([{"w": torch.randn(500, 400)}])
    simulation.change("sdagc:density=0.001")
    for step in range(40):
        torch.manual_seed(100 + step)
        sent = int(simulation.step([{"w": torch.randn(500, 400)}])["w"].count_nonzero())
    assert 0.5 * 0.001 * N < sent < 1.1 * 0.001 * N + 1
