"""The share of gradcomp's work on a GPU that falls into the backward pass, read from a trace of torch's profiler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The name of the backward pass's call in a trace.
BACKWARD = "the backward pass"


def overlap(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the share of gradcomp's time that began before the last kernel of the backward pass ended.

    gradcomp's kernels are told by their names, those of the backward pass by a launch during its call.
    """
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
