"""Hopper backward: every module of a folder checked against float64, then timed beside its peers.

    python benchmarks/hopper_build.py DIR $(python benchmarks/hopper_backward.py --specs)
    python benchmarks/hopper_backward.py DIR --lib LIB [--fa3 FA3_DIR] [--out ROWS.jsonl]

The first line builds the default and the candidates of each head dim, on a machine with a compiler.
DIR holds NAME.so and NAME.json (variant, schedule, ptxas report); LIB holds libtvm_runtime.so and
libtvm_runtime_cuda.so. The second needs torch and apache-tvm-ffi, no compiler. Burst and sustained
as in hopper_forward.py; a peer's preparing and converting kernels count, as ours do.

    --needs 0,1,1       what a subset costs; against all three: what dQ costs
    --only det          modules with a word in their names (with --deterministic: FlashAttention-3's
                        deterministic mode as a peer)
    --large             more than 2^31 elements, instead of the usual checks
    --training PACK     through fa2tvm.attention, with the modules of a pack (tests/gpu_pack.py):
                        forward and backward, peak memory of a step, against F.sdpa and FA-3
    --dry               loads nothing, lists modules, cells and flags; needs no GPU
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import backward_training as training
import torch
from backward_checks import GRADIENTS, Module, check, check_large, inputs, load_modules, reference
from hopper_forward import SWEEP, provenance
from hopper_modules import relative_error
from hopper_peers import FA3_HEAD_DIMS, Timer, load_fa3

from fa2tvm.problem import Shape, Variant
from fa2tvm.schedule import Sm90Backward

# Twice what autograd takes to launch a peer's backward: no call cost shows.
SPIN_CYCLES = 400_000
# What to build: default (the first hand-picked schedule) and candidates; sm90_bwd.md says why.
CANDIDATES = {
    64: ("", "early_dv=False,halves=False,early_dk=False", "block_q=112", "deterministic=True"),
    128: ("", "early_dk=False", "bulk_dq=False", "deterministic=True"),
    256: ("", "block_kv=64,do_stages=2", "deterministic=True"),
}


def specs():
    """Arguments for hopper_build.py."""
    for d, candidates in CANDIDATES.items():
        for causal in (False, True):
            for n, fields in enumerate(candidates):
                kind = "det" if "deterministic" in fields else n or "default"
                name = f"d{d}{'c' if causal else ''}_{kind}"
                spec = f"{name}=pass_='backward',d={d},causal={causal}"
                yield spec + (f",{fields}" if fields else "")


def peers(variant: Variant, q, k, v, dout, scale, fa3: bool, deterministic: bool):
    """(name, callable that gives dQ, dK, dV, reason why it is absent) of each peer."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    d, dv = variant.head_dim_qk, variant.head_dim_v
    if not fa3:
        yield "flash-attn-3", None, "no library of it was given (--fa3)"
    elif variant.dtype != "bfloat16" or d != dv or d not in FA3_HEAD_DIMS:
        yield "flash-attn-3", None, "the library that was given lacks this dtype or head dim"
    else:
        out, lse = torch.ops.flash_attn_3.fwd(
            q, k, v, *[None] * 20, scale, variant.causal, -1, -1, 0, 0.0, True, None, 1, None, 0
        )[:2]

        def run_fa3():
            return torch.ops.flash_attn_3.bwd(
                dout, q, k, v, out, lse, *[None] * 9, scale, variant.causal
            )[:3]

        def run_fa3_in_order():
            return torch.ops.flash_attn_3.bwd(
                dout, q, k, v, out, lse, softmax_scale=scale, is_causal=variant.causal,
                deterministic=True,
            )[:3]  # fmt: skip

        yield "flash-attn-3", run_fa3, None
        if deterministic:
            absent = "not deterministic at head dim 256" if d == 256 else None
            yield "flash-attn-3 deterministic", run_fa3_in_order, absent
    yield from flash_attention_4(variant, q, k, v, dout, scale)
    backends = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
        try:
            with sdpa_kernel(backend):
                result = torch.nn.functional.scaled_dot_product_attention(
                    *leaves,
                    is_causal=variant.causal,
                    scale=scale,
                    enable_gqa=q.shape[2] != k.shape[2],
                )
        except RuntimeError as error:
            yield name, None, str(error).splitlines()[0][:200]
            continue

        def run(result=result, leaves=leaves):
            grads = torch.autograd.grad(result, leaves, dout.transpose(1, 2), retain_graph=True)
            return [g.transpose(1, 2) for g in grads]

        yield name, run, None


