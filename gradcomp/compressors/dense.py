"""Dense: every entry is sent, in one allreduce per bucket. The baseline of all other compressors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp.core.compressor import Acc, Compressor, Layout, Steps, Traits
from gradcomp.core.requests import World
from gradcomp.exchanges import routes


@dataclass(frozen=True)
class Dense(Compressor):
    """Sends every entry. It has no knobs."""

    known_as: ClassVar[Mapping[str, str]] = {"none": "dense"}

    @property
    def traits(self) -> Traits:
        return Traits(exact=True, stock=True, fed_back=False)

    def init(self, layout: Layout, seed: int) -> Tensor:
        return torch.empty(layout.total, device=layout.device)

    def exchange(self, acc: Acc, state: Tensor, world: World) -> Steps:
        return (yield from routes.send_all(acc, world, state))
