"""Run one GPU program on the CPU and hold it to the yardstick; no GPU, no CUDA compiler.

    python tests/emulate.py 'd=128,causal=True'
    python tests/emulate.py 'pass_="backward",d=64,block_q=96' --sizes 1,4,2,129,257 --seeds 5
    python tests/emulate.py 'family="sm80",d=72,dtype="float16",stages=2' --sizes 1,1,1,63,65

A program is family ("sm90" or "sm80"), pass_, d, dv, dtype and causal, cores (multiprocessors), and
decisions of its Schedule class that differ from the default. Sizes are batch, heads, key heads,
queries, keys. What a kernel does wrong (a wrong number, a deadlock, a race that the adversarial
order hits, an access out of range) is one line, and the exit status is 1. The default sizes hold
tails, groups, rows that see nothing and both alignments. Modules are kept in FA2TVM_HOME/emulated.

--mutants asks the reverse: each synchronisation of the program is left out in turn, and what no
case notices is listed. It is never reached by these cases, one too many, or a blind spot.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Sizes = tuple[int, ...]
SIZES: tuple[Sizes, ...] = (
    (1, 1, 1, 1, 1),
    (2, 2, 2, 65, 63),
    (1, 4, 2, 129, 257),
    (1, 2, 1, 300, 130),
)


def parse(spec: str) -> Any:
    """The program that a specification names."""
    from emulator import attention

    from fa2tvm.problem import Variant

    call = ast.parse(f"f({spec})", mode="eval").body
    assert isinstance(call, ast.Call)
    fields: dict[str, Any] = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    d = fields.pop("d", 128)
    variant = Variant(
        fields.pop("pass_", "forward"),
        fields.pop("dtype", "bfloat16"),
        d,
        fields.pop("dv", d),
        fields.pop("causal", False),
    )
    family, cores = fields.pop("family", "sm90"), fields.pop("cores", None)
    program = attention.program(variant, family, **fields)
    if cores:
        program = dataclasses.replace(
            program, device=dataclasses.replace(program.device, cores=cores)
        )
    return program


def cases(program: Any, sizes: list[Sizes], seed: int) -> Iterator[tuple[str, Any]]:
    """Cases of the program's variant, and what to call them."""
    import torch
    from calls import random_case

    variant, generator = program.variant, torch.Generator().manual_seed(seed)
    for batch, heads, heads_kv, seq_q, seq_kv in sizes:
        for alignment in ("bottom_right", "top_left"):
            if alignment == "top_left" and (not variant.causal or seq_q == seq_kv):
                continue
            case = random_case(
                generator,
                getattr(torch, variant.dtype),
                batch=batch,
                heads=heads,
                heads_kv=heads_kv,
                seq_q=seq_q,
                seq_kv=seq_kv,
                d=variant.head_dim_qk,
                dv=variant.head_dim_v,
                dlse=True,
                causal=variant.causal,
                alignment=alignment,
                arithmetic=None,
            )
            yield f"({batch}, {heads}, {heads_kv}, {seq_q}, {seq_kv}) {alignment}", case


def check(emulator: Any, program: Any, sizes: list[Sizes], seeds: range) -> bool:
    """Print a line for each case and order; whether all are right."""
    from emulator import attention

    all_right = True
    for seed in seeds:
        for name, case in cases(program, sizes, seed):
            began = time.monotonic()
            reason = attention.why_wrong(emulator, program, case, seed)
            all_right &= reason is None
            verdict = f"WRONG: {reason}" if reason else "right"
            print(f"  {name} seed {seed}, {time.monotonic() - began:.1f} s: {verdict}", flush=True)
    return all_right


def list_survivors(emulator: Any, program: Any, sizes: list[Sizes], seeds: range) -> None:
    """Print the mutants that are right in all cases and orders, and how many were not."""
    from concurrent.futures import ThreadPoolExecutor

    from emulator import attention

    from fa2tvm.device import usable_cores

    names = emulator.mutants(program)
    all_cases = [(seed, case) for seed in seeds for _, case in cases(program, sizes, seed)]

    def is_found(mutant: int) -> bool:
        one = dataclasses.replace(program, mutant=mutant)
        return any(attention.why_wrong(emulator, one, case, seed) for seed, case in all_cases)

    with ThreadPoolExecutor(usable_cores()) as threads:
        found = list(threads.map(is_found, range(len(names))))
    for name in (name for name, is_one in zip(names, found, strict=True) if not is_one):
        print(f"  not noticed without {name}")
    print(f"  {sum(found)} of {len(names)} mutants are found", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("programs", nargs="+", metavar="PROGRAM")
    parser.add_argument(
        "--sizes",
        action="append",
        type=lambda text: tuple(int(n) for n in text.split(",")),
        help="batch,heads,key heads,queries,keys; may be repeated",
    )
    parser.add_argument("--seeds", type=int, default=1, help="adversarial orders of each case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--mutants", action="store_true", help="leave out each synchronisation")
    args = parser.parse_args()

    from emulator import toolchain
    from emulator.processes import Emulator

    from fa2tvm.errors import Fa2tvmError

    if reason := toolchain.why_not():
        print(reason)
        return 1
    sizes = args.sizes or list(SIZES)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with Emulator() as emulator:
        programs = {spec: parse(spec) for spec in args.programs}
        if not args.mutants:
            for program in programs.values():
                emulator.build(program)
        failed = False
        for spec, program in programs.items():
            print(f"{spec}: {program.schedule}", flush=True)
            try:
                if args.mutants:
                    list_survivors(emulator, program, sizes, seeds)
                else:
                    failed |= not check(emulator, program, sizes, seeds)
            except Fa2tvmError as error:
                print(f"  REFUSED: {error}")
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
