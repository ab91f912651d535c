"""FSDP2's weights in few bits: gathered alike on all ranks, exact where they are kept, whole where they are small."""

from __future__ import annotations

import copy
import math
import tempfile
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import RANKS, error, inputs, loss, mesh_of, whole_grads
from ranks import join, launch, once
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradcomp
import gradcomp.fsdp

# The largest squared error of gathered weights.
ERRORS = {8: 2e-5, 6: 4e-4, 5: 2e-3, 4: 1e-2}
SIDE = 256  # of the layers whose memory is counted
ROUNDED = ("up.weight", "down.weight", "frozen.weight")
IN_BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Layers that four shards do not divide evenly, of all kinds: large and small ones, a norm, biases, and a frozen one."""

    def __init__(self, recomputes: bool = False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(50), nn.Linear(50, 141), nn.Linear(141, 50)
        self.frozen = nn.Linear(50, 130, bias=False).requires_grad_(False)
        self.small = nn.Linear(130, 3)
        self.recomputes = recomputes

    def forward(self, batch: Tensor) -> Tensor:
        middle: Any = checkpoint(self.middle, batch, use_reentrant=False) if self.recomputes else self.middle(batch)
        return self.small(self.frozen(middle))

    def middle(self, batch: Tensor) -> Tensor:
        hidden = self.norm(batch)
        return hidden + self.down(self.up(hidden).tanh())


class Tied(nn.Module):
    """A model with one weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(50, 120, bias=False), nn.Linear(120, 50, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.again = nn.Linear(50, 120, bias=False)
        self.again.weight = self.first.weight

    def forward(self, batch: Tensor) -> Tensor:
        return self.again(self.last(self.first(batch).tanh()))


def wrapped(model: nn.Module, mesh: Any, **options: Any) -> Any:
    for each in model.children():
        if isinstance(each, Block):
            fully_shard(each, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def blocks(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), nn.Linear(3, 50), Block(**options))


def gathered(model: Any) -> dict[str, Tensor]:
    """Return all weights as a forward pass has them."""
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "unshard"):
            handle = module.unshard(async_op=True)
            handle.wait()
            own = {f"{name}.{n}" if name else n: each for n, each in module.named_parameters(remove_duplicate=False)}
            found |= {n: each.detach().clone() for n, each in own.items() if not hasattr(each, "to_local")}
            module.reshard()
    return found


def outcome(model: Any, mesh: Any, weights: str = "blocks:bits=8", compiles: bool = False, **options: Any) -> dict[str, Any]:
    """Take a step's gradients with weights that are gathered in few bits, and again by hand with the gathered weights."""
    by_hand = copy.deepcopy(model)
    handle = gradcomp.fsdp.attach(wrapped(model, mesh, **options), "dense", weights=weights)
    exact = {name: each.detach().full_tensor().float() for name, each in model.named_parameters()}
    batches, called = inputs(0), torch.compile(model, backend="eager") if compiles else model
    for _ in range(2):
        model.zero_grad()
        loss(called, batches[dist.get_rank()]).float().backward()
    weights_of = gathered(model)
    by_hand.load_state_dict({name: each.float() for name, each in weights_of.items()})
    if "mp_policy" in options:
        by_hand.to(torch.bfloat16)
    form = next(by_hand.parameters()).dtype
    members = dist.get_process_group_ranks(mesh.get_group())
    torch.stack([loss(by_hand, batches[rank].to(form)).float() for rank in members]).mean().backward()
    wanted = {name: each.grad.float() for name, each in by_hand.named_parameters() if each.grad is not None}
    grads = {name: each.float() for name, each in whole_grads(model).items()}
    after = {name: each.detach().full_tensor().float() for name, each in model.named_parameters()}
    return {
        "error": error(grads, wanted),
        "exact": all(torch.equal(exact[name], after[name]) for name in exact),
        "weights": {name: weights_of[name].float() for name in exact},
        "kept": exact,
        "stats": handle.stats(),
    }


