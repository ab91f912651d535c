"""Faults in the kernels of an exchange of updates."""

from __future__ import annotations

from mutations.fault import Fault

PROGRESS_FAULTS = (
    Fault(
        "progress that is not finite is offered",
        "csrc/cpu",
        "const float made = good ? found : 0.0f, all",
        "const float made = found, all",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "the factor of progress is the weight decay's, too",
        "csrc",
        "factor * (whole - decayed) + decayed",
        "factor * whole + 0 * decayed",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "entries whose progress has waited for longest count as new",
        "csrc",
        "age + (age < kAges - 1 ? 1 : 0)",
        "age + 1",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "what stays of progress overflows",
        "csrc",
        "{ return within_largest(all - offered); }",
        "{ return all - offered; }",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "weights keep their progress on a GPU",
        "csrc/cuda",
        "write_piece<kWhole>(weights, piece, entry, count, start);",
        "write_piece<kWhole>(weights, piece, entry, count, now);",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "halves keep their progress on a CPU",
        "csrc/cpu",
        "if (!wide) narrow(buffer,",
        "if (!wide && !weights.count) narrow(buffer,",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "progress of a line without a mark is read on a GPU",
        "csrc/cuda",
        "    if (!marked) return;\n    update",
        "    update",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "progress of a line without a mark is read on a CPU",
        "csrc/cpu",
        "if (marked) move(",
        "if (marked || count > 0) move(",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "what a cast left of progress is measured in another unit than progress",
        "csrc",
        "(was - is) / scale",
        "(was - is) * scale",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "a rounding of progress goes into the residual after a failed exchange",
        "csrc/cuda",
        "if (std::is_same_v<Element, float> || failed) continue;",
        "if (std::is_same_v<Element, float>) continue;",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "failed progress shows in the first of the weights only",
        "csrc/cuda",
        "if (failed && entry == of.begin[piece])",
        "if (failed && entry == 0)",
        ("test_progress.py", "test_definitions.py"),
    ),
    Fault(
        "progress that failed is told by each launch's own first entry",
        "gradcomp/native",
        "update[:1]",
        "part_of(update, place)",
        ("test_progress.py",),
    ),
)
