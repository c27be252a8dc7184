"""What a run of the benchmark was made on: provenance, and the peak that a share is a share of."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from fa2tvm.bench import gpu
from fa2tvm.device import Device, cpu_model, detect
from fa2tvm.errors import CompileFailed
from fa2tvm.records import versions
from fa2tvm.tune.provenance import git_commit, utc_now

_ACCUMULATORS = 12  # FMA latency 4 x 2 units needs 8 chains; 12 still fit in 16 registers
_SECONDS = 0.25
_COPIED_BYTES = 256 << 20  # beyond any cache, also of a large server


def provenance(kind: str = "cpu") -> dict[str, Any]:
    """The `run` of every row: device, versions, commit, date, and the peaks in GFLOP/s and GB/s.

    Parameters
    ----------
    kind
        "cpu" or "cuda", the current GPU.
    """
    commit, _, changed = (git_commit() or "").partition("+")
    return {
        **(_cpu() if kind == "cpu" else {"threads": None, **gpu.provenance()}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tvm": versions()["apache-tvm"],
        "tvm_ffi": versions()["apache-tvm-ffi"],
        "fa2tvm": versions()["fa2tvm"],
        "commit": commit or None,
        "dirty": bool(changed) if commit else None,
        "date": utc_now(),
    }


def _cpu() -> dict[str, Any]:
    device = detect()
    return {
        "device": device.slug,
        "device_name": cpu_model(),
        "threads": torch.get_num_threads(),
        "peak_gflops": fma_peak_gflops(device, torch.get_num_threads()),
        "memory_gbs": copy_gbs(),
        "driver": None,
        "cuda": None,
    }


def fma_peak_gflops(device: Device, threads: int) -> float | None:
    """float32 GFLOP/s of fused multiply-adds on registers alone, on that many threads.

    Each thread runs a compiled loop of independent chains `x = x * a + b`; the best of five
    rounds counts. None where no compiler is installed.
    """
    try:
        loop = _fma_loop(device)
    except CompileFailed:
        return None
    flops_per_step = 2 * _ACCUMULATORS * device.lanes
    outputs = [torch.ones(_ACCUMULATORS * device.lanes) for _ in range(threads)]
    steps = 1_000_000
    start = time.perf_counter()
    loop(outputs[0], steps)
    steps = max(steps, int(steps * _SECONDS / 5 / (time.perf_counter() - start)))
    best = max(_aggregate_rate(loop, outputs, steps) for _ in range(5))
    return round(best * flops_per_step / 1e9, 1)


def copy_gbs() -> float:
    """GB/s of main memory: bytes read plus bytes written by PyTorch's copy, the best of five."""
    source = torch.zeros(_COPIED_BYTES // 4)
    target = torch.ones_like(source)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return round(2 * _COPIED_BYTES / min(times) / 1e9, 1)


def _aggregate_rate(
    loop: Callable[[torch.Tensor, int], Any], outputs: list[torch.Tensor], steps: int
) -> float:
    """Steps a second of all threads together."""
    barrier = threading.Barrier(len(outputs) + 1)

    def work(out: torch.Tensor) -> None:
        barrier.wait()
        loop(out, steps)  # releases the GIL
        barrier.wait()

    workers = [threading.Thread(target=work, args=(out,)) for out in outputs]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    barrier.wait()
    seconds = time.perf_counter() - start
    for worker in workers:
        worker.join()
    return steps * len(outputs) / seconds


def _fma_loop(device: Device) -> Callable[[torch.Tensor, int], Any]:
    """Compile (out, steps): out holds the chains' end values, so that none is dropped."""
    try:
        import tvm
        from tvm.script import tirx as T
    except ImportError as error:
        raise CompileFailed(f"the TVM compiler is not installed ({error}).") from None
    chains, lanes = _ACCUMULATORS, device.lanes

    @T.prim_func(private=False)  # type: ignore[untyped-decorator]
    def main(out_handle: T.handle, steps: T.int64):  # type: ignore[no-untyped-def]
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        out = T.match_buffer(out_handle, (chains * lanes,), "float32", align=4)
        x = T.alloc_buffer((chains * lanes,), "float32", scope="local")
        for c in T.unroll(chains):
            for u in T.vectorized(lanes):
                x[c * lanes + u] = out[c * lanes + u]
        for _ in T.serial(steps):
            for c in T.unroll(chains):
                for u in T.vectorized(lanes):
                    x[c * lanes + u] = x[c * lanes + u] * T.float32(0.999) + T.float32(0.001)
        for c in T.unroll(chains):
            for u in T.vectorized(lanes):
                out[c * lanes + u] = x[c * lanes + u]

    target = tvm.target.Target(device.target())
    executable: Callable[[torch.Tensor, int], Any] = tvm.compile(
        tvm.IRModule({"main": main}), target=target
    )["main"]
    return executable
