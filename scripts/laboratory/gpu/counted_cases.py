"""The cases of a part of `lab kernels`, each run once between marks for ncu: python -m laboratory.gpu.counted_cases --help."""

from __future__ import annotations

import argparse
import json

import torch

from laboratory import kernel_cases as cases
from laboratory import options

PARTS = {part.__name__: part for part in (cases.passes, cases.sparse, cases.above, cases.sketches, cases.levels)}
# Calls before the one that counts: they load machine code, and fill residuals.
WARM = 2


def main() -> None:
    """Run the cases, and print their names."""
    parser = argparse.ArgumentParser(prog="python -m laboratory.gpu.counted_cases", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--size", type=options.size, required=True)
    chosen = parser.parse_args()
    on_gpu = chosen.device == "cuda"
    names = []
    for case in PARTS[chosen.part](cases.Arrays(chosen.size, torch.device(chosen.device))):
        print(case.name, flush=True)
        for i in range(WARM + 1):
            case.before(i)
            if on_gpu and i == WARM:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
            case.call(i)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        names.append(case.name)
    print("@" + json.dumps({"size": chosen.size, "cases": names}), flush=True)


if __name__ == "__main__":
    main()
