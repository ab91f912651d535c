"""Sums the ranks over torch.distributed's gloo and prints the sum."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.full((1000,), float(dist.get_rank() + 1))
dist.all_reduce(value)
assert bool((value == value[0]).all())
print(f"sum {value[0]:g} of {dist.get_world_size()}")
dist.destroy_process_group()
