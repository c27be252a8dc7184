"""How: the decisions of a kernel family, their choices, and whether they fit (nowhere else)."""

from fa2tvm.schedule.base import (
    SCHEDULES,
    Footprint,
    Schedule,
    schedule_class,
    schedule_from_dict,
)
from fa2tvm.schedule.cpu import CpuBackward, CpuForward
from fa2tvm.schedule.sm80 import (
    SM80_MAX_HEAD_DIM,
    Sm80Backward,
    Sm80Forward,
    sm80_bwd_head_dim,
    sm80_head_dim,
)
from fa2tvm.schedule.sm90 import SM90_HEAD_DIMS, Sm90Forward, sm90_head_dim
from fa2tvm.schedule.sm90_bwd import Sm90Backward, sm90_bwd_head_dim

__all__ = [
    "SCHEDULES",
    "SM80_MAX_HEAD_DIM",
    "SM90_HEAD_DIMS",
    "CpuBackward",
    "CpuForward",
    "Footprint",
    "Schedule",
    "Sm80Backward",
    "Sm80Forward",
    "Sm90Backward",
    "Sm90Forward",
    "schedule_class",
    "schedule_from_dict",
    "sm80_bwd_head_dim",
    "sm80_head_dim",
    "sm90_bwd_head_dim",
    "sm90_head_dim",
]
