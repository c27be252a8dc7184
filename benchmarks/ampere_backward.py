"""The portable (sm80) backward: every module of a folder checked against float64, then timed.

    python benchmarks/ampere_build.py MODULES
    python benchmarks/ampere_backward.py MODULES --lib LIB [--out ROWS.jsonl]

The modules of a variant are timed in one process beside the peer, and each variant has its own.
Cases, timing and rows are those of hopper_backward.py; the peer is the backward of
F.scaled_dot_product_attention with FLASH_ATTENTION, which is FlashAttention-2.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import hopper_backward as hopper
import torch
import tvm_ffi
from hopper_backward import Module
from hopper_backward import peers as hopper_peers
from hopper_modules import each_variant_alone

from fa2tvm.problem import Shape, Variant
from fa2tvm.schedule import Sm80Backward


def load_module(folder: Path, name: str) -> Module:
    """A module of a folder."""
    meta = json.loads((folder / f"{name}.json").read_text())
    function = tvm_ffi.load_module(str(folder / f"{name}.so"))["backward"]
    schedule = Sm80Backward(**meta["schedule"])
    return Module(name, Variant(**meta["variant"]), schedule, function)


def flash_attention_2(*arguments):
    """(name, callable that gives dQ, dK, dV, reason why it is absent) of the one peer."""
    yield from (p for p in hopper_peers(*arguments) if p[0] == "sdpa-flash")


def measure(modules: list[Module], args) -> None:
    """Time modules of one variant and the peer, write the rows, print a line a cell."""
    timer, run, variant = hopper.Timer(), hopper.provenance(), modules[0].variant
    heads = max(1, 2048 // variant.head_dim_qk)
    for batch, seq_q, seq_kv, heads_q, heads_kv, mode in hopper.cells_of(
        args.cells.split(","), heads
    ):
        if args.seqs and str(seq_kv) not in args.seqs.split(","):
            continue
        shape = Shape(batch, heads_q, heads_kv, seq_q, seq_kv)
        rows = hopper.measure_cell(timer, modules, variant, shape, mode, False, run, args)
        with args.out.open("a") as log:
            for row in rows:
                row["family"] = "sm80" if row["peer"] == "fa2tvm" else None
                log.write(json.dumps(row) + "\n")
        hopper.print_cell(rows)


def main() -> int:
    """Check, measure, write the rows, print the table; each variant in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", type=Path)
    parser.add_argument("--lib", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("ampere_backward.jsonl"))
    parser.add_argument("--names", default="", help="modules, by comma; all if empty")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--cells", default="burst", help="see hopper_forward.py")
    parser.add_argument("--seqs", default="", help="sequence lengths of the sweep, by comma")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    names = (
        args.names.split(",") if args.names else sorted(p.stem for p in args.modules.glob("*.so"))
    )
    code = each_variant_alone(args.modules, names)
    if code is not None:
        return code
    torch.manual_seed(int(time.time()))
    hopper.peers = flash_attention_2
    ctypes.CDLL(str(args.lib / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(args.lib / "libtvm_runtime_cuda.so"))
    modules = [load_module(args.modules, name) for name in names]
    sound = []
    for module in modules:
        cases, failures = (0, []) if args.no_check else hopper.check(module)
        summary = f"check {module.name}: {cases} cases, {len(failures)} failures"
        print(summary, *failures[:4], sep="\n   ", flush=True)
        sound += [] if failures else [module]
    if sound and not args.no_time:
        measure(sound, args)
    return int(len(sound) < len(modules))


if __name__ == "__main__":
    raise SystemExit(main())
