"""Faults that a user's program meets: what travels, several optimizers, lines and warnings, traces, and trainers."""

from __future__ import annotations

from mutations.fault import Table

PROGRAM_FAULTS: Table = {
    "gradcomp/engine": {
        ("test_step_exchange.py", "test_hidden_momentum.py"): {
            "layers of two optimizers share a bucket, and one of their momenta": ("parts[name] if parts else 0", "0"),
        },
        ("test_announcement.py",): {
            "every rank says what all ranks know": ("    return not lead or any(lead)\n", "    return True\n"),
        },
        ("test_telemetry.py",): {
            "no range of a trace says which bucket it is of": (
                'f"gradcomp::{part} (bucket {bucket.index})"',
                'f"gradcomp::{part} (bucket 0)"',
            ),
        },
    },
    "gradcomp": {
        ("test_announcement.py",): {
            "stats() calls what auto tries its choice": ("trial = self._timed or not self._choices", "trial = False"),
        },
    },
    "gradcomp/integrations": {
        ("test_doors.py",): {
            "trials of the Trainer's search exchange gradients whole": (
                "        make_accelerator()\n        set_handler()\n",
                "        make_accelerator()\n",
            ),
            "a rank whose file is missing begins anew, and the others go on": (
                "elif saved.keys() >= {*range(ranks)}:",
                "elif saved:",
            ),
        },
    },
    "gradcomp/exchanges": {
        ("test_knobs.py",): {
            "gradients that are rounded to three levels travel as gradients": (
                "coarse=error >= LARGEST_ERROR_ROUNDED_TWICE",
                "coarse=False",
            ),
        },
    },
}
