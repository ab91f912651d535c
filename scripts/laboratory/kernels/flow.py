"""The flow of control through a kernel's machine code: blocks of instructions, their order, and loops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """An instruction: name, operands, whether a predicate may skip it, and the labels in front of it."""

    name: str
    rest: str
    skips: bool
    labels: tuple[str, ...]


TARGET = re.compile(r"[.$]\w[.$\w]*")
# These end a block, and these never go on to the next instruction unless a predicate skips them.
JUMPS = re.compile(r"(BRA|BRX|JMP|JMX|EXIT|RET|BREAK|CALL|WARPSYNC|BPT)\b")
LEAVES = re.compile(r"(BRX|JMP|JMX|EXIT|RET)\b")


class Graph:
    """A kernel's blocks. An edge leads to each block that may come next; a call is a step to the instruction behind it."""

    def __init__(self, instructions: Sequence[Instruction]):
        self.blocks: list[list[Instruction]] = []
        for each in instructions:
            if not self.blocks or each.labels or JUMPS.match(self.blocks[-1][-1].name):
                self.blocks.append([])
            self.blocks[-1].append(each)
        self._place = {label: i for i, block in enumerate(self.blocks) for label in block[0].labels}
        self.next = [self._next(i) for i in range(len(self.blocks))]
        self._before: list[set[int]] = [set() for _ in self.blocks]
        for block, following in enumerate(self.next):
            for other in following:
                self._before[other].add(block)

    def _targets(self, each: Instruction) -> set[int]:
        return {self._place[label] for label in TARGET.findall(each.rest) if label in self._place}

    def _next(self, block: int) -> set[int]:
        last = self.blocks[block][-1]
        jump = JUMPS.match(last.name)
        found = self._targets(last) if jump and jump[1] not in ("CALL", "WARPSYNC", "EXIT", "RET") else set()
        always = last.name in ("BRA", "BRA.U") and not last.skips and not re.match(r"!?U?P\d", last.rest)
        leaves = LEAVES.match(last.name) and not last.skips
        if not (always or leaves) and block + 1 < len(self.blocks):
            found.add(block + 1)
        return found

    def called(self, blocks: set[int]) -> set[int]:
        """Return the first blocks of the functions that these blocks call."""
        return {
            target
            for block in blocks
            for each in self.blocks[block]
            if each.name.startswith("CALL")
            for target in self._targets(each)
        }

    def reach(self, first: int) -> set[int]:
        """Return the blocks that may come after this one, with it."""
        found, open_ = {first}, [first]
        while open_:
            more = self.next[open_.pop()] - found
            found |= more
            open_ += more
        return found

    def forward(self) -> list[tuple[int, list[int]]]:
        """Return every block with those that may come right before it, in an order in which these are first. Loops are cut."""
        order: list[int] = []
        seen: set[int] = set()

        def walk(first: int) -> None:
            open_ = [(first, iter(sorted(self.next[first])))]
            seen.add(first)
            while open_:
                more = next((each for each in open_[-1][1] if each not in seen), None)
                if more is None:
                    order.append(open_.pop()[0])
                else:
                    seen.add(more)
                    open_.append((more, iter(sorted(self.next[more]))))

        for block in range(len(self.blocks)):
            if block not in seen:
                walk(block)
        place = {block: i for i, block in enumerate(reversed(order))}
        return [(block, [each for each in self._before[block] if place[each] < place[block]]) for block in place]

    def loops(self) -> list[set[int]]:
        """Return the blocks of each loop. Jumps back to the same block make one loop."""
        dominators = self._dominators()
        found: dict[int, set[int]] = {}
        for block, following in enumerate(self.next):
            for head in following & dominators[block]:
                loop = found.setdefault(head, {head})
                open_ = [block]
                while open_:
                    each = open_.pop()
                    if each not in loop:
                        loop.add(each)
                        open_ += self._before[each]
        return list(found.values())

    def _dominators(self) -> list[set[int]]:
        """Return for each block those through which every way to it leads."""
        everything = set(range(len(self.blocks)))
        roots = {i for i in everything if not self._before[i]} | {0} | self.called(everything)
        found = [{i} if i in roots else everything for i in range(len(self.blocks))]
        changed = True
        while changed:
            changed = False
            for block in range(len(self.blocks)):
                if block in roots:
                    continue
                new = {block} | set.intersection(*(found[each] for each in self._before[block]))
                if new != found[block]:
                    found[block], changed = new, True
        return found


def with_called(graph: Graph, blocks: set[int]) -> set[int]:
    """Add the functions that blocks call, and those that these call. Slow paths of divisions of floats stay out."""
    found = set(blocks)
    while True:
        more = set().union(*(graph.reach(first) for first in graph.called(found))) - found
        if not more:
            return found
        found |= more
