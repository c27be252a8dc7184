"""Hopper forward: every module of a folder checked against float64, then timed beside its peers.

    python benchmarks/hopper_forward.py MODULES --lib LIB [--fa3 FA3_DIR] [--out ROWS.jsonl]

MODULES holds NAME.so and NAME.json (variant, schedule, ptxas report) from hopper_build.py;
LIB holds libtvm_runtime.so and libtvm_runtime_cuda.so. Needs torch and apache-tvm-ffi, no compiler.
Burst: CUDA events, median of the repeats; before each the L2 is flushed by a 256 MB write and a
spin kernel lets the CPU get ahead. Sustained: back to back for two seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from hopper_checks import check, check_limits
from hopper_modules import inputs, load_modules, outputs, reference, relative_error
from hopper_peers import Timer, load_fa3, peers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm.problem import Problem, Shape, Variant

# (batch, seq) at 16384 tokens; heads so that heads * head_dim = 2048.
SWEEP = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))


def provenance() -> dict:
    """What a row must say about the run."""
    query = "name,driver_version,power.limit"
    card = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "driver": card,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "tvm": "0.27.0.post1",
        "fa2tvm_commit": os.environ.get("FA2TVM_COMMIT", ""),
        "dirty": os.environ.get("FA2TVM_DIRTY", "") == "1",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def row(peer, variant: Variant, shape: Shape, mode, times, run, **extra) -> dict:
    """One measurement in the format of benchmarks/<device>/<what>.jsonl."""
    flops = Problem(variant, shape).flops()
    if variant.causal and shape.seq_q == shape.seq_kv:
        # The convention of the peers' papers: exactly half, the diagonal's second half not counted.
        flops = 2 * (variant.head_dim_qk + variant.head_dim_v) * shape.seq_q * shape.seq_kv // 2
        flops *= shape.batch * shape.heads_q
    p20, p50, p80 = (
        round(times[int(f * (len(times) - 1))], 2) if times else None for f in (0.2, 0.5, 0.8)
    )
    return {
        "peer": peer,
        "family": "sm90" if peer.startswith("fa2tvm") else None,
        "pass": "forward",
        "mode": mode,
        "dtype": variant.dtype,
        "head_dim": variant.head_dim_qk,
        "head_dim_v": variant.head_dim_v,
        "causal": variant.causal,
        **shape.to_dict(),
        "us_p50": p50,
        "us_p20": p20,
        "us_p80": p80,
        "tflops": round(flops / p50 / 1e6, 1) if p50 else None,
        **extra,
        "run": run,
    }


def measure_cell(timer, modules, variant, shape, mode, fa3, run, args):
    """Rows of all modules of a variant and of the peers at one shape, interleaved in two rounds."""
    s = shape
    sizes = (s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv)
    q, k, v = inputs(variant, *sizes, args.amplitude)
    scale = 1 / math.sqrt(variant.head_dim_qk)
    offset = shape.seq_kv - shape.seq_q
    out, lse, workspace = outputs(variant, q)
    probe = [q[:1, -512:, :1], k[:1, :, :1], v[:1, :, :1]]
    want, _ = reference(*probe, scale, variant.causal, shape.seq_kv - probe[0].shape[1])

    def ours(module):
        module(q, k, v, out, lse, workspace, scale, offset)
        return out

    contenders = [("fa2tvm", m, lambda m=m: ours(m), None) for m in modules]
    if not args.no_peers:
        contenders += [
            (name, None, call, reason) for name, call, reason in peers(variant, q, k, v, scale, fa3)
        ]
    times = [[] for _ in contenders]
    errors, wrong = [reason for *_, reason in contenders], [None] * len(contenders)
    for turn in range(args.rounds):
        # Back and forth: the first of a cell meets a cooler chip than the last.
        order = list(enumerate(contenders))[:: -1 if turn % 2 else 1]
        for n, (_, _, call, _) in order:
            if errors[n]:
                continue
            try:
                if turn == 0:
                    wrong[n] = relative_error(call()[:1, -512:, :1], want)
                    if not wrong[n] < 1e-2:
                        errors[n] = f"relative error {wrong[n]:.1e}"
                        continue
                if mode == "burst":
                    times[n] += timer.burst(call, args.repeats)
                else:
                    times[n] += timer.sustained(call, 2.0)
            except RuntimeError as error:
                errors[n] = str(error).splitlines()[0][:200]
    rows = []
    for (peer, module, *_), measured, error, rel_err in zip(
        contenders, times, errors, wrong, strict=True
    ):
        extra = {"rel_err": rel_err, "error": error, "amplitude": args.amplitude}
        if module is not None:
            extra |= {"module": module.name, "schedule": module.schedule}
        rows.append(row(peer, variant, shape, mode, sorted(measured), run, **extra))
    return rows


def main() -> int:
    """Check, measure, write the rows, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", type=Path)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--fa3", type=Path, help="folder of _C.so and libcudart.so.12")
    parser.add_argument("--out", type=Path, default=Path("hopper_forward.jsonl"))
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument(
        "--limits", action="store_true", help="also large tensors, repeats, streams, graphs"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument(
        "--cells",
        default="burst",
        help="of burst (the sweep), sustained (1x16384), gqa (32/8, 2x8192), decode (few queries)",
    )
    parser.add_argument("--amplitude", type=float, default=1.0, help="of Q and K")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="modules whose name contains this")
    args = parser.parse_args()
    torch.manual_seed(int(time.time()))
    modules = [m for m in load_modules(args.modules, args.lib) if args.only in m.name]
    fa3 = load_fa3(args.fa3)
    sound = modules
    if not args.no_check:
        sound = []
        for module in modules:
            cases, failures = check(module)
            print(
                f"check {module.name}: {cases} cases, {len(failures)} failures",
                *failures[:4],
                sep="\n   ",
                flush=True,
            )
            sound += [module] if not failures else []
    if args.limits:
        for module in sound:
            for label, problem in check_limits(module):
                print(f"limits {module.name}: {label}: {problem or 'ok'}", flush=True)
    if args.check_only:
        return int(len(sound) < len(modules))
    run, timer = provenance(), Timer()
    with args.out.open("a") as log:
        for variant in dict.fromkeys(m.variant for m in sound):
            group = [m for m in sound if m.variant == variant]
            heads = max(1, 2048 // variant.head_dim_qk)
            for batch, seq_q, seq_kv, heads_q, heads_kv, mode in cells_of(
                args.cells.split(","), heads
            ):
                shape = Shape(batch, heads_q, heads_kv, seq_q, seq_kv)
                rows = measure_cell(timer, group, variant, shape, mode, fa3, run, args)
                for r in rows:
                    log.write(json.dumps(r) + "\n")
                log.flush()
                print_cell(rows)
    return int(len(sound) < len(modules))


def cells_of(kinds, heads):
    """(batch, seq_q, seq_kv, heads_q, heads_kv, mode) of each cell."""
    if "burst" in kinds:
        yield from ((batch, seq, seq, heads, heads, "burst") for batch, seq in SWEEP)
    if "gqa" in kinds:
        yield 2, 8192, 8192, 32, 8, "burst"
    if "decode" in kinds:
        yield 64, 1, 8192, 32, 8, "burst"
        yield 8, 4, 8192, 32, 4, "burst"
    if "sustained" in kinds:
        yield 1, 16384, 16384, heads, heads, "sustained"


def print_cell(rows):
    """One line a cell: the best of ours, its ratio to the best peer, everyone's TFLOP/s."""
    r = rows[0]
    ours = [x for x in rows if x["peer"] == "fa2tvm" and not x["error"]]
    others = [x for x in rows if x["peer"] != "fa2tvm" and not x["error"]]
    best = max((x["tflops"] for x in ours), default=math.nan)
    bar = max((x["tflops"] for x in others), default=math.nan)
    print(
        f"{r['dtype'][:4]} d{r['head_dim']}/{r['head_dim_v']} "
        f"{'causal' if r['causal'] else 'dense '} "
        f"{r['batch']}x{r['seq_q']}x{r['seq_kv']} {r['mode'][:5]}: "
        f"{best:.0f} / {bar:.0f} = {best / bar:.3f} | "
        + " ".join(
            f"{x.get('module', x['peer'])} {x['tflops']:.0f}"
            if not x["error"]
            else f"{x['peer']} {x['error'][:60]}"
            for x in rows
        ),
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