def flash_attention_4(variant: Variant, q, k, v, dout, scale):
    """FlashAttention-4's sm_90 path, where its package is."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as error:
        yield "flash-attn-4", None, f"{error}"[:200]
        return
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = flash_attn_func(*leaves, softmax_scale=scale, causal=variant.causal)
    result = result[0] if isinstance(result, tuple) else result

    def run():
        return torch.autograd.grad(result, leaves, dout, retain_graph=True)

    yield "flash-attn-4", run, None


def row(peer, variant: Variant, shape: Shape, mode, times, run, **extra) -> dict:
    """One measurement in the format of benchmarks/<device>/<what>.jsonl."""
    # The convention of the peers' papers: a causal problem is exactly half of a dense one.
    flops = 2 * (3 * variant.head_dim_qk + 2 * variant.head_dim_v) * shape.seq_q * shape.seq_kv
    flops = flops * shape.batch * shape.heads_q // (2 if variant.causal else 1)
    p20, p50, p80 = (
        round(times[int(f * (len(times) - 1))], 2) if times else None for f in (0.2, 0.5, 0.8)
    )
    return {
        "peer": peer,
        "family": "sm90" if peer.startswith("fa2tvm") else None,
        "pass": "backward",
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


def errors_of(grads, case, variant, scale, offset) -> list[float]:
    """Relative errors of dQ, dK, dV of the first batch entry's first key head."""
    q, k, v, out, lse, dout = case
    group = q.shape[2] // k.shape[2]
    part = tuple(x[:1, :, :n] for x, n in ((q, group), (k, 1), (v, 1), (out, group)))
    part = (*part, lse[:1, :group], dout[:1, :, :group])
    want = reference(part, scale, variant.causal, offset)
    return [
        relative_error(got[:1, :, : exact.shape[2]], exact)
        for got, exact in zip(grads, want, strict=True)
    ]


