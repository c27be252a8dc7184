"""The modules that the gpu tests call, as one pack, made on a machine without a GPU.

    python tests/gpu_pack.py DEST [--device nvidia_h200] [--only bfloat16_d64] [--family sm80]
    python -m pytest -m gpu --pack DEST          # on the GPU's machine, which needs no compiler

Without a pack the tests compile what they call, where a compiler is.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm import compile as compiler
from fa2tvm.device import Device, gpu, usable_cores
from fa2tvm.errors import CompileFailed, UnsupportedProblem
from fa2tvm.lookup import lookup
from fa2tvm.pack import PackEntry, export_pack
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import schedule_class

NATIVE = (64, 96, 128, 192, 256)
PADDED = tuple(d for d in range(8, 257, 8) if d not in NATIVE)
UNEQUAL = ((192, 128), (128, 64), (64, 128), (96, 64), (72, 200), (256, 64), (64, 256), (8, 96))
DETERMINISTIC = Variant("backward", "bfloat16", 64, 64, True)


def forward_variants() -> list[Variant]:
    """Both dtypes and masks of the native head dims; all others in one dtype and mask each."""
    found = [
        Variant("forward", dtype, d, d, causal)
        for dtype in ("bfloat16", "float16")
        for d in NATIVE
        for causal in (False, True)
    ]
    for n, d in enumerate(PADDED):
        found.append(Variant("forward", "float16" if n % 3 == 2 else "bfloat16", d, d, n % 2 == 0))
    for n, (d, dv) in enumerate(UNEQUAL):
        found.append(Variant("forward", "bfloat16", d, dv, n % 2 == 0))
    return found


def backward_variants() -> list[Variant]:
    """All native head dims; some of those that are padded, and some of unequal ones."""
    chosen = []
    for v in forward_variants():
        d, dv = v.head_dim_qk, v.head_dim_v
        native = d == dv and d in NATIVE and (v.causal or v.dtype == "bfloat16")
        if native or (d == dv and d in PADDED[::4]) or (d, dv) in UNEQUAL[::2]:
            chosen.append(Variant("backward", v.dtype, d, dv, v.causal))
    return chosen


def problems(variant: Variant) -> list[Problem]:
    """One problem of each length class."""
    return [Problem(variant, Shape(1, 4, 4, n, n)) for n in (256, 1024, 4096)]


def entries(
    variants: Iterable[Variant], device: Device, family: str | None = None
) -> list[PackEntry]:
    """What lookup gives for each length class; variants that no family can do are left out.

    With a family, its default instead. Of one backward also the deterministic schedule.
    """
    found = []
    for variant in variants:
        for problem in problems(variant):
            try:
                schedule = (
                    schedule_class(family, variant.pass_).default(variant, device)
                    if family
                    else lookup(problem, device).schedule
                )
            except UnsupportedProblem:
                continue
            found.append(PackEntry(variant, schedule, device, problem.length_class))
            if variant == DETERMINISTIC and hasattr(schedule, "deterministic"):
                fixed = dataclasses.replace(schedule, deterministic=True)
                found.append(PackEntry(variant, fixed, device, problem.length_class))
    return found


def _build(entry: PackEntry) -> str | None:
    """Why an entry cannot be built, or None."""
    try:
        compiler.build(entry.variant, entry.schedule, entry.device)
    except CompileFailed as error:
        return str(error)
    return None


def main() -> int:
    """Compile on all cores, then write the pack of what could be compiled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("dest", type=Path)
    parser.add_argument("--device", default="nvidia_h200")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--family", help="this family, not the fastest one of the device")
    parser.add_argument("--seconds", type=float, default=3600.0, help="leave out what takes longer")
    args = parser.parse_args()
    variants = forward_variants() + backward_variants()
    named = (v for v in variants if args.only in v.name)
    chosen = entries(named, gpu(args.device), args.family)
    # What most tests call comes first.
    chosen.sort(key=lambda e: (e.variant.head_dim_qk, e.variant.head_dim_v) != (64, 64))
    distinct = {(e.variant, e.schedule): e for e in chosen}
    context = multiprocessing.get_context("spawn")
    until = time.monotonic() + args.seconds
    failed = set(distinct)
    with ProcessPoolExecutor(usable_cores(), mp_context=context) as pool:
        pending = {pool.submit(_build, entry): key for key, entry in distinct.items()}
        with contextlib.suppress(TimeoutError):
            for done in as_completed(pending, timeout=until - time.monotonic()):
                sys.stderr.write(f"{pending[done][0].name}: {done.result() or 'built'}\n")
                if not done.result():
                    failed.discard(pending[done])
        pool.shutdown(wait=False, cancel_futures=True)
    built = [e for e in chosen if (e.variant, e.schedule) not in failed]
    sys.stderr.write(f"wrote {export_pack(built, args.dest)}, {len(failed)} failed\n")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
