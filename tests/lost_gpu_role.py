"""The runner's role on a GPU that is lost on request: its driver's answers are played here."""

from __future__ import annotations

from typing import Any

import torch

from fa2tvm.tune import harness


def prepare() -> None:
    """Nothing to import."""


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Serve a request on a GPU that works, or has faulted."""
    torch.cuda.synchronize = _fail if request.pop("fault", False) else lambda: None
    return harness.serve(request)


def _fail() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")
