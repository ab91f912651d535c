"""A rank of a soak over Horovod's elastic mode, with the stock optimizer: python -m laboratory.soak.horovod_job FOLDER ..."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd

import gradcomp
from laboratory.soak.plan import BUCKET_MB, Plan
from laboratory.soak.rank import Rank, options


def main() -> None:
    """Train until the driver asks for the end."""
    chosen = options()
    plan = Plan(chosen.seed, chosen.steps)
    rank = Rank(chosen.folder, plan)
    hvd.init()
    # A rank that joins must be made with the spec of the others, which tell it after their reset.
    spec = hvd.broadcast_object(plan.spec(0), 0, name="spec")
    named = list(rank.model.named_parameters())
    compression = gradcomp.horovod.Compression(spec, named, scaler=rank.scaler, bucket_mb=BUCKET_MB, seed=chosen.seed)
    optimizer = hvd.DistributedOptimizer(rank.optimizer, named, compression=compression)
    state = hvd.elastic.TorchState(
        model=rank.model, optimizer=optimizer, step=0, spec=spec, scaling=rank.scaler.state_dict(), history=[]
    )
    state.register_reset_callbacks([lambda: hvd.broadcast_object(state.spec, 0, name="spec")])
    hvd.elastic.run(lambda state: train(state, rank, compression))(state)
    hvd.shutdown()


def train(state: Any, rank: Rank, compression: Any) -> None:
    """Train with the present ranks, until one leaves or joins."""
    plan, scaler, optimizer = rank.plan, rank.scaler, state.optimizer
    number, ranks = hvd.rank(), hvd.size()
    scaler.load_state_dict(state.scaling)
    state.history = [*state.history, [state.step, ranks]]
    rank.go_on(state.step, ranks)
    ends = False
    while not ends:
        if (spec := plan.spec(state.step)) != state.spec:
            compression.change(spec)
            state.spec = spec
        drawn = plan.gradient(state.step, number, ranks)
        rank.begin_step()
        optimizer.zero_grad()
        scaler.scale(rank.model(drawn)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        rank.end_step(drawn, ranks)
        state.step += 1
        if state.step % plan.commits == 0:
            ends = hvd.broadcast_object(rank.is_to_stop(), 0, name="ends")
            record = rank.keep(state.step, number, ranks, compression.residual(), history=state.history, final=ends)
            rank.log(record, state.spec)
            state.scaling = scaler.state_dict()
            if not ends:
                state.commit()


if __name__ == "__main__":
    main()
