"""Every fault can still be made: its passage stands once in its folder, and the tests that are to find it exist."""

from __future__ import annotations

import ast

import pytest
from mutations.fault import Fault
from mutations.run import FAULTS, ROOT, place_of


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_can_be_made(fault: Fault) -> None:
    path = place_of(fault, ROOT)
    if path.suffix == ".py":
        ast.parse(path.read_text().replace(fault.right, fault.wrong))
    for name in fault.tests:
        assert list((ROOT / "tests").rglob(name)), f"there is no test file {name}"


def test_there_are_enough_faults_of_different_names() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
