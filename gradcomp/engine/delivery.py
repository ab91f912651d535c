"""Delivery: updates are written into gradients, and taken back into the residuals after a step that failed in any bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.engine.bucket import Bucket
from gradcomp.engine.slots import Slot
from gradcomp.native import kernels
from gradcomp.native.memory import Update


class Delivery:
    """The delivery of a model's updates.

    A step has failed where an entry of a delivered update is not finite. A GradScaler then skips the optimizer's step, on all
    ranks alike. The entries that were sent for it return to the residual, in every bucket.

    buckets: that fail together; keeping: those of them with a residual. slots: by layer. All of a bucket's have an array for
    the update, or none has.
    """

    def __init__(self, buckets: Sequence[Bucket], slots: Mapping[str, Slot]):
        self.keeping = [bucket for bucket in buckets if bucket.progress is not None]
        self._place = {bucket.index: place for place, bucket in enumerate(buckets)}
        self._slots = [[slots[name] for name in bucket.layout.names] for bucket in buckets]
        devices = dict.fromkeys(bucket.layout.device for bucket in buckets)
        self._verdicts = {device: torch.zeros(len(buckets), dtype=torch.int32, device=device) for device in devices}
        self._verdict_of = {device: verdicts.split(1) for device, verdicts in self._verdicts.items()}

    def _targets(self, bucket: Bucket) -> Sequence[Tensor]:
        slots = self._slots[self._place[bucket.index]]
        return bucket.ordered_grads if slots[0].update is None else [each.update for each in slots if each.update is not None]

    def write(self, bucket: Bucket, update: Update, scale: float, step: int) -> None:
        """Write an update into the gradients, scale times. One that was lent is zeros afterwards, where that costs nothing."""
        update.is_wiped = kernels.spread(
            update.flat,
            self._targets(bucket),
            scale,
            update.marks,
            verdict=self._verdict_of[bucket.layout.device][self._place[bucket.index]],
            step=step,
            wipes=update.source is not None,
        )

    def has_failed(self, step: int) -> bool:
        """Decide whether the last step has failed. This waits for the device."""
        return any(kernels.have_failed(own, step) for own in self._verdicts.values())

    def _joined(self) -> dict[torch.device, Tensor]:
        """Return verdicts by device. Where there are several devices, they are the latest of all."""
        verdicts = self._verdicts
        if len(verdicts) > 1:
            first = next(iter(verdicts))
            joined = torch.stack([own.to(first) for own in verdicts.values()]).amax(0)
            verdicts = {device: joined.to(device) for device in verdicts}
        return verdicts

    def add_back(self, scale: float, step: int, buckets: Sequence[Bucket] | None = None) -> None:
        """Add a step's updates back to the residuals if the step has failed. All of them have been written.

        buckets: those of another rank in this process, in place of this one's.
        """
        if len(self._verdicts) == 1 and not any(kernels.may_have_failed(own, step) for own in self._verdicts.values()):
            return
        verdicts = self._joined()
        for bucket in buckets or self.keeping:
            assert bucket.progress is not None
            kernels.add_back(
                self._targets(bucket),
                bucket.progress.residual,
                verdicts[bucket.layout.device],
                self._place[bucket.index],
                scale,
                step=step,
            )


# Makes what delivers the updates of some buckets.
MakeDelivery = Callable[[Sequence[Bucket], Mapping[str, Slot]], Delivery]


class Deliveries:
    """The deliveries of a reducer: the updates of a part are applied, or skipped, as one.

    part_of: of each bucket. step: the number in verdicts, which no other step has.
    """

    def __init__(
        self, buckets: Sequence[Bucket], part_of: Sequence[Hashable], slots: Mapping[str, Slot], make: MakeDelivery = Delivery
    ):
        self._by_part = {
            part: make([each for each, of in zip(buckets, part_of, strict=True) if of == part], slots)
            for part in dict.fromkeys(part_of)
        }
        self._of = [self._by_part[part] for part in part_of]
        self._keeping = [each for each in self._by_part.values() if each.keeping]
        self._step = 1

    def of(self, bucket: Bucket) -> Delivery:
        """Return a bucket's delivery."""
        return self._of[bucket.index]

    def write(self, bucket: Bucket, update: Update, scale: float) -> None:
        """Write an update into the gradients. See Delivery.write()."""
        self._of[bucket.index].write(bucket, update, scale, self._step)

    def end_step(self, scale: float) -> None:
        """End a step whose updates are written. In a part in which it failed, they return to the residuals."""
        for each in self._keeping:
            each.add_back(scale, self._step)
        self._step += 1

    def discard(self) -> None:
        """Discard the step under way: its verdicts are not the next one's."""
        self._step += 1

    def has_failed(self) -> bool:
        """Decide whether the last step has failed. This waits for a device if there is one."""
        return any(each.has_failed(self._step - 1) for each in self._by_part.values())
