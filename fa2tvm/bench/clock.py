"""Time on a GPU: events, a cold L2, and no CPU in the way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

# Written before each burst sample: several times any L2.
FLUSH_BYTES = 256 << 20
# A spin of about 50 us at least, in which the CPU gets ahead of the GPU; it lasts longer than the
# CPU's part of a call at the highest clock (1.98 GHz on an H200), but not than 4 ms.
_SPIN_CYCLES, _MAX_SPIN_CYCLES = 100_000, 8_000_000
_CYCLES_PER_S = 2e9
_SUSTAINED_BATCH = 10
# Clocks and power settle in this time.
_SETTLE_S = 0.5


class GpuClock:
    """Times calls on PyTorch's current stream of one GPU.

    Source: the method of triton.testing.do_bench (events, a write over the L2 before each run);
    the spin kernel is added, so that the cost of a call does not show.
    """

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._spin: Callable[[int], None] = torch.cuda._sleep

    def burst(
        self, call: Callable[[], object], repeats: int, cpu_s: float | None = None
    ) -> list[float]:
        """Microseconds of single calls, each with a cold L2.

        Parameters
        ----------
        cpu_s
            How long a call holds the CPU at most; measured by default, with three calls.
        """
        if cpu_s is None:
            cpu_s = cpu_seconds(call)
        cycles = min(_MAX_SPIN_CYCLES, _SPIN_CYCLES + int(1.5 * cpu_s * _CYCLES_PER_S))
        pairs = []
        for _ in range(repeats):
            self._flush.fill_(1)
            self._spin(cycles)
            start, end = _events()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]

    def sustained(self, call: Callable[[], object], seconds: float) -> list[float]:
        """Microseconds a call in batches back to back, once clocks and power have settled."""
        times: list[float] = []
        began = time.monotonic()
        while (now := time.monotonic() - began) < seconds or not times:
            start, end = _events()
            start.record()
            for _ in range(_SUSTAINED_BATCH):
                call()
            end.record()
            end.synchronize()
            if now >= min(_SETTLE_S, seconds / 2):
                times.append(1e3 * start.elapsed_time(end) / _SUSTAINED_BATCH)
        return times


def cpu_seconds(call: Callable[[], object]) -> float:
    """How long a call holds the CPU when the GPU is idle: the shorter of two, after a third."""
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return min(times[1:])


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Any = torch.cuda.Event  # untyped
    return event(enable_timing=True), event(enable_timing=True)
