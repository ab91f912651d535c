"""FSDP2: the exchange of updates between replicas: its law, equal replicas in every kind of pass, and whole trainings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_models import MESHES, RANKS, by_hand, error, inputs, loss, mesh_of, net, whole_grads, wrapped
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gradcomp
import gradcomp.fsdp

# Besides the meshes whose replicas torch reduces: those whose modules know the shards alone, of which there are two, or one.
HIDDEN, ALL_HIDDEN = "replicas hidden", "replicas of one shard hidden"
KINDS = [*MESHES[1:], HIDDEN, ALL_HIDDEN]
SPECS = ["topk:ratio=0.1", "gs_sgd:ratio=0.05", "orq", "sign", "sdagc:small=dense", "topk:ratio=0.1,warmup=4"]
BY_LAYER = "topk:ratio=0.1; 2.*=blocks; *.bias=dense"


def attached(kind: str, spec: str, model: nn.Sequential | None = None, **options: Any) -> tuple[Any, Any, DeviceMesh]:
    """Return a model on a mesh, its handle, and the mesh. Replicas begin unlike."""
    model = net(dist.get_rank() // 2) if model is None else model
    if kind not in (HIDDEN, ALL_HIDDEN):
        mesh = mesh_of(kind)
        model = wrapped(kind, model, mesh, **options)
        return model, gradcomp.fsdp.attach(model, spec), mesh
    mesh = mesh_of("two by two" if kind == HIDDEN else "one shard", {})
    model = wrapped("two by two", model, mesh["shard"], **options)
    return model, gradcomp.fsdp.attach(model, spec, replicas=mesh["replicate"]), mesh


def shards_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.to_local().detach().clone() for name, each in model.named_parameters()}


def are_equal(model: nn.Module, mesh: DeviceMesh) -> bool:
    """Decide whether all replicas have the same shards, to the bit."""
    equal = True
    for each in shards_of(model).values():
        first = each.clone()
        dist.broadcast(first, dist.get_global_rank(mesh.get_group("replicate"), 0), mesh.get_group("replicate"))
        equal &= torch.equal(each, first)
    return equal


def mean(arrays: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    for each in arrays.values():
        dist.all_reduce(each, group=mesh.get_group("replicate"))
    return {name: each / mesh["replicate"].size() for name, each in arrays.items()}


def law(kind: str, spec: str) -> tuple[bool, float, dict[str, Any]]:
    """Take three steps by SGD. Return whether replicas are equal, the imbalance of weights over what moved, and figures."""
    model, handle, mesh = attached(kind, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    equal, wrong = are_equal(model, mesh), 0.0
    for step in range(3):
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        if "warmup" in spec:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        start, before = shards_of(model), mean(handle.residual(), mesh)
        own = {n: 0.1 * each.grad.to_local() for n, each in model.named_parameters()}
        optimizer.step()
        now, after, steps = shards_of(model), mean(handle.residual(), mesh), mean(own, mesh)
        off = sum(float((before[n] + steps[n] - after[n] - (start[n] - now[n])).abs().sum()) for n in own)
        wrong = max(wrong, off / (1e-9 + sum(float(each.abs().sum()) for each in steps.values())))
        equal &= are_equal(model, mesh)
    return equal, wrong, handle.stats()


def rounded(kind: str) -> dict[str, float]:
    """Exchange gradients. Return their errors beside the mean by hand."""
    join()
    found = {}
    for spec in ("dense", "blocks:bits=8"):
        model, handle, _ = attached(kind, spec, net())
        loss(model, inputs(0)[dist.get_rank()]).backward()
        found[spec] = error(whole_grads(model), by_hand(0))
        assert handle.stats()["steps"] == 1 and handle.stats()["bytes_sent"] > 0
    return found


@pytest.mark.parametrize("kind", [HIDDEN, ALL_HIDDEN])
def test_fine_specs_exchange_gradients_over_hidden_replicas_too(kind: str) -> None:
    for rank in launch(rounded, RANKS, kind):
        assert rank["dense"] < 1e-12 and rank["blocks:bits=8"] < 3e-4


def laws(kind: str) -> dict[str, Any]:
    join()
    specs = [*SPECS, BY_LAYER] if kind in ("two by two", HIDDEN) else SPECS[:2]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*over shards rounds gradients coarsely")
        return {spec: law(kind, spec) for spec in specs}


@once
def of_laws(kind: str) -> list[dict[str, Any]]:
    return launch(laws, RANKS, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_conserved_and_replicas_equal(kind: str) -> None:
    """Residual before + the replicas' mean step = residual after + what the weights moved, from equal weights on."""
    for rank in of_laws(kind):
        for spec, (equal, wrong, stats) in rank.items():
            assert equal and (wrong < 1e-3 or spec in ("orq", BY_LAYER)), (
                spec,
                wrong,
            )  # which keep nothing of what they round off
            assert stats["steps"] == 3 and stats["exchanges"].startswith("updates, over replicas"), spec
            assert stats["bytes_dense"] == 4 * sum(each.numel() for each in net().parameters())


