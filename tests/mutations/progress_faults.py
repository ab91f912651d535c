"""Faults in the kernels of an exchange of updates."""

from __future__ import annotations

from mutations.fault import Table

PROGRESS_FAULTS: Table = {
    "csrc/cpu": {
        ("test_progress.py", "test_definitions.py"): {
            "progress that is not finite is offered": (
                "const float made = good ? found : 0.0f, all",
                "const float made = found, all",
            ),
            "halves keep their progress on a CPU": ("if (!wide) narrow(buffer,", "if (!wide && !weights.count) narrow(buffer,"),
            "progress of a line without a mark is read on a CPU": ("if (marked) move(", "if (marked || count > 0) move("),
        },
    },
    "csrc": {
        ("test_progress.py", "test_definitions.py"): {
            "the factor of progress is the weight decay's, too": (
                "factor * (whole - decayed) + decayed",
                "factor * whole + 0 * decayed",
            ),
            "entries whose progress has waited for longest count as new": ("age + (age < kAges - 1 ? 1 : 0)", "age + 1"),
            "what stays of progress overflows": ("{ return within_largest(all - offered); }", "{ return all - offered; }"),
            "what a cast left of progress is measured in another unit than progress": (
                "(was - is) / scale",
                "(was - is) * scale",
            ),
        },
    },
    "csrc/cuda": {
        ("test_progress.py", "test_definitions.py"): {
            "weights keep their progress on a GPU": (
                "write_piece<kWhole>(weights, piece, entry, count, start);",
                "write_piece<kWhole>(weights, piece, entry, count, now);",
            ),
            "progress of a line without a mark is read on a GPU": ("    if (!marked) return;\n    update", "    update"),
            "a rounding of progress goes into the residual after a failed exchange": (
                "if (std::is_same_v<Element, float> || failed) continue;",
                "if (std::is_same_v<Element, float>) continue;",
            ),
            "failed progress shows in the first of the weights only": (
                "if (failed && entry == of.begin[piece])",
                "if (failed && entry == 0)",
            ),
        },
    },
    "gradcomp/native": {
        ("test_progress.py",): {
            "progress that failed is told by each launch's own first entry": ("update[:1]", "part_of(update, place)"),
        },
    },
}
