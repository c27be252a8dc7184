"""Compile modules for hopper_forward.py and hopper_backward.py, here, where no GPU need be.

    python benchmarks/hopper_build.py DEST      the default schedule of each head dim
    python benchmarks/hopper_build.py DEST 'wide=d=128,causal=True,block_kv=192'

A module is NAME=fields: pass_, d, dv, dtype, causal of the variant, pick (which of the hand-picked
schedules; 0 is the default), else a decision of Sm90Forward or Sm90Backward.
Writes DEST/NAME.so, .json (variant, schedule, ptxas report), .cubin and .cu.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm import compile_cuda
from fa2tvm.device import nvidia_h200
from fa2tvm.errors import Fa2tvmError
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import Schedule, schedule_class

DEFAULTS = tuple(
    f"d{d}{'c' if causal else ''}=d={d},causal={causal}"
    for d in (64, 96, 128, 192, 256)
    for causal in (False, True)
)


def parse(spec: str) -> tuple[str, Variant, Schedule]:
    """A module's name, variant and schedule from `NAME=field=value,field=value`."""
    name, _, text = spec.partition("=")
    call = ast.parse(f"f({text})", mode="eval").body
    fields = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    d = fields.pop("d", 128)
    variant = Variant(
        fields.pop("pass_", "forward"),
        fields.pop("dtype", "bfloat16"),
        d,
        fields.pop("dv", d),
        fields.pop("causal", False),
    )
    problem = Problem(variant, Shape(1, 1, 1, 512, 512))
    family = schedule_class("sm90", variant.pass_)
    schedule = family.hand_picked(problem, nvidia_h200())[fields.pop("pick", 0)]
    return name, variant, dataclasses.replace(schedule, **fields)


def compile_one(spec: str, dest: Path) -> bool:
    """Compile a module and print one line; False where it is refused."""
    name, variant, schedule = parse(spec)
    device, began = nvidia_h200(), time.time()
    try:
        module = compile_cuda.compile_module(variant, schedule, device, dest, name)
    except Fa2tvmError as error:
        print(f"{name}: {error}", flush=True)
        return False
    report = module.report
    meta = {
        "variant": variant.to_dict(),
        "schedule": schedule.to_dict(),
        "report": dataclasses.asdict(report),
    }
    (dest / f"{name}.json").write_text(json.dumps(meta) + "\n")
    footprint = schedule.footprint(variant, device)
    print(
        f"{name}: {report.registers} registers, {report.spill_store_bytes} bytes spilled, "
        f"{footprint.scratch_bytes} bytes shared, fragments {footprint.accumulator_registers}, "
        f"{time.time() - began:.1f} s {' '.join(report.warnings)}",
        flush=True,
    )
    return True


def main() -> int:
    """Compile every module named, with a stub of the driver on the path where there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dest", type=Path)
    parser.add_argument("specs", nargs="*", default=DEFAULTS)
    args = parser.parse_args()
    if compile_cuda.needs_stubs():
        environment = compile_cuda.stub_environment(args.dest / f"stub_{os.getpid()}")
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    refused = [spec for spec in args.specs if not compile_one(spec, args.dest)]
    return 1 if refused else 0


if __name__ == "__main__":
    raise SystemExit(main())
