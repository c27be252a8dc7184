"""compute-sanitizer over the modules of a pack: out-of-bounds accesses, races, wrong barriers.

    python benchmarks/sanitize.py PACK [--only d64] [--tool memcheck --tool racecheck ...]

Each tool watches one process that calls every module of the pack through fa2tvm.attention on two
small shapes: tails, a group of heads, rows that see nothing, several tiles a thread block. The
exit code is 1 if a tool reported anything. Racecheck follows no mbarriers: sm90_fwd.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TOOLS = ("memcheck", "racecheck", "synccheck")
# (batch, heads, key heads, queries, keys)
SHAPES = ((1, 2, 1, 129, 200), (2, 2, 2, 300, 77))
_REPORTED = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")


def call_all(pack: Path, only: str) -> None:
    """Call every forward module of the pack on each shape, with its backward if there is one."""
    import torch

    import fa2tvm
    from fa2tvm.problem import Variant

    modules = fa2tvm.use_pack(pack, trust=True)
    variants = {m.variant: m for m in modules}
    for variant in variants:
        if variant.pass_ != "forward" or only not in variant.name:
            continue
        backward = Variant(**{**variant.to_dict(), "pass_": "backward"}) in variants
        dtype = getattr(torch, variant.dtype)
        d, dv = variant.head_dim_qk, variant.head_dim_v
        for batch, heads, heads_kv, seq_q, seq_kv in SHAPES:
            sizes = ((seq_q, heads, d), (seq_kv, heads_kv, d), (seq_kv, heads_kv, dv))
            q, k, v = (torch.ones(batch, *s, device="cuda", dtype=dtype) for s in sizes)
            for x in (q, k, v):
                x.requires_grad_(backward)
            out = fa2tvm.attention(q, k, v, causal=variant.causal)
            if backward:
                torch.autograd.grad(out, (q, k, v), out)
            torch.cuda.synchronize()
            assert bool((out[:, -1] == 1).all()), variant.name
        print(f"called {variant.name}{' and its backward' if backward else ''}", flush=True)


def watched(tool: str, pack: Path, only: str) -> int:
    """Run `call_all` under a tool: how much it reported, -1 where it did not run."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "5", sys.executable, __file__]
    command += [os.fspath(pack), "--only", only, "--call"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = _REPORTED.search(done.stdout)
    count = int(said[1] or said[2]) if said else -1
    called = done.stdout.count("called ")
    print(f"{tool}: {count} reports, {called} variants called, exit code {done.returncode}")
    if count or done.returncode:
        print((done.stdout + done.stderr)[-3000:])
    return count


def main() -> int:
    """Run the tools, or be the process that they watch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--tool", action="append", choices=TOOLS)
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.call:
        call_all(args.pack, args.only)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on PATH; it comes with a CUDA toolkit")
        return 1
    return int(any(watched(tool, args.pack, args.only) for tool in args.tool or TOOLS))


if __name__ == "__main__":
    raise SystemExit(main())
