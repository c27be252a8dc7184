"""Compile modules for ampere_forward.py and ampere_backward.py, where no GPU need be.

    python benchmarks/ampere_build.py DEST [--pass forward] [--dims 64,128,256]

Writes DEST/NAME.so and NAME.json (variant, schedule, compiler's report) for each hand-picked
schedule of the family, dense and causal: d128 is the default; d128_1 and on, the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm import compile_cuda
from fa2tvm.device import nvidia_h200, usable_cores
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import Schedule, schedule_class


def compile_one(name: str, variant: Variant, schedule: Schedule, dest: Path) -> str:
    """Compile a module; a line about it."""
    began = time.time()
    facts = compile_cuda.compile_library(variant, schedule, nvidia_h200(), dest / f"{name}.so")
    meta = {"variant": variant.to_dict(), "schedule": schedule.to_dict(), "report": facts}
    (dest / f"{name}.json").write_text(json.dumps(meta) + "\n")
    changed = {k: v for k, v in schedule.to_dict().items() if v != getattr(type(schedule), k)}
    return (
        f"{name}: {facts['registers']} registers, {facts['spill_bytes']} bytes spilled, "
        f"{facts['shared_bytes']} bytes shared, {time.time() - began:.1f} s, {changed}"
    )


def main() -> int:
    """Compile them all, with a stub of the driver on the path where there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dest", type=Path)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pass", dest="pass_", choices=("forward", "backward"), default="backward")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    if compile_cuda.needs_stubs():
        environment = compile_cuda.stub_environment(args.dest / f"stub_{os.getpid()}")
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    family = schedule_class("sm80", args.pass_)
    jobs = []
    for d in map(int, args.dims.split(",")):
        for causal in (False, True):
            variant = Variant(args.pass_, args.dtype, d, d, causal)
            problem = Problem(variant, Shape(1, 1, 1, 512, 512))
            default = family.default(variant, nvidia_h200())
            picked = dict.fromkeys((default, *family.hand_picked(problem, nvidia_h200())))
            for n, schedule in enumerate(picked):
                name = f"d{d}{'c' if causal else ''}{f'_{n}' if n else ''}"
                jobs.append((name, variant, schedule, args.dest))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), mp_context=context) as pool:
        for line in pool.map(compile_one, *zip(*jobs, strict=True)):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
