"""Trains a small net by Accelerate on these ranks: torchrun by_accelerate.py FOLDER SPEC CHECKPOINT|-."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, __version__
from torch.nn.functional import cross_entropy
from trainers import data, finish, net, weights

from gradcomp.integrations.accelerate import Handler, attach

folder, spec, checkpoint = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
STEPS = 12


def train(
    spec: str | None,
    optim: str = "AdamW",
    passes: int = 1,
    clip: float = 0.0,
    saves: str = "",
    resumes: str = "",
    scaled: bool = False,
    apart: bool = False,
    removes: bool = False,
) -> dict[str, Any]:
    """apart: prepare() is called for the model first, and for the optimizer later. removes: attach(), and remove() half-way."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
    if scaled:  # Accelerate makes one on GPUs only
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    if removes:
        handle, handler = attach(accelerator, spec), None
    else:
        accelerator.ddp_handler = handler = None if spec is None else Handler(spec)
    model, (first, last) = net(), (0, STEPS * passes)
    options = {"momentum": 0.9} if optim == "SGD" else {}
    optimizer = getattr(torch.optim, optim)(model.parameters(), 0.01, **options)
    loader = torch.utils.data.DataLoader(data(8 * 2 * accelerator.num_processes * STEPS), 8)
    if apart:
        wrapped, loader = accelerator.prepare(model), accelerator.prepare(loader)
        optimizer = accelerator.prepare(optimizer)
    else:
        wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    residual = None
    if resumes:
        accelerator.load_state(resumes)
        first = STEPS * passes // 2
        residual = handler and handler.handle.residual()
    losses: list[float] = []
    for number, (x, y) in enumerate(loader):
        if not first <= number < last:
            continue
        with accelerator.accumulate(wrapped):
            loss = cross_entropy(wrapped(x), y)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if removes and number + 1 == last // 2:
            exchanges = handle.stats()["exchanges"]
            handle.remove()
        if saves and number + 1 == last // 2:
            accelerator.save_state(saves)
    found: dict[str, Any] = {"weights": weights(model), "losses": losses, "residual": residual}
    if removes:
        found["exchanges"] = exchanges
    if handler is not None:
        knows = handler.handle._session.updates.gradients.scaler is not None
        found |= {"figures": handler.figures(), "exchanges": handler.handle.stats()["exchanges"], "knows scaler": knows}
    return found


if checkpoint != "-":
    found = {"resumed": train(spec, resumes=checkpoint)}
else:
    found = {}
    for optim in ("AdamW", "SGD"):
        for scaled in (False, True):
            for way, of_way in (("stock", None), ("dense", "dense")):
                name = f"{way} {optim}{' scaled' * scaled}"
                found[name] = train(of_way, optim, passes=2, clip=1.0, scaled=scaled)
    found["whole"] = train(spec, saves=str(folder / "half"))
    found["resumed"] = train(spec, resumes=str(folder / "half"))
    found["clipped"] = train(spec, clip=1.0, saves=str(folder / "clipped"))
    found["clipped resumed"] = train(spec, clip=1.0, resumes=str(folder / "clipped"))
    found["apart"] = train(spec, apart=True)
    found["removed"] = train(spec, removes=True, saves=str(folder / "removed"))
    found["accumulated"] = train(spec, passes=2)
    found["scaled"] = train(spec, scaled=True)
finish(folder, found, __version__)
