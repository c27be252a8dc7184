"""A worker of the runner in which a kernel faults on request; what follows is the runner's own."""

from __future__ import annotations

from typing import Any

import torch

from fa2tvm.tune import harness


def prepare() -> None:
    """Start CUDA, so that no request's time holds it."""
    torch.zeros(1, device="cuda")


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Leave a faulting kernel on the stream where the request says so, then serve it."""
    if request.get("fault"):
        torch.arange(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
    if request["do"] == "add":
        return {"us": float((torch.ones(2, device="cuda") + 1).sum())}
    return harness.serve(request)