# Programs: each takes steps, and returns the model and the mesh.


def train(model: Any, steps: int = 3, act: Callable[[int, Any], Any] | None = None, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        optimizer.zero_grad()
        if act is None:
            loss(model, inputs(step)[dist.get_rank()]).backward()
        else:
            act(step, optimizer)
        optimizer.step()


def momentum_clip_and_foreach(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")

    def act(step: int, optimizer: Any) -> None:
        loss(model, inputs(step)[dist.get_rank()]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, 5, act, foreach=True)
    return model, mesh


def accumulated(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")

    def act(step: int, optimizer: Any) -> None:
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            loss(model, inputs(10 * step + part)[dist.get_rank()]).backward()

    train(model, 3, act)
    return model, mesh


def two_passes_and_kept_gradients(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    for step in range(4):
        loss(model, inputs(step)[dist.get_rank()]).backward()
        loss(model, inputs(9 - step)[dist.get_rank()]).backward()
        optimizer.step()  # gradients stay
    return model, mesh


def frozen_and_thawed(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        model[2].requires_grad_(step < 2 or step > 3)
        before = shards_of(model)["2.weight"]
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        optimizer.step()
        assert (step in (2, 3)) == torch.equal(before, shards_of(model)["2.weight"]) or not before.numel()
    return model, mesh


def changed(kind: str) -> Any:
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, spec in enumerate(("topk:ratio=0.1", "blocks", "topk:ratio=0.2", "dense", "sign", "half")):
        handle.change(spec)
        for again in range(2):
            optimizer.zero_grad()
            loss(model, inputs(2 * step + again)[dist.get_rank()]).backward()
            optimizer.step()
            assert are_equal(model, mesh), spec
    return model, mesh


def sharded_by_columns(kind: str) -> Any:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(50, 64, bias=False), nn.Tanh(), nn.Linear(64, 8, bias=False))
    model, _, mesh = attached(kind, "topk:ratio=0.1", layers, shard_placement_fn=lambda _: Shard(1))
    train(model)
    return model, mesh


def offloaded(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model)
    return model, mesh


def in_bfloat16(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", net().bfloat16())
    train(model, 3, lambda step, _: loss(model, inputs(step)[dist.get_rank()].bfloat16()).backward())
    return model, mesh


def scaled_by_a_sum(kind: str) -> Any:
    model, _, mesh = attached(kind, "topk:ratio=0.1", reduce_dtype=torch.float16)
    train(model)
    return model, mesh


def loaded_after(kind: str) -> Any:
    """Parameters come after attach(), as new ones."""
    with torch.device("meta"):
        model: Any = net()
    mesh = mesh_of("two by two", None if kind != HIDDEN else {})
    for layer in (*(each for each in model if isinstance(each, nn.Linear)), model):
        fully_shard(layer, mesh=mesh if kind != HIDDEN else mesh["shard"])
    gradcomp.fsdp.attach(model, "topk:ratio=0.1", replicas=mesh["replicate"] if kind == HIDDEN else None)
    state = net().state_dict()
    shards = {n: distribute_tensor(state[n], each.device_mesh, each.placements) for n, each in model.named_parameters()}
    model.load_state_dict(shards, assign=True)
    train(model)
    return model, mesh


def not_finite_on_one_rank(kind: str) -> Any:
    """A scaler skips the step in all replicas alike, and training goes on."""
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        optimizer.zero_grad()
        batch = inputs(step)[dist.get_rank()].clone()
        if step == 1 and dist.get_rank() == 1:
            batch[0, 5] = float("inf")
        loss(model, batch).backward()
        norm = torch.nn.utils.get_total_norm([each.grad for each in model.parameters()])
        finite = bool(norm.full_tensor().isfinite())
        assert finite == (step != 1)
        if finite:
            optimizer.step()
    assert handle.stats()["steps"] == 3
    return model, mesh


def a_failed_step_and_a_change(kind: str) -> Any:
    """The step has moved some weights, on each replica in its own way."""
    model, handle, mesh = attached(kind, "topk:ratio=0.1")
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        if step == 1:
            before, optimizer.param_groups[2]["lr"] = shards_of(model), None
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[2]["lr"] = 0.1
            handle.change("topk:ratio=0.2")
            assert all(torch.equal(each, before[name]) for name, each in shards_of(model).items())
        else:
            optimizer.step()
    return model, mesh


def assigned(model: Any, names: Sequence[str], value: float = 0.0) -> None:
    """Give a model other parameters in place of these."""
    state = {n: each.detach().clone() + value for n, each in model.named_parameters() if n in names}
    model.load_state_dict(state, strict=False, assign=True)


def replaced_in_part(kind: str) -> Any:
    """One part gets other parameters, and an optimizer. That of the other part goes on, and its moment is not taken for new."""
    model, _, mesh = attached(kind, "topk:ratio=1,wire=exact")
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (model[0], model[2]))
    far = []
    for step in range(6):
        if step == 3:
            assigned(model, ["2.weight", "2.bias"])
            second = torch.optim.Adam(model[2].parameters(), lr=1e-3)
        model.zero_grad()
        loss(model, inputs(step)[dist.get_rank()]).backward()
        before = shards_of(model)["0.weight"]
        first.step()
        second.step()
        far.append(float((shards_of(model)["0.weight"] - before).abs().max()) if before.numel() else 0.0)
    assert max(far[3:]) <= 2 * max(far[:3]), far
    return model, mesh


def replaced_before_a_change(kind: str) -> Any:
    """What waits is delivered into the parameters that the model has now."""
    model, handle, mesh = attached(kind, "topk:ratio=0.01")
    train(model, 3)
    assigned(model, ["0.weight", "2.weight"])
    before = shards_of(model)
    waits = mean(handle.residual(), mesh)
    handle.change("blocks")
    for name, each in shards_of(model).items():
        torch.testing.assert_close(before[name] - each, waits[name], rtol=1e-4, atol=1e-6)
    return model, mesh


def memory_after(kind: str) -> Any:
    """Weights get their memory after attach(), unlike on the replicas, and the first pass makes them equal."""
    with torch.device("meta"):
        model: Any = net()
    mesh = mesh_of("two by two", None if kind != HIDDEN else {})
    for layer in (*(each for each in model if isinstance(each, nn.Linear)), model):
        fully_shard(layer, mesh=mesh if kind != HIDDEN else mesh["shard"])
    gradcomp.fsdp.attach(model, "topk:ratio=0.1", replicas=mesh["replicate"] if kind == HIDDEN else None)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for each in model.parameters():
            each.to_local().normal_(std=0.1)
    train(model)
    return model, mesh


def with_odd_buffers(kind: str) -> Any:
    model = net(dist.get_rank() // 2)
    for form in (torch.int16, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn):
        model.register_buffer(str(form).partition(".")[2], torch.full((3,), dist.get_rank() // 2).to(form))
    model.register_buffer("scalar", torch.tensor(float(dist.get_rank() // 2)))
    model, _, mesh = attached(kind, "topk:ratio=0.1", model)
    assert all(not each.to(torch.complex64).any() for each in model.buffers())
    train(model)
    return model, mesh


PROGRAMS = [
    a_failed_step_and_a_change,
    replaced_in_part,
    replaced_before_a_change,
    memory_after,
    with_odd_buffers,
    momentum_clip_and_foreach,
    accumulated,
    two_passes_and_kept_gradients,
    frozen_and_thawed,
    changed,
    sharded_by_columns,
    offloaded,
    in_bfloat16,
    scaled_by_a_sum,
    loaded_after,
    not_finite_on_one_rank,
]


def programs(kind: str) -> dict[str, tuple[bool, bool]]:
    join()
    found = {}
    for program in PROGRAMS:
        model, mesh = program(kind)
        finite = all(bool(each.isfinite().all()) for each in shards_of(model).values())
        found[program.__name__] = are_equal(model, mesh), finite
    return found


@once
def of_programs(kind: str) -> list[dict[str, tuple[bool, bool]]]:
    return launch(programs, RANKS, kind, seconds=120)


@pytest.mark.parametrize("program", [each.__name__ for each in PROGRAMS])
@pytest.mark.parametrize("kind", ["two by two", HIDDEN])
def test_replicas_stay_equal(kind: str, program: str) -> None:
    for rank in of_programs(kind):
        assert rank[program] == (True, True)


def against_one_replica(kind: str) -> tuple[float, float]:
    """Train with everything sent, beside torch's own exchange. Return the distance of the weights, and how far they went."""
    join()
    plain = wrapped("two by two", net(), mesh_of("two by two", {}))
    model, _, _ = attached(kind, "topk:ratio=1,wire=exact", net())
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            loss(each, inputs(step)[dist.get_rank()]).backward()
            optimizer.step()
    start = wrapped("two by two", net(), mesh_of("two by two", {}))
    weights = [torch.cat([each.flatten() for each in shards_of(one).values()]) for one in (start, plain, model)]
    return float((weights[1] - weights[2]).norm()), float((weights[1] - weights[0]).norm())


@pytest.mark.parametrize("kind", ["two by two", HIDDEN])
def test_with_everything_sent_it_is_torchs_exchange(kind: str) -> None:
    """The momentum, which is linear in the gradients, too."""
    for apart, far in launch(against_one_replica, RANKS, kind):
        assert apart < 1e-4 * far and far > 0


def refused() -> dict[str, str]:
    join()
    mesh, found = mesh_of("two by two"), {}
    plain = mesh_of("two by two", {})
    for name, on, replicas in [
        ("both", mesh, plain["replicate"]),
        ("no group", plain["shard"], plain),
        ("no mesh", plain["shard"], "replicate"),
        ("shards", plain["shard"], plain["shard"]),
        ("everyone", plain["shard"], dist.group.WORLD),
    ]:
        with pytest.raises((TypeError, ValueError)) as refusal:
            gradcomp.fsdp.attach(wrapped("two by two", net(), on), "topk", replicas=replicas)
        found[name] = str(refusal.value)
    with pytest.raises(ValueError) as refusal:
        attached(HIDDEN, "topk:clip=1; *.bias=dense")
    found["clip"] = str(refusal.value)
    hooked = wrapped("two by two", net(), plain["shard"])
    hooked[2].set_all_reduce_hook(lambda tensor: None)
    with pytest.raises(ValueError) as refusal:
        gradcomp.fsdp.attach(hooked, "topk", replicas=plain["replicate"])
    found["hook"] = str(refusal.value)
    for name in ("unfrozen", "unfrozen, new"):
        frozen = net()
        frozen[0].requires_grad_(False)
        model = wrapped("two by two", frozen, mesh)
        gradcomp.fsdp.attach(model, "topk")
        if name == "unfrozen, new":
            assigned(model, ["0.weight", "0.bias"])
        model[0].requires_grad_(True)
        with pytest.raises(RuntimeError) as unfrozen:
            train(model, 1)
        found[name] = str(unfrozen.value)
    return found


def test_what_is_refused() -> None:
    for rank in launch(refused, RANKS):
        assert "the mesh of the modules has replicas already" in rank["both"]
        assert "replicas= is a DeviceMesh" in rank["no group"] and "replicas= is a str" in rank["no mesh"]
        assert all("replicas= has ranks with other shards" in rank[name] for name in ("shards", "everyone"))
        assert "clips, and a rank under FSDP2 has the norm of its own shards alone" in rank["clip"]
        assert "the module '2' has an all-reduce hook of its own" in rank["hook"]
        for name in ("unfrozen", "unfrozen, new"):
            assert "'0.weight' of shape (70, 50) was frozen when gradcomp was set up" in rank[name]


def divided(kind: str) -> dict[str, float]:
    """Exchange gradients with a factor of the user's, of which torch's own mesh of both dimensions makes a sum over 5."""
    join()
    found = {}
    for spec in ("dense", "blocks:bits=8", "topk:ratio=1,wire=exact"):
        model, _, _ = attached(kind, spec, net())
        for layer in (0, 2, 4):
            model[layer].set_gradient_divide_factor(5.0)
        model.set_gradient_divide_factor(5.0)
        start = {name: each.full_tensor().detach().clone() for name, each in model.named_parameters()}
        loss(model, inputs(0)[dist.get_rank()]).backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        moved = {name: start[name] - each.full_tensor().detach() for name, each in model.named_parameters()}
        found[spec] = error(moved, {name: each * RANKS / 5 for name, each in by_hand(0).items()})
    return found


def test_a_factor_of_the_users_divides_the_sum_over_all_ranks() -> None:
    for rank in launch(divided, RANKS, ALL_HIDDEN):
        assert rank["dense"] < 1e-8 and rank["blocks:bits=8"] < 3e-4 and rank["topk:ratio=1,wire=exact"] < 1e-8
