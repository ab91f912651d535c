"""How much of what gradcomp does on a GPU falls into the backward pass, read from a trace of torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BACKWARD = "the backward pass"
"""How the pass is named in a trace, around the call that makes it."""


def overlap(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Kernels by who launched them: gradcomp's, by their names; the backward pass's, while it was called. Of gradcomp's time,
    the share that had begun before the last kernel of the backward pass ended."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = [event for event in events if event["name"] == BACKWARD and event["cat"] == "user_annotation"]
    launched = {event["args"]["correlation"]: event["ts"] for event in events if event["cat"] == "cuda_runtime"}
    kernels = [event for event in events if event["cat"] == "kernel"]
    ours = [event for event in kernels if "gradcomp" in event["name"]]

    def in_backward(event: Mapping[str, Any]) -> bool:
        at = launched.get(event["args"]["correlation"])
        return at is not None and any(call["ts"] <= at <= call["ts"] + call["dur"] for call in calls)

    others = [event for event in kernels if "gradcomp" not in event["name"] and in_backward(event)]
    if not ours or not others:
        return {"kernels": len(ours), "kernels_of_backward": len(others), "share_in_backward": None}
    end = max(event["ts"] + event["dur"] for event in others)
    within = sum(event["dur"] for event in ours if event["ts"] < end)
    return {
        "kernels": len(ours),
        "kernels_of_backward": len(others),
        "ms": sum(event["dur"] for event in ours) / 1000,
        "share_in_backward": within / sum(event["dur"] for event in ours),
    }