def burst(timer: Timer, run, repeats: int) -> list[float]:
    """Sorted times in microseconds, each with a cold L2 and the CPU ahead."""
    for _ in range(2):
        run()
    pairs = []
    for _ in range(repeats):
        timer.flush.fill_(1)
        torch.cuda._sleep(SPIN_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return sorted(s.elapsed_time(e) * 1e3 for s, e in pairs)


def measure_cell(
    timer, modules, variant, shape, mode, fa3, run, args, needs=(1, 1, 1), deterministic=False
):
    """Rows of all modules of a variant and of the peers at one shape, interleaved in two rounds."""
    s = shape
    q, k, v, dout = inputs(variant, s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv)
    scale, offset = 1 / math.sqrt(variant.head_dim_qk), s.seq_kv - s.seq_q
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *(x if x.shape[1] == s.heads_q else x.repeat_interleave(s.group, 1)
              for x in heads_first), 0.0, variant.causal, scale=scale,
        )[:2]  # fmt: skip
    case = (q, k, v, out.transpose(1, 2), lse, dout)
    results = [torch.empty_like(x) for x in (q, k, v)]
    floats = max((m.floats(q, k) for m in modules), default=1)
    scratch = torch.full((floats,), math.nan, device="cuda")

    def ours(module):
        module(case, results, scratch[: module.floats(q, k)], scale, offset, None, needs)
        return results

    contenders = [("fa2tvm", m, lambda m=m: ours(m), None) for m in modules]
    if not args.no_peers:
        contenders += [
            (name, None, call, reason)
            for name, call, reason in peers(variant, q, k, v, dout, scale, fa3, deterministic)
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
                if turn == 0 and s.seq_q <= 4096 and all(needs):
                    wrong[n] = errors_of(call(), case, variant, scale, offset)
                    if not max(wrong[n]) < 2e-2:
                        errors[n] = f"relative errors {wrong[n]}"
                        continue
                if mode == "burst":
                    times[n] += burst(timer, call, args.repeats)
                else:
                    times[n] += timer.sustained(call, 1.2)
            except RuntimeError as error:
                errors[n] = str(error).splitlines()[0][:200]
    rows = []
    for (peer, module, *_), measured, error, rel_err in zip(
        contenders, times, errors, wrong, strict=True
    ):
        extra = {
            "needs": list(needs),
            "rel_err": max(rel_err) if rel_err else None,
            "error": error,
        }
        extra |= {f"rel_err_{name}": e for name, e in zip(GRADIENTS, rel_err or (), strict=False)}
        if module is not None:
            extra |= {"module": module.name, "schedule": module.schedule.to_dict()}
        rows.append(row(peer, variant, shape, mode, sorted(measured), run, **extra))
    return rows


def cells_of(kinds, heads):
    """(batch, seq_q, seq_kv, heads_q, heads_kv, mode) of each cell."""
    for kind in kinds:
        if kind == "burst":
            yield from ((batch, seq, seq, heads, heads, "burst") for batch, seq in SWEEP)
        elif kind == "gqa":
            yield 2, 8192, 8192, 32, 8, "burst"
        elif kind == "sustained":
            yield 1, 16384, 16384, heads, heads, "sustained"
        else:
            batch, _, seq = kind.partition("x")
            yield int(batch), int(seq), int(seq), heads, heads, "burst"


def print_cell(rows):
    """The best of ours, its ratio to the best peer, then everyone's TFLOP/s and largest error."""
    r = rows[0]
    ours = [x["tflops"] for x in rows if x["peer"] == "fa2tvm" and not x["error"]]
    others = [x["tflops"] for x in rows if x["peer"] != "fa2tvm" and not x["error"]]
    best, bar = max(ours, default=math.nan), max(others, default=math.nan)
    print(
        f"{r['dtype'][:4]} d{r['head_dim']}/{r['head_dim_v']} "
        f"{'causal' if r['causal'] else 'dense '} {r['batch']}x{r['seq_q']} {r['mode'][:5]}: "
        f"{best:.0f} / {bar:.0f} = {best / bar:.3f} |",
        *(
            f"{x.get('module', x['peer'])} "
            + (x["error"][:60] if x["error"] else f"{x['tflops']:.0f}")
            + (f" ({x['rel_err']:.2e})" if x["rel_err"] else "")
            for x in rows
        ),
        flush=True,
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("modules", type=Path, nargs="?")
    parser.add_argument("--specs", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--lib", type=Path)
    parser.add_argument("--fa3", type=Path, help="folder of fa3/_C.so and libcudart.so.12")
    parser.add_argument("--out", type=Path, default=Path("hopper_backward.jsonl"))
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--training", type=Path, metavar="PACK")
    parser.add_argument("--needs", default="1,1,1", type=three_flags)
    parser.add_argument(
        "--cells",
        default="burst",
        help="of burst (the sweep), sustained (1x16384), gqa (32/8, 2x8192), or BATCHxSEQ",
    )
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="", help="modules whose name contains this")
    args = parser.parse_args()
    if not args.specs and not args.training and args.modules is None:
        parser.error("name the folder of modules, or --specs, or --training")
    if args.modules and not args.dry and args.lib is None:
        parser.error("--lib is needed to load modules")
    list(cells_of(args.cells.split(","), 1))
    return args


def three_flags(text: str) -> tuple[int, ...]:
    """Which of dQ, dK, dV are needed."""
    flags = tuple(int(flag) for flag in text.split(","))
    if len(flags) != 3 or not set(flags) <= {0, 1}:
        raise argparse.ArgumentTypeError("three of 0 and 1")
    return flags


def checked(modules, args):
    """The modules that are right; one line for each."""
    for module in modules:
        if args.large:
            problem = check_large(module)
            cases, failures = 1, [problem] if problem else []
        else:
            cases, failures = check(module)
        print(
            f"check {module.name}: {cases} cases, {len(failures)} failures",
            *failures[:4],
            sep="\n   ",
            flush=True,
        )
        if not failures:
            yield module


def measure(modules, args) -> None:
    """Rows of every cell of the modules' variants."""
    run, timer, fa3 = provenance(), Timer(), load_fa3(args.fa3)
    with args.out.open("a") as log:
        for variant in dict.fromkeys(m.variant for m in modules):
            group = [m for m in modules if m.variant == variant]
            heads = max(1, 2048 // variant.head_dim_qk)
            for batch, seq_q, seq_kv, heads_q, heads_kv, mode in cells_of(
                args.cells.split(","), heads
            ):
                shape = Shape(batch, heads_q, heads_kv, seq_q, seq_kv)
                rows = measure_cell(
                    timer, group, variant, shape, mode, fa3, run, args, args.needs,
                    args.deterministic,
                )  # fmt: skip
                for r in rows:
                    log.write(json.dumps(r) + "\n")
                log.flush()
                print_cell(rows)


def dry(args) -> None:
    """What a run would do, from the manifests alone."""
    for manifest in sorted(args.modules.glob("*.json")):
        if args.only in manifest.stem:
            meta = json.loads(manifest.read_text())
            module = Module(
                manifest.stem,
                Variant(**meta["variant"]),
                Sm90Backward(**meta["schedule"]),
                None,
            )
            heads = max(1, 2048 // module.variant.head_dim_qk)
            cells = list(cells_of(args.cells.split(","), heads))
            print(
                module.name, module.variant.name, len(cells), "cells,", manifest.with_suffix(".so")
            )
    print(args)


def main() -> int:
    """Check, measure, write the rows, print the table."""
    args = arguments()
    if args.specs:
        print(*specs(), sep="\n")
        return 0
    if args.dry:
        dry(args)
        return 0
    torch.manual_seed(int(time.time()))
    if args.training:
        training.measure(args.training, load_fa3(args.fa3), args.out, args.repeats)
        return 0
    modules = [m for m in load_modules(args.modules, args.lib) if args.only in m.name]
    sound = modules if args.no_check else list(checked(modules, args))
    if not args.check_only and not args.large:
        measure(sound, args)
    return int(len(sound) < len(modules))


if __name__ == "__main__":
    raise SystemExit(main())
