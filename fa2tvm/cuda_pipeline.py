"""The passes that lower our CUDA programs: TVM's own order, or that without a simplification.

TVM simplifies twice before it splits host and device. The code of the Hopper forward is the same,
character by character, where only the second is done (7 head dims and masks), and its lowering
takes 2.6 instead of 4.5 s of CPU (tvm 0.27.0.post1, Zen 4, 2026-12-01). Others gain nothing, and
the code of the backwards changes: they keep TVM's order.
"""

from __future__ import annotations

from typing import Any

from fa2tvm.schedule import Schedule

_NAME = "fa2tvm_simplified_once"
_SIMPLIFIED_ONCE = (("sm90", "forward"),)


def pipeline_for(schedule: Schedule) -> str:
    """The name under which TVM knows the pipeline of a schedule's program."""
    if (schedule.family, schedule.pass_) not in _SIMPLIFIED_ONCE:
        return "tirx"
    from tvm import s_tir, tirx
    from tvm.tirx import compilation_pipeline

    def pipeline() -> tuple[Any, Any, Any]:
        _, host_passes, device_passes = compilation_pipeline.tirx_pipeline()
        return _passes(tirx.transform, s_tir.transform), host_passes, device_passes

    tirx.register_tir_pipeline(_NAME, pipeline)
    return _NAME


def _passes(tirx: Any, s_tir: Any) -> Any:
    import tvm
    from tvm.backend.cuda.transforms import LowerIket

    return tvm.ir.transform.Sequential(
        [
            tirx.LowerTIRx(),
            s_tir.UnifyThreadBinding(),
            tirx.LowerTIRxOpaque(),
            tirx.FlattenBuffer(),
            tirx.BF16ComputeLegalize(),
            tirx.NarrowDataType(32),
            tirx.VectorizeLoop(True),
            tirx.UnrollLoop(),
            tirx.StmtSimplify(),
            tirx.CommonSubexprElim(),
            tirx.FP8ComputeLegalize(),
            tirx.VerifyMemory(),
            tirx.AnnotateEntryFunc(),
            tirx.SplitHostDevice(),
            LowerIket(),
            tirx.MakePackedAPI(),
            tirx.FP8StorageLegalize(),
            tirx.BF16StorageLegalize(),
        ]
    )
