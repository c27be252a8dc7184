"""Kernel families: a Variant, a Schedule and a Device become a TensorIR module."""

from __future__ import annotations

import importlib
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
    ("sm90", "forward"): "fa2tvm.kernels.sm90_fwd",
}


def build(variant: Variant, schedule: Schedule, device: Device) -> tvm.IRModule:
    """The TensorIR module of a variant: one public PrimFunc named "forward" or "backward".

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    """
    schedule.require_feasible(variant, device)
    builder = importlib.import_module(BUILDERS[schedule.family, schedule.pass_])
    module: tvm.IRModule = builder.build(variant, schedule, device)
    return module