def compiled(mesh: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own, of gradients of tensors within a graph
        return outcome(blocks(), mesh, compiles=True)


CASES: dict[str, Any] = {
    "resharded": lambda mesh: outcome(blocks(), mesh),
    "kept whole": lambda mesh: outcome(blocks(), mesh, reshard_after_forward=False),
    "resharded to pairs": lambda mesh: outcome(blocks(), mesh, reshard_after_forward=2),
    "in bfloat16": lambda mesh: outcome(blocks(), mesh, mp_policy=IN_BFLOAT16),
    "offloaded": lambda mesh: outcome(blocks(), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "recomputed": lambda mesh: outcome(blocks(recomputes=True), mesh),
    "compiled": compiled,
    "tied": lambda mesh: outcome(Tied(), mesh),
    **{f"{bits} bits": lambda mesh, bits=bits: outcome(blocks(), mesh, f"blocks:bits={bits}") for bits in ERRORS},
}


def losses_of(mesh: Any) -> dict[str, float]:
    """Take a forward pass with a weight that is not finite on one rank."""
    found = {}
    for value in (math.nan, math.inf):
        model = wrapped(blocks(), mesh)
        gradcomp.fsdp.attach(model, "blocks", weights="blocks:bits=8")
        if dist.get_rank() == 1:
            with torch.no_grad():
                model[0].up.weight.to_local().view(-1)[7] = value
        found[str(value)] = loss(model, inputs(0)[0]).item()
    return found


def peaks(mesh: Any) -> list[float]:
    """Return the largest memory in a forward pass, without rounded weights and with them, in bytes an entry of a layer."""
    found = []
    for weights in (None, "blocks:bits=8"):
        model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(4)))
        for each in (*model, model):
            fully_shard(each, mesh=mesh, mp_policy=IN_BFLOAT16)
        gradcomp.fsdp.attach(model, "dense", weights=weights)
        tracker = MemTracker()
        tracker.track_external(model)
        for number in range(2):
            with torch.no_grad(), tracker if number else nullcontext():
                model(torch.ones(2, SIDE))
        found.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / SIDE**2)
    return found


def carried(mesh: Any, both: Any, folder: str) -> dict[str, bool]:
    """Train a step, save, and load on half as many shards: what had rounded weights without them, and the other way round."""
    found = {}
    for before, after in (("blocks:bits=4", None), (None, "blocks:bits=4")):
        states = []
        for weights, shards, seed in ((before, mesh, 0), (after, both["shard"], 1)):
            model = blocks()
            model.load_state_dict({name: each + seed for name, each in model.state_dict().items()})
            gradcomp.fsdp.attach(wrapped(model, shards), "dense", weights=weights)
            optimizer = torch.optim.SGD((each for each in model.parameters() if each.requires_grad), 0.1)
            if not seed:
                loss(model, inputs(0)[dist.get_rank()]).backward()
                optimizer.step()
                dcp.save(get_model_state_dict(model), checkpoint_id=f"{folder}/{after}")
            else:
                state = get_model_state_dict(model)
                dcp.load(state, checkpoint_id=f"{folder}/{after}")
                set_model_state_dict(model, state)
            states.append({name: each.full_tensor() for name, each in model.state_dict().items()})
        found[f"{before} to {after}"] = all(torch.equal(states[1][name], each) for name, each in states[0].items())
    return found


def said(mesh: Any) -> dict[str, Any]:
    """Return errors and warnings, by what causes them."""
    found: dict[str, Any] = {}
    cases: dict[str, Any] = {
        "number": 8,
        "topk": "topk",
        "with memory": "blocks:feedback=true",
        "unlike": f"blocks:bits={5 + dist.get_rank()}",
    }
    for case, weights in cases.items():
        with pytest.raises(ValueError) as refused:
            gradcomp.fsdp.attach(wrapped(blocks(), mesh), "blocks", weights=weights)
        found[case] = str(refused.value)
    model = blocks()
    model[2].frozen.bfloat16()
    model = wrapped(model, mesh)
    one = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings(record=True) as every:
        warnings.simplefilter("always")
        handle = gradcomp.fsdp.attach(model, "blocks", weights="blocks:bits=8")
        model[2].unshard()
        gradcomp.fsdp.attach(wrapped(blocks(), one["shard"]), "topk", weights="blocks:bits=8", replicas=one["replicate"])
    return found | {"warned": [str(each.message) for each in every], "exchanges": handle.modules.exchanges}


