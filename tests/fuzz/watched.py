"""Legal calls of every CUDA kernel, for tools that watch them: PYTHONPATH=tests python -m fuzz.watched --help.

The arrays of a call are allocations of their own, with bands around half of them, so that compute-sanitizer sees an access
outside. A result is compared with the kernel's definition. Calls follow from the seed, the kernel and their number.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz import call
from fuzz.drawn import BORDERS, Draw

# The share of sizes at borders.
BORDERED = 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls. Return 0, or 1 where one broke its contract."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.watched", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "simt", "cpu"), default="cuda", help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=3, help="calls of each kernel (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", metavar="KERNEL", help="only this kernel")
    options = parser.parse_args(arguments)
    own = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(own), str(own / "helpers"), str(own / "simt")]
    from fuzz import run

    native = module_of("cpu") if options.device == "cpu" else twin_of(module_of(options.device), options.device)
    failures: list[str] = []
    counts = {name: 0 for name in run.kernels() if not name.endswith("_scratch") and options.only in (None, name)}
    for name in counts:
        for number in range(options.calls):
            print(f"{name} {number}", flush=True)  # the last line names the call that a tool or a limit ended
            if failure := failure_of(native, name, Bordered(f"{options.seed} {name} {number}"), options.device):
                failure = f"{failure} (call {number})"
                failures.append(failure)
                print(failure, file=sys.stderr, flush=True)
            counts[name] += 1
    print("@" + json.dumps({"calls": sum(counts.values()), "kernels": len(counts), "failures": failures}), flush=True)
    return 1 if failures else 0


def module_of(device: str) -> Any:
    """Import the kernels of a device."""
    if device != "simt":
        from gradcomp.native import extension

        return extension.native
    import build

    sys.path.insert(0, str(build.build()))
    import gradcomp_simt

    return gradcomp_simt


class Twin:
    """The kernels of a module, with the scratch that CUDA twins need."""

    def __init__(self, module: Any):
        from gradcomp.native import extension

        self._module = module
        extension.native = self  # the makers of calls ask for scratch, and call the kernels that a chain joins

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._module, name)
        return (lambda on_cuda, *sizes: function(True, *sizes)) if name.endswith("_scratch") else function


class GpuTwin(Twin):
    """The same on a GPU. Arrays in main memory are copied there and back: a chain is held to the kernels of its own twin.

    CPU twins sum floats in another order.
    """

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name.endswith("_scratch") or not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> None:
            moved: list[tuple[torch.Tensor, torch.Tensor]] = []
            there = _moved(arguments, moved)
            found(*there, **{**options, "stream": torch.cuda.current_stream().cuda_stream})
            torch.cuda.synchronize()
            for here, back in moved:
                here.copy_(back)

        return call


def _moved(value: Any, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Copy the arrays in main memory to the GPU. moved: gets each with its copy."""
    if isinstance(value, list | tuple):
        return [_moved(each, moved) for each in value]
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, torch.Tensor) or value.is_cuda:
        return value
    moved.append((value, value.cuda()))
    return moved[-1][1]


def twin_of(module: Any, device: str) -> Twin:
    """Wrap the CUDA kernels of a device, or of the emulator."""
    return GpuTwin(module) if device == "cuda" else Twin(module)


class Bordered(Draw):
    """Draws that lie at borders more often than not: a hundred entries keep one block busy."""

    for_cpu = False

    def size(self, least: int = 0, wide: bool = True) -> int:
        if not wide or not self.likely(BORDERED):
            return super().size(least, wide=False)
        return max(self.choice(BORDERS) + self.choice((-1, 0, 1)), least)


def failure_of(native: Any, kernel: str, draw: Draw, device: str) -> str:
    """Make one legal call on this device. Return its failure, or an empty text."""
    with np.errstate(all="ignore"):
        values, check = call.MAKERS[kernel](draw)
        moved = list(move(values)) if device == "cuda" else []
        try:
            if moved:
                run_on_gpu(native, kernel, values)
                for lent, memory in moved:
                    lent._memory[:] = memory.cpu().numpy()
            call.run(Done() if moved else native, kernel, values, check, 1, legal=True)
        except (call.Wrong, RuntimeError, ValueError) as error:
            return f"{kernel}({call.describe(values)}): {error}"
    return ""


def move(values: dict[str, Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Copy the arrays of a call to the GPU, each with its bands. Yield the array and its memory there."""
    for value in values.values():
        for lent in call.lents(value):
            dtype = lent.given.dtype if isinstance(lent.given, torch.Tensor) else torch.from_numpy(lent.now).dtype
            memory = torch.from_numpy(lent._memory).cuda()
            # NumPy's empty arrays have a stride of 0, which torch does not view as another type.
            lent.given = memory[lent._at : lent._end].view(dtype) if len(lent) else memory.new_empty(0, dtype=dtype)
            yield lent, memory


def run_on_gpu(native: Any, kernel: str, values: dict[str, Any]) -> None:
    """Run the kernel on the GPU's copies. The twin waits for it: an error is then this call's."""
    arguments = [call.given(values[each.name]) for each in call.KERNELS[kernel]]
    getattr(native, kernel)(*arguments, threads=1)


class Done:
    """Kernels that have run already, so that only the contract of the call is checked."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: None


if __name__ == "__main__":
    sys.exit(main())
