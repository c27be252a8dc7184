"""The portable (sm80) forward: every module of a folder checked against float64, then timed.

    python benchmarks/ampere_forward.py MODULES --lib LIB [--out ROWS.jsonl]

Cases, timing and rows are those of hopper_forward.py; the peer is F.scaled_dot_product_attention
with FLASH_ATTENTION, which is FlashAttention-2: the same instructions on the same card.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import hopper_forward as hopper
import torch
import tvm_ffi
from hopper_modules import Module, each_variant_alone
from hopper_peers import peers as hopper_peers

from fa2tvm.problem import Shape, Variant


class Sm80Module(Module):
    """A loaded module with its manifest."""

    checking = True

    def __call__(self, q, k, v, out, lse, workspace, scale, causal_offset):
        """Launch the kernel on the current stream; it needs no workspace.

        Where it saves m and l, LSE is made of them for the checks, and not in timed calls.
        """
        if not self.schedule["save_m_and_l"]:
            self.function(q, k, v, out, lse, scale, causal_offset)
            return
        both = torch.empty(2, *lse.shape, device=lse.device)
        self.function(q, k, v, out, both.flatten(0, 1), scale, causal_offset)
        if self.checking:
            lse.copy_(both[0] + both[1].log())


def load_module(folder: Path, name: str) -> Sm80Module:
    """A module of a folder."""
    meta = json.loads((folder / f"{name}.json").read_text())
    function = tvm_ffi.load_module(str(folder / f"{name}.so"))["forward"]
    return Sm80Module(name, Variant(**meta["variant"]), meta["schedule"], function)


def flash_attention_2(variant, q, k, v, scale, fa3):
    """(name, callable that gives O, reason why it is absent) of the one peer."""
    yield from (p for p in hopper_peers(variant, q, k, v, scale, fa3) if p[0] == "sdpa-flash")


def check_module(module: Sm80Module, limits: bool) -> bool:
    """Print the outcome of every check of a module; whether all are right."""
    cases, failures = hopper.check(module)
    print(
        f"check {module.name}: {cases} cases, {len(failures)} failures", *failures[:4], sep="\n   "
    )
    problems = list(hopper.check_limits(module)) if limits else []
    for label, problem in problems:
        print(f"limits {module.name}: {label}: {problem or 'ok'}")
    return not failures and not any(problem for _, problem in problems)


def measure(modules: list[Sm80Module], args) -> None:
    """Time modules of one variant and the peer, write the rows, print a line a cell."""
    timer, run, variant = hopper.Timer(), hopper.provenance(), modules[0].variant
    Sm80Module.checking = False
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
    parser.add_argument("--out", type=Path, default=Path("ampere_forward.jsonl"))
    parser.add_argument("--names", default="", help="modules, by comma; all if empty")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--limits", action="store_true")
    parser.add_argument("--cells", default="burst", help="see hopper_forward.py")
    parser.add_argument("--seqs", default="", help="sequence lengths of the sweep, by comma")
    parser.add_argument("--amplitude", type=float, default=1.0, help="of Q and K")
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
    sound = [m for m in modules if args.no_check or check_module(m, args.limits)]
    if sound and not args.no_time:
        measure(sound, args)
    return int(len(sound) < len(modules))


if __name__ == "__main__":
    raise SystemExit(main())
