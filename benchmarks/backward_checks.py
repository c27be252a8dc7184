"""What hopper_backward.py loads and checks: modules of the Hopper backward against float64."""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm_ffi
from hopper_checks import CHECKS
from hopper_modules import DTYPES, relative_error

from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import Sm90Backward

GRADIENTS = ("dq", "dk", "dv")


@dataclass
class Module:
    """A loaded module with its manifest."""

    name: str
    variant: Variant
    schedule: Sm90Backward
    function: object

    def floats(self, q, k) -> int:
        """Size of the workspace."""
        shape = Shape(q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1])
        return self.schedule.workspace_floats(Problem(self.variant, shape), 1)

    def __call__(self, case, results, workspace, scale, offset, dlse=None, needs=(1, 1, 1)):
        """Launch the kernels on the current stream."""
        q, k, v, out, lse, dout = case
        has_dlse = int(dlse is not None)
        self.function(
            q, k, v, out, lse, dout, lse if dlse is None else dlse, *results, workspace, scale,
            offset, has_dlse, *needs, 1,
        )  # fmt: skip


def load_modules(folder: Path, lib: Path) -> list[Module]:
    """Every module of a folder, the runtime libraries first."""
    ctypes.CDLL(str(lib / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(lib / "libtvm_runtime_cuda.so"))
    found = []
    for manifest in sorted(folder.glob("*.json")):
        meta = json.loads(manifest.read_text())
        function = tvm_ffi.load_module(str(manifest.with_suffix(".so")))["backward"]
        schedule = Sm90Backward(**meta["schedule"])
        found.append(Module(manifest.stem, Variant(**meta["variant"]), schedule, function))
    return found


def visible(q, k, causal, offset):
    """Which keys each query sees."""
    if not causal:
        return torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    return torch.arange(k.shape[1], device=q.device)[None] <= i + offset


def forward(q, k, v, scale, causal, offset):
    """O in the inputs' dtype and LSE in float32, rounded once from float64."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.transpose(-1, -2) * scale
    s.masked_fill_(~visible(q.transpose(1, 2), k.transpose(1, 2), causal, offset), -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    return (p @ v).transpose(1, 2), lse


def reference(case, scale, causal, offset, dlse=None, rounded=None):
    """dQ, dK, dV in float64; with `rounded`, P and dS are rounded to that dtype on the way.

    O comes from the case as it is stored: what a backward is given.
    """
    q, k, v, out, _, dout = case
    group = q.shape[2] // k.shape[2]
    _, lse = forward(q, k, v, scale, causal, offset)
    qd, kd, vd, od, dod = (x.double().transpose(1, 2) for x in (q, k, v, out, dout))
    kd, vd = kd.repeat_interleave(group, 1), vd.repeat_interleave(group, 1)
    s = qd @ kd.transpose(-1, -2) * scale
    s.masked_fill_(~visible(q, k, causal, offset), -math.inf)
    p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
    rows = (od * dod).sum(-1) - (0.0 if dlse is None else dlse.double())
    ds = p * (dod @ vd.transpose(-1, -2) - rows[..., None])
    if rounded is not None:
        p, ds = p.to(rounded).double(), ds.to(rounded).double()

    def of_group(x):
        return x.unflatten(1, (-1, group)).sum(2).transpose(1, 2)

    dq = (ds @ kd).transpose(1, 2) * scale
    dk, dv = of_group(ds.transpose(-1, -2) @ qd) * scale, of_group(p.transpose(-1, -2) @ dod)
    grads = (dq, dk, dv)
    return grads if rounded is None else tuple(g.to(rounded).double() for g in grads)


def inputs(variant: Variant, batch, heads_q, heads_kv, seq_q, seq_kv, amplitude=1.0):
    """Fresh N(0, amplitude) Q and K, N(0, 1) V and dO in (batch, seq, heads, dim)."""
    dtype, d, dv = DTYPES[variant.dtype], variant.head_dim_qk, variant.head_dim_v

    def fresh(seq, heads, dim):
        return torch.randn(batch, seq, heads, dim, device="cuda", dtype=dtype)

    q, k = fresh(seq_q, heads_q, d) * amplitude, fresh(seq_kv, heads_kv, d) * amplitude
    return q, k, fresh(seq_kv, heads_kv, dv), fresh(seq_q, heads_q, dv)


def case_of(variant, q, k, v, dout, scale, offset):
    """What a backward is given."""
    out, lse = forward(q, k, v, scale, variant.causal, offset)
    return q, k, v, out.to(q.dtype), lse.float(), dout


def outputs(module: Module, q, k, v):
    """Poisoned gradients and workspace."""
    results = [torch.full(x.shape, math.nan, device="cuda", dtype=x.dtype) for x in (q, k, v)]
    return results, torch.full((module.floats(q, k),), math.nan, device="cuda")


def compare(module: Module, tensors, scale, offset, dlse=None) -> str | None:
    """Why a call is wrong, or None: twice the error of plain float64 with P and dS rounded."""
    variant = module.variant
    case = case_of(variant, *tensors, scale, offset)
    results, workspace = outputs(module, *case[:3])
    module(case, results, workspace, scale, offset, dlse)
    torch.cuda.synchronize()
    want = reference(case, scale, variant.causal, offset, dlse)
    plain = reference(case, scale, variant.causal, offset, dlse, case[0].dtype)
    q, k, v, _, _, dout = (x.double() for x in case)
    sums = dout.norm(dim=-1).amax() * v.norm(dim=-1).amax() * abs(scale) * 2.0**-22
    cancelled = {"dq": sums * k.abs().amax(), "dk": sums * q.abs().amax() * q.shape[1], "dv": 1e-6}
    for name, got, exact, usual in zip(GRADIENTS, results, want, plain, strict=True):
        error = (got.double() - exact).abs()
        # The stored gradient is rounded by eps / 2, in the plain one too, but at another value; and
        # dP - D is a difference of float32 sums, which leaves their rounding where it is exactly 0.
        rounding = torch.finfo(got.dtype).eps / 2 * exact.abs()
        allowed = 2 * (usual - exact).abs().amax() + rounding + cancelled[name]
        if not bool((error <= allowed).all()):
            bad = (~(error <= allowed)).nonzero()
            return (
                f"{name} is off by {error.max().item():.2e} (plain "
                f"{(usual - exact).abs().max().item():.2e}) in {len(bad)} elements, "
                f"first {bad[0].tolist()}"
            )
        ours, its = relative_error(got, exact), relative_error(usual, exact)
        if exact.norm() > 0 and not ours <= 1.5 * its + 1e-6:
            return f"relative error of {name} is {ours:.2e}, plain {its:.2e}"
    return None


def odd_layouts(variant: Variant):
    """Views that must not be copied: BHSD storage, packed slices, steps, expanded, size 1."""
    dtype, d, dv = DTYPES[variant.dtype], variant.head_dim_qk, variant.head_dim_v

    def fresh(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    yield (
        "bhsd",
        tuple(
            fresh(2, h, s, n).transpose(1, 2)
            for h, s, n in ((4, 150, d), (2, 170, d), (2, 170, dv), (4, 150, dv))
        ),
    )
    packed = fresh(2, 150, 4, 4, max(d, dv) + 8)
    yield "packed", (*(packed[:, :, n, :, 8 * (n > 1) :][..., :d] for n in range(2)),
                     *(packed[:, :, n, :, 8:][..., :dv] for n in (2, 3)))  # fmt: skip
    yield "every second row", (fresh(2, 300, 4, d)[:, ::2], fresh(2, 340, 2, d)[:, 1::2],
                               fresh(2, 170, 2, dv), fresh(2, 300, 4, dv)[:, ::2])  # fmt: skip
    yield "expanded", (fresh(3, 140, 2, d), fresh(1, 150, 2, d).expand(3, -1, -1, -1),
                       fresh(1, 150, 2, dv).expand(3, -1, -1, -1),
                       fresh(1, 1, 1, dv).expand(3, 140, 2, -1))  # fmt: skip


def check(module: Module) -> tuple[int, list[str]]:
    """Run the module over CHECKS and special inputs: cases, and one line for each failure."""
    failures, cases = [], 0
    variant = module.variant
    for sizes in CHECKS:
        offsets = (sizes[4] - sizes[3], 0) if variant.causal else (0,)
        for offset in dict.fromkeys(offsets):
            for amplitude, scale in ((1.0, None), (4.0, 0.3), (1.0, -0.2)):
                cases += 1
                tensors = inputs(variant, *sizes, amplitude)
                scale = scale or 1 / math.sqrt(variant.head_dim_qk)
                dlse = torch.randn(sizes[0], sizes[1], sizes[3], device="cuda")
                problem = compare(module, tensors, scale, offset, dlse if cases % 2 else None)
                if problem:
                    failures.append(
                        f"{module.name} {sizes} offset {offset} amplitude {amplitude}: {problem}"
                    )
    for label, tensors in odd_layouts(variant):
        cases += 1
        problem = compare(module, tensors, 0.125, tensors[1].shape[1] - tensors[0].shape[1])
        if problem:
            failures.append(f"{module.name} {label}: {problem}")
    failures += [f"{module.name} {problem}" for problem in check_repeats(module)]
    failures += [f"{module.name} {problem}" for problem in check_needs(module)]
    failures += [f"{module.name} {problem}" for problem in check_behind_end(module)]
    return cases + 3, failures


def check_repeats(module: Module):
    """Bitwise equal over runs: dK and dV, and dQ where that was asked."""
    tensors = inputs(module.variant, 2, 8, 4, 700, 900)
    case = case_of(module.variant, *tensors, 0.1, 200)
    runs = []
    for _ in range(10):
        results, workspace = outputs(module, *case[:3])
        module(case, results, workspace, 0.1, 200)
        runs.append(results)
    exact = GRADIENTS if getattr(module.schedule, "deterministic", False) else GRADIENTS[1:]
    for n, name in enumerate(GRADIENTS):
        if name in exact and not all(torch.equal(run[n], runs[0][n]) for run in runs):
            yield f"{name} differs between runs"


def check_needs(module: Module):
    """A gradient that is not needed stays untouched, the others are the same."""
    tensors = inputs(module.variant, 1, 4, 2, 200, 333)
    case = case_of(module.variant, *tensors, 0.1, 133)
    whole, workspace = outputs(module, *case[:3])
    module(case, whole, workspace, 0.1, 133)
    for needs in ((0, 1, 1), (1, 0, 0), (0, 0, 1), (1, 1, 0)):
        results, workspace = outputs(module, *case[:3])
        module(case, results, workspace, 0.1, 133, None, needs)
        for name, needed, got, want in zip(GRADIENTS, needs, results, whole, strict=True):
            if not needed and not bool(got.isnan().all()):
                yield f"needs {needs}: {name} is written"
            if needed and not relative_error(got, want) < 1e-3:
                yield f"needs {needs}: {name} differs"


def check_behind_end(module: Module):
    """Logits far below 0 make P of zero-filled keys overflow: nothing of it may reach dQ."""
    variant = module.variant
    q, k, v, dout = inputs(variant, 1, 2, 2, 130, 70)
    q, k = q.abs() + 1, -k.abs() - 1
    scale = 1.0
    problem = compare(module, (q, k, v, dout), scale, 70 - 130)
    if problem:
        yield f"keys behind the end, logits about {-3.2 * variant.head_dim_qk}: {problem}"


def check_large(module: Module) -> str | None:
    """Why a call on more than 2^31 elements is wrong in its last rows, or None.

    Q, K, V, dO are views of one batch entry's storage, so that memory holds them; the gradients are
    written in full. A batch entry is compared with the same entry alone.
    """
    variant = module.variant
    heads, seq = 16, 1024
    batch = 2**31 // (heads * seq * variant.head_dim_qk) + 2
    case = case_of(variant, *inputs(variant, 1, heads, heads, seq, seq), 0.1, 0)
    results, workspace = outputs(module, *case[:3])
    module(case, results, workspace, 0.1, 0)
    many = tuple(x.expand(batch, *x.shape[1:]) for x in case)
    many = (*many[:4], many[4].contiguous(), many[5])
    grads = [torch.full(x.shape, math.nan, device="cuda", dtype=x.dtype) for x in many[:3]]
    workspace = torch.full((module.floats(*many[:2]),), math.nan, device="cuda")
    module(many, grads, workspace, 0.1, 0)
    torch.cuda.synchronize()
    for name, got, want in zip(GRADIENTS, grads, results, strict=True):
        for entry in (0, batch - 1):
            error = relative_error(got[entry], want[0])
            if not error < 1e-3:
                return f"{name} of entry {entry} of {batch}: {error:.2e} from the entry alone"
    return None
