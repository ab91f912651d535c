"""What the integrations of trainers share: tested versions, figures for logs, and states beside checkpoints."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Sequence
from typing import Any

import torch
from fsspec.core import url_to_fs

from gradcomp.engine.updates.steps import warn_user
from gradcomp.handle import Handle

# The newest versions that tests/integrations has run with.
TESTED = {"accelerate": "1.15", "lightning": "2.6", "transformers": "5.24"}

_NEWER = (
    "{package} {version} is newer than {package} {tested}, the newest version that gradcomp.integrations.{package} is tested "
    "with. If it fails, or trains worse, install {package}=={tested}.*"
)
_PARTIAL = (
    "{stem}*.pt are the states of {found} of {ranks} ranks: a rank ended in mid-save, or left its file on another host. Resume "
    "from an older checkpoint; or remove these files on all ranks, to begin with empty residuals"
)
_NOTHING = (
    "there is no {stem}*.pt beside the checkpoint: residuals begin empty, and every rank's optimizer with the checkpoint's own "
    "state. That is right for a checkpoint of a training without gradcomp. If the checkpoint was moved or copied, stop, move "
    "these files with it, and resume again"
)

# The key of the optimizers' states in a rank's file.
_OPTIMIZERS = "optimizers"


@functools.cache
def check_version(package: str, version: str) -> None:
    """Warn, once, of a package that is newer than the tested version in its first two numbers."""
    tested = TESTED[package]
    if _numbers(version) > _numbers(tested):
        warn_user(_NEWER.format(package=package, version=version, tested=tested))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def own_optimizers(handles: Sequence[Handle], optimizers: Sequence[Any]) -> Sequence[torch.optim.Optimizer]:
    """List optimizers, without what trainers wrap around them, if their states differ from rank to rank."""
    differ = any(not handle._is_removed and handle._session.reducer.on_updates for handle in handles)
    return [getattr(each, "optimizer", each) for each in optimizers] if differ else []


def figures(handle: Handle) -> dict[str, float]:
    """Return the figures of the last step that belong into a trainer's log, by the log's names."""
    stats: Any = {} if handle._is_removed else handle.stats()
    named = {name: stats.get(name) for name in ("compression", "bytes_sent", "grad_norm")}
    return {f"gradcomp/{name}": float(value) for name, value in named.items() if value is not None}


def save(handle: Handle, stem: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
    """Save this rank's state as STEM<rank>.pt. All ranks call it. Rank 0 removes the files of ranks that there are no more.

    After remove() it removes all, which would be loaded beside later weights.
    optimizers: their states go into the file, too. A trainer saves those of rank 0 alone.
    """
    session: Any = handle._session
    if handle._is_removed:
        if session.kept.network.world.rank == 0:
            remove(stem)
        return
    files, path = url_to_fs(stem)
    files.makedirs(path.rpartition("/")[0], exist_ok=True)  # the rank that makes the folder may come later
    state = {**handle.state_dict(), _OPTIMIZERS: [each.state_dict() for each in optimizers]}
    (rank,) = map(int, state["of_rank"])
    with files.open(f"{path}{rank}.new", "wb") as file:
        torch.save(state, file)
    files.mv(f"{path}{rank}.new", f"{path}{rank}.pt")  # a rank that ends in mid-save leaves no broken file
    if rank == 0:
        for other, name in _saved(files, path).items():
            if other >= state["ranks"]:
                files.rm(name)


def load(handle: Handle, stem: str, optimizers: Sequence[torch.optim.Optimizer] = ()) -> bool:
    """Load what save() saved, at any number of ranks. All ranks call it. False: there is nothing, or no handle any more.

    optimizers: the trainer has loaded rank 0's states into them, which a rank without a file keeps.
    """
    if handle._is_removed:
        return False
    files, path = url_to_fs(stem)
    saved, world = _saved(files, path), handle._session.network.world
    if not saved:
        if handle._session.reducer.on_updates:
            warn_user(_NOTHING.format(stem=stem))
        return False
    first = _read(files, saved.get(world.rank, next(iter(saved.values()))))
    ranks = first["ranks"]
    own = first.pop(_OPTIMIZERS, None) if world.rank in saved else None
    if ranks == world.size and world.rank in saved:
        handle.load_state_dict(first)
    elif saved.keys() >= {*range(ranks)}:
        states = [_read(files, saved[rank]) for rank in range(ranks)]
        handle.load_state_dict([{key: each[key] for key in each.keys() - {_OPTIMIZERS}} for each in states])
    else:
        raise ValueError(_PARTIAL.format(stem=stem, found=len(saved), ranks=ranks))
    for optimizer, state in zip(optimizers, own, strict=True) if own else ():
        optimizer.load_state_dict(state)
    return True


def remove(stem: str) -> None:
    """Remove what save() saved."""
    files, path = url_to_fs(stem)
    for name in _saved(files, path).values():
        files.rm(name)


def _saved(files: Any, path: str) -> dict[int, str]:
    """Find the files of ranks' states, by rank."""
    found = {name.removeprefix(path).removesuffix(".pt"): name for name in files.glob(f"{glob.escape(path)}*.pt")}
    return {int(rank): name for rank, name in sorted(found.items()) if rank.isdecimal()}


def _read(files: Any, name: str) -> Any:
    with files.open(name, "rb") as file:
        return torch.load(file, weights_only=True, map_location="cpu")
