"""Horovod on four ranks: an allreduce, an allgather of different lengths, and both in three process sets across hosts."""

import horovod.torch as hvd
import torch

sets = [hvd.ProcessSet(ranks) for ranks in ([0, 2], [1, 3], [0, 3])]
hvd.init(process_sets=sets)
rank = hvd.rank()
own = torch.full((rank + 1,), rank, dtype=torch.int32)
found = {
    "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
    "sum": hvd.allreduce(torch.full((1000,), rank + 1.0), op=hvd.Sum, name="sum").unique().tolist(),
    "gather": hvd.allgather(own, name="gather").tolist(),
}
for each in sets:
    if each.included():
        name = "-".join(map(str, each.ranks))
        found[f"sum {name}"] = (
            hvd.allreduce(torch.ones(3) * (rank + 1), op=hvd.Sum, name="s" + name, process_set=each).unique().tolist()
        )
        found[f"gather {name}"] = hvd.allgather(own, name="g" + name, process_set=each).tolist()
print(found, flush=True)
hvd.barrier()  # a rank that is done would end Horovod for those that are not
hvd.shutdown()
