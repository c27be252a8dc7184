"""Hopper forward modules of a folder: loading, their inputs and outputs, and what is right."""

from __future__ import annotations

import ctypes
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm_ffi

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fa2tvm.problem import Variant

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


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


def each_variant_alone(folder: Path, names: list[str]) -> int | None:
    """Run this script again for the modules of each variant; None where there is only one.

    A fault poisons its process: the other variants are still measured.
    """
    variants: dict[str, list[str]] = {}
    for name in names:
        meta = json.loads((folder / f"{name}.json").read_text())
        variants.setdefault(json.dumps(meta["variant"]), []).append(name)
    if len(variants) < 2:
        return None
    return max(
        subprocess.run(
            [sys.executable, *sys.argv, "--names", ",".join(group)], check=False
        ).returncode
        for group in variants.values()
    )
