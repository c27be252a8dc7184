"""Kernel families: a Variant, a Schedule and a Device become a TensorIR module."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from fa2tvm.device import Device
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule

if TYPE_CHECKING:
    import tvm

# (family, pass) -> the module whose `build` makes it; imported when it is first needed.
BUILDERS: dict[tuple[str, str], str] = {
    ("cpu", "forward"): "fa2tvm.kernels.cpu_fwd",
    ("cpu", "backward"): "fa2tvm.kernels.cpu_bwd",
    ("sm80", "forward"): "fa2tvm.kernels.sm80_fwd",
    ("sm80", "backward"): "fa2tvm.kernels.sm80_bwd",
    ("sm90", "forward"): "fa2tvm.kernels.sm90_fwd",
    ("sm90", "backward"): "fa2tvm.kernels.sm90_bwd",
}

_stacks = threading.RLock()


def build(variant: Variant, schedule: Schedule, device: Device) -> tvm.IRModule:
    """The TensorIR module of a variant: one public PrimFunc named "forward" or "backward".

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    """
    schedule.require_feasible(variant, device)
    builder = importlib.import_module(BUILDERS[schedule.family, schedule.pass_])
    with _quick_stacks():
        module: tvm.IRModule = builder.build(variant, schedule, device)
    return module


@contextlib.contextmanager
def _quick_stacks() -> Iterator[None]:
    """Have `inspect` list stack frames without looking for their files and lines meanwhile.

    TVM's parser lists the whole stack at every inlined helper and reads the frames alone. Finding
    files and lines took 4.2 of the 5.4 s of CPU of a Hopper program (Zen 4, 2026-12-01).
    """
    with _stacks:
        list_frames, list_stack = inspect.getouterframes, inspect.stack
        inspect.getouterframes = _frames
        inspect.stack = lambda context=1: _frames(sys._getframe(1), context)
        try:
            yield
        finally:
            inspect.getouterframes, inspect.stack = list_frames, list_stack


def _frames(frame: FrameType | None, context: int = 1) -> list[inspect.FrameInfo]:
    """What `inspect.getouterframes` gives, all that it has without opening a file."""
    del context
    found = []
    while frame is not None:
        code = frame.f_code
        found.append(
            inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
        )
        frame = frame.f_back
    return found
