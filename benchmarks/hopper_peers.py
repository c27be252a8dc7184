"""The peers that hopper_forward.py times beside our modules, and its clock."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import torch

from fa2tvm.problem import Variant

# What pack_fa3.py keeps of FlashAttention-3; calling another kernel of it ends the process.
FA3_HEAD_DIMS = (64, 128, 256)


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


def load_fa3(folder: Path | None) -> bool:
    """Register FlashAttention-3's operators, where they are given."""
    if folder is None:
        return False
    ctypes.CDLL(str(folder / "libcudart.so.12"), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(folder / "fa3" / "_C.so"))
    return True
