"""Faults of packed entries: rounding, and bytes that do harm."""

from __future__ import annotations

from mutations.fault import Fault

PACKED_FAULTS = (
    Fault(
        "rounding left out: the compact wire's error is lost instead of waiting",
        "csrc/cpu",
        "values.data[i] - form.value_of(code, exponent)",
        "0 * form.value_of(code, exponent)",
        ("test_packed.py",),
    ),
    Fault(
        "a malformed payload writes outside of the bucket",
        "csrc/cpu",
        "if (!word.sound || at_ + word.count > there_) return false;",
        "if (!word.sound) return false;",
        ("test_packed.py",),
    ),
    Fault(
        "a place beyond its block is not noticed",
        "csrc/cpu",
        "found == word.count || high >= highs",
        "found == word.count || high > 2 * highs",
        ("test_packed.py",),
    ),
    Fault(
        "packed values are a power of two too small at a tie",
        "csrc",
        "(magnitude + 0x400000u) >> 23",
        "(magnitude + 0x3fffffu) >> 23",
        ("test_packed.py",),
    ),
    Fault(
        "settling gives half of it back where the update is not finite",
        "csrc",
        "is_finite(update[0]) ? keep : 1.0f",
        "is_finite(update[0]) ? keep : 0.5f",
        ("test_take.py", "test_packed.py"),
    ),
)
