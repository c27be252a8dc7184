"""A training step through fa2tvm.attention beside its peers: forward and backward, peak memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hopper_forward import SWEEP, provenance
from hopper_peers import Timer

import fa2tvm
from fa2tvm.bench import packages
from fa2tvm.problem import Shape, Variant

HEAD_DIMS = (64, 128, 256)
# The shape whose step may take at most this much more memory than FlashAttention-2's in SDPA.
MEMORY_SHAPE, MEMORY_BAR = Shape(1, 16, 16, 16384, 16384), 1.05


def sdpa(backend):
    """F.sdpa on one backend, in (batch, seq, heads, dim)."""

    def attention(q, k, v, causal):
        with torch.nn.attention.sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
            )
        return out.transpose(1, 2)

    return attention


def contenders(fa3: bool):
    """(name, attention of q, k, v, causal)."""
    backends = torch.nn.attention.SDPBackend
    yield "fa2tvm", lambda q, k, v, causal: fa2tvm.attention(q, k, v, causal=causal)
    yield "sdpa-flash", sdpa(backends.FLASH_ATTENTION)
    yield "sdpa-cudnn", sdpa(backends.CUDNN_ATTENTION)
    if fa3:
        yield (
            "flash-attn-3",
            lambda q, k, v, causal: packages._Fa3Operators(causal)(q, k, v),
        )


def leaves(shape: Shape, d: int):
    """Q, K, V that need gradients, and dO."""
    size = (shape.batch, shape.seq_q, shape.heads_q, d)
    q, k, v, dout = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


def step(attention, inputs, dout, causal):
    """Forward and backward of one call."""
    torch.autograd.grad(attention(*inputs, causal), inputs, dout)


def peak_bytes(attention, shape: Shape, d: int, causal: bool) -> int:
    """Bytes beyond the inputs that a step has allocated at most."""
    inputs, dout = leaves(shape, d)
    step(attention, inputs, dout, causal)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(attention, inputs, dout, causal)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(pack: Path, fa3: bool, out: Path, repeats: int) -> None:
    """Write a row for each cell and contender; print ratios to the best peer."""
    fa2tvm.use_pack(pack, trust=True)
    run, timer = provenance(), Timer()
    with out.open("a") as log:
        for causal in (False, True):
            measured = {
                name: peak_bytes(attention, MEMORY_SHAPE, 128, causal)
                for name, attention in contenders(fa3)
            }
            ratio = measured["fa2tvm"] / measured["sdpa-flash"]
            print(f"peak memory, causal {causal}: {measured}, {ratio:.3f} (bar {MEMORY_BAR})")
            for name, size in measured.items():
                row = {"peer": name, "what": "peak_bytes", "causal": causal, "peak_bytes": size}
                log.write(json.dumps(row | MEMORY_SHAPE.to_dict() | {"run": run}) + "\n")
        for d in HEAD_DIMS:
            for causal in (False, True):
                for batch, seq in SWEEP:
                    heads = 2048 // d
                    shape = Shape(batch, heads, heads, seq, seq)
                    for row in cell(timer, shape, d, causal, fa3, repeats):
                        log.write(json.dumps(row | {"run": run}) + "\n")
                    log.flush()


def cell(timer, shape: Shape, d: int, causal: bool, fa3: bool, repeats: int):
    """Rows of forward and backward together at one shape, in two rounds."""
    inputs, dout = leaves(shape, d)
    peers = list(contenders(fa3))
    times = {name: [] for name, _ in peers}
    for _ in range(2):
        for name, attention in peers:
            times[name] += timer.burst(
                lambda attention=attention: step(attention, inputs, dout, causal), repeats
            )
    medians = {name: sorted(all_)[len(all_) // 2] for name, all_ in times.items()}
    best = min(us for name, us in medians.items() if name != "fa2tvm")
    print(f"both d{d} causal {causal} {shape.batch}x{shape.seq_q}: {best / medians['fa2tvm']:.3f}")
    variant = Variant("backward", "bfloat16", d, d, causal)
    for name, us in medians.items():
        yield {
            "peer": name,
            "pass": "both",
            "mode": "burst",
            **variant.to_dict(),
            **shape.to_dict(),
            "us_p50": round(us, 2),
        }
