"""Hopper forward: every module of a folder checked against float64, then timed beside its peers.

    python benchmarks/hopper_forward.py MODULES --lib LIB [--fa3 FA3_DIR] [--out ROWS.jsonl]

MODULES holds NAME.so and NAME.json (variant, schedule, ptxas report) from hopper_build.py;
LIB holds libtvm_runtime.so and libtvm_runtime_cuda.so. Needs torch and apache-tvm-ffi, no compiler.
Burst: CUDA events, median of the repeats; before each the L2 is flushed by a 256 MB write and a
spin kernel lets the CPU get ahead. Sustained: back to back for two seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm_ffi

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm.problem import Problem, Shape, Variant

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# What pack_fa3.py keeps of FlashAttention-3; calling another kernel of it ends the process.
FA3_HEAD_DIMS = (64, 128, 256)
# (batch, seq) at 16384 tokens; heads so that heads * head_dim = 2048.
SWEEP = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
# (batch, heads_q, heads_kv, seq_q, seq_kv): tails, one row, one key, GQA, more keys than queries
# and the reverse (rows that see nothing), several tiles a thread block.
CHECKS = (
    (1, 1, 1, 1, 1),
    (2, 3, 3, 1, 77),
    (1, 2, 1, 63, 65),
    (2, 4, 2, 129, 127),
    (1, 6, 2, 257, 300),
    (1, 2, 2, 300, 130),
    (3, 4, 1, 200, 1),
    (1, 8, 8, 515, 1027),
    (2, 16, 4, 1024, 1024),
    (4, 24, 24, 640, 641),
)


@dataclass
class Module:
    """A loaded module with its manifest."""

    name: str
    variant: Variant
    schedule: dict
    function: object

    def __call__(self, q, k, v, out, lse, workspace, scale, causal_offset):
        """Launch the kernel on the current stream."""
        self.function(q, k, v, out, lse, workspace, scale, causal_offset)


def load_modules(folder: Path, lib: Path) -> list[Module]:
    """Every module of a folder, the runtime libraries first."""
    ctypes.CDLL(str(lib / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(lib / "libtvm_runtime_cuda.so"))
    found = []
    for manifest in sorted(folder.glob("*.json")):
        meta = json.loads(manifest.read_text())
        function = tvm_ffi.load_module(str(manifest.with_suffix(".so")))["forward"]
        found.append(Module(manifest.stem, Variant(**meta["variant"]), meta["schedule"], function))
    return found


def inputs(variant: Variant, batch, heads_q, heads_kv, seq_q, seq_kv, amplitude=1.0):
    """Fresh N(0, amplitude) tensors in (batch, seq, heads, dim)."""
    dtype = DTYPES[variant.dtype]
    q = (
        torch.randn(batch, seq_q, heads_q, variant.head_dim_qk, device="cuda", dtype=dtype)
        * amplitude
    )
    k = (
        torch.randn(batch, seq_kv, heads_kv, variant.head_dim_qk, device="cuda", dtype=dtype)
        * amplitude
    )
    v = torch.randn(batch, seq_kv, heads_kv, variant.head_dim_v, device="cuda", dtype=dtype)
    return q, k, v


def outputs(variant: Variant, q):
    """Poisoned O and LSE, and a zero tile counter."""
    batch, seq_q, heads_q, _ = q.shape
    out = torch.full(
        (batch, seq_q, heads_q, variant.head_dim_v), float("nan"), device="cuda", dtype=q.dtype
    )
    lse = torch.full((batch, heads_q, seq_q), float("nan"), device="cuda", dtype=torch.float32)
    return out, lse, torch.zeros(1, dtype=torch.int32, device="cuda")


def reference(q, k, v, scale, causal, offset, dtype=torch.float64):
    """O and LSE of plain attention in `dtype`; P is rounded to it before P V."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.transpose(-1, -2)).to(torch.float64) * scale
    if causal:
        i = torch.arange(s.shape[-2], device=s.device)[:, None]
        s.masked_fill_(torch.arange(s.shape[-1], device=s.device)[None] > i + offset, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (p.to(dtype) @ v).transpose(1, 2), lse


def relative_error(got, want) -> float:
    """Norm of the difference over the norm of the reference; NaN never passes."""
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def check(module: Module) -> tuple[int, list[str]]:
    """Run the module over CHECKS and special inputs: cases, and one line for each failure."""
    failures, cases = [], 0
    variant = module.variant
    for sizes in CHECKS:
        offsets = (sizes[4] - sizes[3], 0) if variant.causal else (0,)
        for offset in dict.fromkeys(offsets):
            for amplitude, scale in ((1.0, None), (8.0, 0.3)):
                cases += 1
                q, k, v = inputs(variant, *sizes, amplitude)
                scale = scale or 1 / math.sqrt(variant.head_dim_qk)
                problem = compare(module, q, k, v, scale, offset)
                if problem:
                    failures.append(
                        f"{module.name} {sizes} offset {offset} amplitude {amplitude}: {problem}"
                    )
    for label, q, k, v in odd_layouts(variant):
        cases += 1
        problem = compare(module, q, k, v, 0.125, k.shape[1] - q.shape[1])
        if problem:
            failures.append(f"{module.name} {label}: {problem}")
    for problem in check_nan(module):
        failures.append(f"{module.name} {problem}")
    return cases + 2, failures


def compare(module: Module, q, k, v, scale, offset) -> str | None:
    """Why a call is wrong, or None: twice the error of a plain implementation, every row."""
    out, lse, workspace = outputs(module.variant, q)
    module(q, k, v, out, lse, workspace, scale, offset)
    torch.cuda.synchronize()
    want, want_lse = reference(q, k, v, scale, module.variant.causal, offset)
    plain, _ = reference(q, k, v, scale, module.variant.causal, offset, q.dtype)
    if workspace.item():
        return f"counter left at {workspace.item()}"
    if not torch.equal(lse == -math.inf, want_lse == -math.inf):
        return "LSE is -inf in other rows"
    seen = want_lse > -math.inf
    gap = (lse.double() - want_lse)[seen].abs()
    if gap.numel() and not gap.max().item() <= 1e-4 + 3e-6 * want_lse[seen].abs().max().item():
        return f"LSE is off by {gap.max().item():.2e}"
    error = (out.double() - want).abs().amax(-1)
    # Storing O rounds it by eps / 2, in the plain implementation too, but there at another value.
    rounding = torch.finfo(out.dtype).eps / 2 * want.abs().amax(-1)
    allowed = 2 * (plain.double() - want).abs().amax() + 1e-5 + rounding
    if not bool((error <= allowed).all()):
        bad = (~(error <= allowed)).nonzero()
        return f"O is off by {error.max().item():.2e} in {len(bad)} rows, first {bad[0].tolist()}"
    if not relative_error(out, want) <= 2 * relative_error(plain, want) + 1e-6:
        ours, its = relative_error(out, want), relative_error(plain, want)
        return f"relative error {ours:.2e}, plain {its:.2e}"
    return None


def odd_layouts(variant: Variant):
    """Views that must not be copied: BHSD storage, packed slices, steps, expanded, size 1."""
    dtype, d, dv = DTYPES[variant.dtype], variant.head_dim_qk, variant.head_dim_v

    def fresh(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    q, k, v = fresh(2, 4, 150, d), fresh(2, 2, 170, d), fresh(2, 2, 170, dv)
    yield "bhsd", q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    packed = fresh(2, 150, 3, 4, max(d, dv) + 8)
    yield "packed", packed[:, :, 0, :, :d], packed[:, :, 1, :, :d], packed[:, :, 2, :, 8 : 8 + dv]
    yield (
        "every second row",
        fresh(2, 300, 4, d)[:, ::2],
        fresh(2, 340, 2, d)[:, 1::2],
        fresh(2, 170, 2, dv),
    )
    yield (
        "expanded batch",
        fresh(3, 140, 2, d),
        fresh(1, 150, 2, d).expand(3, -1, -1, -1),
        fresh(1, 150, 2, dv).expand(3, -1, -1, -1),
    )
    one = fresh(1, 140, 1, d).as_strided((1, 140, 1, d), (7, d, 3, 1))
    yield "size-1 strides", one, fresh(1, 150, 1, d), fresh(1, 150, 1, dv)


def check_nan(module: Module):
    """A NaN in a key reaches every row that sees it; NaN after the end of K and V reaches none."""
    variant = module.variant
    q, k, v = inputs(variant, 1, 2, 2, 200, 200)
    whole_k, whole_v = inputs(variant, 1, 2, 2, 200, 300)[1:]
    whole_k[:, 200:], whole_v[:, 200:] = float("nan"), float("inf")
    problem = compare(module, q, whole_k[:, :200], whole_v[:, :200], 0.1, 0)
    if problem:
        yield f"NaN behind the end: {problem}"
    k[0, 190, 1] = float("nan")
    out, lse, workspace = outputs(variant, q)
    module(q, k, v, out, lse, workspace, 0.1, 0)
    nan_rows = out[0, :, 1].isnan().any(-1)
    first = 190 if variant.causal else 0
    if not bool(nan_rows[first:].all()) or bool(
        nan_rows[:first].any() & bool(variant.causal) & (first < 128)
    ):
        yield f"NaN in key 190 reaches rows {nan_rows.nonzero().flatten().tolist()[:3]}.."
    if bool(out[0, :, 0].isnan().any()):
        yield "NaN leaks to another head"


def check_limits(module: Module):
    """What one GPU must show once: long strides, many heads, repeats, streams and graphs."""
    variant, d = module.variant, module.variant.head_dim_qk
    dtype = DTYPES[variant.dtype]
    scale = 1 / math.sqrt(d)
    if d == variant.head_dim_v:
        rows = 2**31 // (3 * 32 * d) + 300
        packed = torch.randn(1, rows, 3, 32, d, device="cuda", dtype=dtype)
        q, k, v = packed[:, -200:, 0], packed[:, -400:, 1], packed[:, -400:, 2]
        yield "offsets past 2**31 in a packed slice", compare(module, q, k, v, scale, 200)
        del packed, q, k, v
    rows = 2**31 // (128 * variant.head_dim_v) + 130
    q = torch.randn(1, rows, 128, d, device="cuda", dtype=dtype)
    _, k, v = inputs(variant, 1, 1, 128, 1, 64)
    out, lse, workspace = outputs(variant, q)
    offset = rows
    module(q, k, v, out, lse, workspace, scale, offset)
    want, _ = reference(q[:, -130:], k, v, scale, False, 0)
    yield "an output past 2**31", None if relative_error(out[:, -130:], want) < 5e-3 else "wrong"
    del q, k, v, out, lse
    torch.cuda.empty_cache()
    yield (
        "more than 65535 heads",
        compare(module, *inputs(variant, 1100, 64, 32, 17, 33), scale, 16),
    )
    for amplitude in (8.0, 1.0):
        # At 8 the logits spread over hundreds of nats: no maximum can be trusted.
        q, k, v = inputs(variant, 2, 40, 8, 1500, 1500, amplitude)
        results = []
        for _ in range(20):
            out, lse, workspace = outputs(variant, q)
            module(q, k, v, out, lse, workspace, scale, 0)
            results.append((out, lse))
        same = all(torch.equal(o, out) and torch.equal(s, lse) for o, s in results)
        yield f"20 runs bitwise equal, amplitude {amplitude}", None if same else "they differ"
    yield "side stream and graph", check_graph(module, q, k, v, scale, out)


def check_graph(module: Module, q, k, v, scale, want) -> str | None:
    """Run behind a slow copy on a side stream, then capture a graph there and replay it."""
    stream = torch.cuda.Stream()
    late = torch.empty_like(q)
    out, lse, workspace = outputs(module.variant, q)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        module(late, k, v, out, lse, workspace, scale, 0)
        first = out.clone()
    stream.synchronize()
    if not torch.equal(first, want):
        return "the side stream is not obeyed"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(late, k, v, out, lse, workspace, scale, 0)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    return None if torch.equal(out, want) else "replays differ"


class Timer:
    """Burst: cold L2, no CPU in the way. Sustained: back to back."""

    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def burst(self, run, repeats):
        """Sorted times in microseconds."""
        for _ in range(2):
            run()
        pairs = []
        for _ in range(repeats):
            self.flush.fill_(1)
            torch.cuda._sleep(100_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return sorted(s.elapsed_time(e) * 1e3 for s, e in pairs)

    def sustained(self, run, seconds):
        """Times of batches of ten calls, the first half second dropped."""
        times, began = [], time.time()
        while time.time() - began < seconds:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                run()
            end.record()
            end.synchronize()
            if time.time() - began > 0.5:
                times.append(start.elapsed_time(end) * 1e2)
        return sorted(times)


def peers(variant: Variant, q, k, v, scale, fa3: bool):
    """(name, callable that gives O, reason why it is absent) of each peer for the inputs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}

    def run_fa3():
        # 20 optional tensors and lengths that plain attention does not use come before the scale.
        return torch.ops.flash_attn_3.fwd(
            q, k, v, *[None] * 20, scale, variant.causal, -1, -1, 0, 0.0, True, None, 1, None, 0
        )[0]

    d, dv = variant.head_dim_qk, variant.head_dim_v
    if not fa3:
        yield "flash-attn-3", None, "no library of it was given (--fa3)"
    elif variant.dtype != "bfloat16" or d != dv or d not in FA3_HEAD_DIMS:
        yield "flash-attn-3", None, "the library that was given lacks this dtype or head dim"
    else:
        yield "flash-attn-3", run_fa3, None
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    for name, backend in backends.items():

        def run(backend=backend):
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *heads_first,
                    is_causal=variant.causal,
                    scale=scale,
                    enable_gqa=q.shape[2] != k.shape[2],
                ).transpose(1, 2)

        yield name, run, None


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
        for n, (_, _, call, _) in enumerate(contenders):
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
        help="of burst (the sweep), sustained (1x16384), gqa (32/8, 2x8192)",
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
            for batch, seq, heads_q, heads_kv, mode in cells_of(args.cells.split(","), heads):
                shape = Shape(batch, heads_q, heads_kv, seq, seq)
                rows = measure_cell(timer, group, variant, shape, mode, fa3, run, args)
                for r in rows:
                    log.write(json.dumps(r) + "\n")
                log.flush()
                print_cell(rows)
    return int(len(sound) < len(modules))


def cells_of(kinds, heads):
    """(batch, seq, heads_q, heads_kv, mode) of each cell."""
    if "burst" in kinds:
        yield from ((batch, seq, heads, heads, "burst") for batch, seq in SWEEP)
    if "gqa" in kinds:
        yield 2, 8192, 32, 8, "burst"
    if "sustained" in kinds:
        yield 1, 16384, heads, heads, "sustained"


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
        f"{r['batch']}x{r['seq_q']} {r['mode'][:5]}: {best:.0f} / {bar:.0f} = {best / bar:.3f} | "
        + " ".join(
            f"{x.get('module', x['peer'])} {x['tflops']:.0f}"
            if not x["error"]
            else f"{x['peer']} {x['error'][:60]}"
            for x in rows
        ),
        flush=True,
    )


def load_fa3(folder: Path | None) -> bool:
    """Register FlashAttention-3's operators, where they are given."""
    if folder is None:
        return False
    ctypes.CDLL(str(folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(folder / "fa3" / "_C.so"))
    return True


if __name__ == "__main__":
    raise SystemExit(main())
