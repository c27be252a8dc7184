"""What a GPU says of itself while it is measured: provenance, ceilings, power, clock, energy."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from types import TracebackType
from typing import Any

import torch

from fa2tvm import cuda_runtime
from fa2tvm.bench.clock import GpuClock

# Dense 16-bit TFLOP/s with float32 accumulation by the vendor's data sheet. Sources: NVIDIA H100,
# H200 and A100 data sheets.
DATA_SHEET_TFLOPS = {
    "nvidia_h200": 989.4,
    "nvidia_h100": 989.4,
    "nvidia_h100_pcie": 756.0,
    "nvidia_a100": 312.0,
}
_MATRIX = 8192
_COPIED_BYTES = 4 << 30
_SUSTAINED_S = 1.5
_READ_EVERY_S = 0.05
# Over half a second the energy counter said 767 W of a board that is held to 700 W (H200,
# 2026-12-01): over stretches shorter than this, power is the median of readings.
_ENERGY_FROM_S = 5.0
# NVML: nvmlClockType_t and the return code for success.
_SM_CLOCK, _SUCCESS = 1, 0


def provenance(ceilings: bool = True) -> dict[str, Any]:
    """The device, driver and ceilings of a row's `run`, of PyTorch's current GPU.

    `peak_gflops` is the measured ceiling: a bfloat16 product of 8192^3, single calls; at the clocks
    that power leaves it is `sustained_gflops`.
    """
    device = cuda_runtime.device(torch.cuda.current_device())
    peak, sustained = matmul_gflops() if ceilings else (None, None)
    with Meter() as meter:
        driver = meter.driver()
        power_limit_w = meter.power_limit_w()
    return {
        "device": device.slug,
        "device_name": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": torch.version.cuda,
        "power_limit_w": power_limit_w,
        "peak_gflops": peak,
        "sustained_gflops": sustained,
        "data_sheet_tflops": DATA_SHEET_TFLOPS.get(device.slug),
        "memory_gbs": copy_gbs() if ceilings else None,
    }


def matmul_gflops() -> tuple[float, float]:
    """GFLOP/s of a large bfloat16 product of random matrices: of single calls, and back to back."""
    a, b = (torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    clock = GpuClock(a.device)
    burst = statistics.median(clock.burst(lambda: torch.matmul(a, b, out=out), 12))
    sustained = clock.sustained(lambda: torch.matmul(a, b, out=out), _SUSTAINED_S)
    flops = 2 * _MATRIX**3
    return round(flops / burst / 1e3, 1), round(flops / statistics.median(sustained) / 1e3, 1)


def copy_gbs() -> float:
    """GB/s of GPU memory: bytes read plus bytes written by PyTorch's copy."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.ones_like(source)
    us = GpuClock(source.device).burst(lambda: target.copy_(source), 5)
    return round(2 * _COPIED_BYTES / statistics.median(us) / 1e3, 1)


class Meter:
    """Reads power, clock and energy of the current GPU in a thread; None where NVML is absent.

    Source: NVML's C interface (libnvidia-ml.so.1, part of the driver).
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        self._done = threading.Event()
        self._clocks_mhz: list[int] = []
        self._powers_w: list[float] = []
        self._thread: threading.Thread | None = None
        self._energy_j: float | None = None
        self._began = 0.0

    def __enter__(self) -> Meter:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            name = (uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode()
            if nvml.nvmlInit_v2() != _SUCCESS:
                return self
            if nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)) != _SUCCESS:
                return self
        except (OSError, AttributeError):
            return self
        self._nvml = nvml
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()

    def driver(self) -> str | None:
        """The driver's version."""
        text = ctypes.create_string_buffer(80)
        if self._nvml is None or self._nvml.nvmlSystemGetDriverVersion(text, 80) != _SUCCESS:
            return None
        return text.value.decode()

    def power_limit_w(self) -> float | None:
        """The most that the board may draw, in watts."""
        milliwatts = self._read("nvmlDeviceGetEnforcedPowerLimit")
        return None if milliwatts is None else milliwatts / 1e3

    def start(self) -> None:
        """Begin to read; nothing where NVML is absent."""
        if self._nvml is None:
            return
        self._energy_j, self._began = self._total_energy_j(), time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float | None]:
        """End; the row's `power_w`, of a long stretch from the energy counter, and `clock_mhz`."""
        if self._thread is None:
            return {"power_w": None, "clock_mhz": None}
        self._done.set()
        self._thread.join()
        seconds = time.monotonic() - self._began
        energy_j = self._total_energy_j()
        power_w = statistics.median(self._powers_w) if self._powers_w else None
        if energy_j is not None and self._energy_j is not None and seconds >= _ENERGY_FROM_S:
            power_w = (energy_j - self._energy_j) / seconds
        clock_mhz = statistics.median(self._clocks_mhz) if self._clocks_mhz else None
        return {
            "power_w": None if power_w is None else round(power_w, 1),
            "clock_mhz": clock_mhz,
        }

    def _watch(self) -> None:
        while not self._done.wait(_READ_EVERY_S):
            clock = self._read("nvmlDeviceGetClockInfo", ctypes.c_int(_SM_CLOCK))
            milliwatts = self._read("nvmlDeviceGetPowerUsage")
            if clock is not None:
                self._clocks_mhz.append(clock)
            if milliwatts is not None:
                self._powers_w.append(milliwatts / 1e3)

    def _read(self, function: str, *arguments: Any) -> int | None:
        value = ctypes.c_uint()
        if self._nvml is None:
            return None
        code = getattr(self._nvml, function)(self._handle, *arguments, ctypes.byref(value))
        return value.value if code == _SUCCESS else None

    def _total_energy_j(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        code = self._nvml.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(millijoules)
        )
        return millijoules.value / 1e3 if code == _SUCCESS else None
