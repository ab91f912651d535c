"""Prints a digest of three simulated steps of every compressor: equal lines mean kernels that compute equal bits."""

import hashlib

import torch

import gradcomp

shapes = {"embedding": (300, 40), "weight": (64, 128), "bias": (128,)}
for spec in (*gradcomp.names(), "lgc:dense=1,learn=1"):
    torch.manual_seed(0)
    simulation = gradcomp.Simulation(spec, shapes, 4)
    digest = hashlib.sha256()
    for _ in range(3):
        update = simulation.step([{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(4)])
        for layer in shapes:
            digest.update(update[layer].numpy().tobytes())
    print(f"{spec} {digest.hexdigest()[:16]} {simulation.bytes_sent}")
