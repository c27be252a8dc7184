"""FlashAttention-2 as Apache TVM TensorIR programs, tuned by MetaSchedule, called from PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fa2tvm.api import (
        attention,
        flash_attn_func,
        forget,
        module_for,
        scaled_dot_product_attention,
        use_pack,
        use_schedule,
    )
    from fa2tvm.device import Device, detect
    from fa2tvm.errors import (
        CompileFailed,
        CorruptRecord,
        Fa2tvmError,
        InfeasibleSchedule,
        PeerUnavailable,
        StaleModule,
        StoreUnavailable,
        UnsupportedProblem,
    )
    from fa2tvm.pack import PackEntry, export_pack
    from fa2tvm.problem import Problem, Shape, Variant

__version__ = "0.1.0"

# Public name -> the file that has it, imported when the name is first used: importing fa2tvm
# itself is almost free.
_HOMES = {
    **dict.fromkeys(
        (
            "attention",
            "flash_attn_func",
            "forget",
            "module_for",
            "scaled_dot_product_attention",
            "use_pack",
            "use_schedule",
        ),
        "api",
    ),
    **dict.fromkeys(("PackEntry", "export_pack"), "pack"),
    **dict.fromkeys(("Device", "detect"), "device"),
    **dict.fromkeys(
        (
            "CompileFailed",
            "CorruptRecord",
            "Fa2tvmError",
            "InfeasibleSchedule",
            "PeerUnavailable",
            "StaleModule",
            "StoreUnavailable",
            "UnsupportedProblem",
        ),
        "errors",
    ),
    **dict.fromkeys(("Problem", "Shape", "Variant"), "problem"),
}

__all__ = [
    "CompileFailed",
    "CorruptRecord",
    "Device",
    "Fa2tvmError",
    "InfeasibleSchedule",
    "PackEntry",
    "PeerUnavailable",
    "Problem",
    "Shape",
    "StaleModule",
    "StoreUnavailable",
    "UnsupportedProblem",
    "Variant",
    "attention",
    "detect",
    "export_pack",
    "flash_attn_func",
    "forget",
    "module_for",
    "scaled_dot_product_attention",
    "use_pack",
    "use_schedule",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
