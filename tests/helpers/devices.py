"""The devices that tests run on: the CPU, the emulator of CUDA kernels, and a GPU where there is one."""

from __future__ import annotations

import torch

from gradcomp.native import extension

HAS_GPU = torch.cuda.is_available() and extension.BUILT_WITH_CUDA
DEVICES = ["cpu", "simt"] + (["cuda"] if HAS_GPU else [])
