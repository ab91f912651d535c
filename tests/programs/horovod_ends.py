"""Rank 1 leaves in the middle of training, by hvd.join() or by dying; what do the others see, and when?"""

import os
import time

import horovod.torch as hvd
import ranks
import training

asked = ranks.arguments()
hvd.init()
model = training.net()
optimizer = training.sgd(asked["route"], model, asked["spec"], bucket_mb=0.015)
data = training.batches()
training.train(model, optimizer, data, 3)
hvd.barrier()
start = time.monotonic()
if hvd.rank() != 1:
    said = training.refused(lambda: training.train(model, optimizer, data, 100))
    if said == "nothing was raised":
        hvd.join()
elif asked["how"] == "join":
    said = training.refused(hvd.join)
else:
    os._exit(3)
ranks.report({"said": said, "seconds": time.monotonic() - start})
time.sleep(1)  # a rank that ends at once could be what the others see
os._exit(0)  # Horovod is broken: there is nothing to end in good order
