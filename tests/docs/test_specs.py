"""Every spec that a page gives to a call is one."""

from __future__ import annotations

import re

import pytest
from documents import USERS, name_of

from gradcomp.spec import auto_of, make

CALL = re.compile(
    r"\b(?:attach|change|Compression|Handler|GradcompStrategy|DistributedOptimizer|LocalSteps)\((?:[^()\"]|\([^()]*\))*\"([^\"]+)\""
)
SPECS = {(name_of(page), spec) for page in USERS for spec in CALL.findall(page.read_text()) if "SPEC" not in spec}


@pytest.mark.parametrize(("page", "spec"), sorted(SPECS))
def test_a_spec_of_a_page(page: str, spec: str) -> None:
    assert auto_of(spec) or make(spec), page


def test_there_are_specs() -> None:
    assert ("docs/migrating.md", "blocks; *.bias=dense") in SPECS and len(SPECS) > 10
