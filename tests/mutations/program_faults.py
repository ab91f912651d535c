"""Faults that a user's program meets: what travels, several optimizers, lines and warnings, traces, and trainers."""

from __future__ import annotations

from mutations.fault import Fault

PROGRAM_FAULTS = (
    Fault(
        "layers of two optimizers share a bucket, and one of their momenta",
        "gradcomp/engine",
        "parts[name] if parts else 0",
        "0",
        ("test_step_exchange.py", "test_hidden_momentum.py"),
    ),
    Fault(
        "every rank says what all ranks know",
        "gradcomp/engine",
        "    return not lead or any(lead)\n",
        "    return True\n",
        ("test_announcement.py",),
    ),
    Fault(
        "a rank does not say what it alone knows",
        "gradcomp/engine",
        "    if not (of_one_rank or speaks()):\n",
        "    if not speaks():\n",
        ("test_announcement.py",),
    ),
    Fault(
        "stats() calls what auto tries its choice",
        "gradcomp",
        "trial = self._timed or not self._choices",
        "trial = False",
        ("test_announcement.py",),
    ),
    Fault(
        "no range of a trace says which bucket it is of",
        "gradcomp/engine",
        'f"gradcomp::{part} (bucket {bucket.index})"',
        'f"gradcomp::{part} (bucket 0)"',
        ("test_telemetry.py",),
    ),
    # --- Trainers
    Fault(
        "trials of the Trainer's search exchange gradients whole",
        "gradcomp/integrations",
        "        make_accelerator()\n        set_handler()\n",
        "        make_accelerator()\n",
        ("test_doors.py",),
    ),
    Fault(
        "a rank whose file is missing begins anew, and the others go on",
        "gradcomp/integrations",
        "elif saved.keys() >= {*range(ranks)}:",
        "elif saved:",
        ("test_doors.py",),
    ),
    Fault(
        "gradients that are rounded to three levels travel as gradients",
        "gradcomp/exchanges",
        "coarse=error >= LARGEST_ERROR_ROUNDED_TWICE",
        "coarse=False",
        ("test_found_by_mutation.py",),
    ),
)