def program(folder: str) -> dict[str, Any]:
    join()
    mesh = mesh_of("shards")
    found = {case: make(mesh) for case, make in CASES.items()}
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found |= {"of two": outcome(blocks(), both["shard"]), "carried": carried(mesh, both, folder)}
    return found | {"not finite": losses_of(mesh), "said": said(mesh), "peaks": peaks(mesh)}


@once
def launched() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return launch(program, RANKS, folder)


@pytest.mark.parametrize("case", [*CASES, "of two"])
def test_gradients_are_those_of_the_gathered_weights(case: str) -> None:
    for rank in launched():
        assert rank[case]["error"] < (1e-3 if case == "in bfloat16" else 1e-11), rank[case]["error"]
        assert rank[case]["exact"]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_gather_the_same_and_small_parameters_whole(case: str) -> None:
    first, *others = (rank[case] for rank in launched())
    bits = int(case[0]) if case.endswith(" bits") else 8
    for name, weights in first["weights"].items():
        assert all(torch.equal(weights, other["weights"][name]) for other in others), name
        exact = first["kept"][name].bfloat16().float() if case == "in bfloat16" else first["kept"][name]
        if name.endswith(ROUNDED) or case == "tied":
            assert 0 < error({name: weights}, {name: exact}) < ERRORS[bits], (name, error({name: weights}, {name: exact}))
        else:
            assert torch.equal(weights, exact), name


@pytest.mark.parametrize("bits", ERRORS)
def test_bytes_are_those_of_the_blocks_and_of_the_small_parameters(bits: int) -> None:
    """A rank sends its shard of each block to three others, in the forward and in the backward pass; the rest travels whole.

    What the whole model holds itself, whole too, is gathered once.
    """
    of_four = lambda *shape: -(-shape[0] // RANKS) * math.prod(shape[1:])  # noqa: E731
    rounded = of_four(141, 50) + of_four(50, 141) + of_four(130, 50)
    whole = 4 * (of_four(50) * 2 + of_four(141) + of_four(50) + of_four(3, 130) + of_four(3))
    wanted = 3 * (2 * 2 * (rounded * (bits + 0.25) / 8 + whole) + 4 * (of_four(50, 3) + of_four(50)))
    for rank in launched():
        assert wanted < rank[f"{bits} bits"]["stats"]["weight_bytes_sent"] < 1.02 * wanted


def test_a_gather_takes_the_memory_of_a_shard_and_of_one_layer_s_payloads() -> None:
    """The shard in float32, and a payload of 8.25 bits an entry for each rank, and this one's own."""
    for rank in launched():
        without, rounded = rank["peaks"]
        assert 0 < rounded - without < 4 / RANKS + 1.02 * (1 + 1 / RANKS) * 8.25 / 8


def test_checkpoints_are_exact_and_load_with_and_without_rounded_weights_on_other_shards() -> None:
    for rank in launched():
        assert rank["carried"] == {"blocks:bits=4 to None": True, "None to blocks:bits=4": True}


def test_what_is_not_finite_on_one_rank_is_so_on_all() -> None:
    for rank in launched():
        assert not any(map(math.isfinite, rank["not finite"].values())), rank["not finite"]


def test_what_cannot_be_rounded_is_named() -> None:
    for number, rank in enumerate(launched()):
        said = rank["said"]
        assert "weights= got topk" in said["topk"] and "weights= got 8; weights travel as blocks" in said["number"]
        assert "weights= got blocks:feedback=true" in said["with memory"]
        assert "weights: rank 0 has 'blocks:bits=5', rank 1 has 'blocks:bits=6'" in said["unlike"]
        assert said["exchanges"] == "gradients, over shards, and gathers weights as blocks:bits=8"
        wanted = ["the weights of '2' travel whole, since torch gathers them as uint8", "this mesh has one shard"]
        assert number or all(part in text for part, text in zip(wanted, said["warned"], strict=True)), said["warned"]
