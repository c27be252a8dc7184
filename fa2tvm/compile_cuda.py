"""IRModule to shared library with the cubin inside; no GPU and no driver need be there.

TVM embeds CUDA source instead of a cubin, silently, where libcuda.so.1 is absent, so such a machine
must have a stub of it on the library path (`needs_driver_stub`); and it drops the report of ptxas,
so this registers its own compile callback.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fa2tvm.device import Device
from fa2tvm.errors import CompileFailed
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule

# What libtvm_runtime_cuda.so asks of the driver; a compiling machine never calls any of it.
_DRIVER_SYMBOLS = (
    "cuDeviceGetName",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)
_SERIALISED = re.compile(r"Potential Performance Loss|serializ|setmaxnreg' ignored")


@dataclass(frozen=True)
class PtxasReport:
    """What ptxas says of a kernel: registers at entry, bytes spilled, and its warnings."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class CudaModule:
    """A compiled module: the library to load, its cubin, its CUDA source and the report on it."""

    library: Path
    cubin: Path
    source: Path
    report: PtxasReport


def needs_driver_stub() -> bool:
    """Whether libcuda.so.1 is missing, without which TVM would embed source."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


def stub_environment(folder: Path) -> dict[str, str]:
    """The environment with a stub libcuda.so.1 in `folder` first on the library path.

    Raises
    ------
    CompileFailed
        Where there is no C compiler.
    """
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        raise CompileFailed(
            "libcuda.so.1 is missing, and no C compiler is on PATH to make a stub; install one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "driver_stub.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in _DRIVER_SYMBOLS))
    library = folder / "libcuda.so.1"
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        str(library),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True)
    paths = [str(folder.absolute()), *_runtime_folders(), os.environ.get("LD_LIBRARY_PATH", "")]
    return os.environ | {
        "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
        "TVM_CUDA_COMPILE_MODE": "nvcc",
    }


def _runtime_folders() -> list[str]:
    """Where nvcc's own libcudart lies: TVM's CUDA runtime links to it."""
    if shutil.which("nvcc") is None:
        return []
    dry = subprocess.run(
        ["nvcc", "--dryrun", "none.cu"], capture_output=True, text=True, check=False
    )
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    folders = [Path(top[1]) / name for name in ("lib64", "lib")] if top else []
    return [str(folder.resolve()) for folder in folders if (folder / "libcudart.so.13").exists()]


def parse_report(log: str) -> PtxasReport:
    """Read the output of `ptxas -v` for one kernel."""
    registers = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    warnings = tuple(line.strip() for line in log.splitlines() if _SERIALISED.search(line))
    return PtxasReport(
        int(registers[1]) if registers else 0,
        int(spill[1]) if spill else 0,
        int(spill[2]) if spill else 0,
        warnings,
    )


def compile_module(
    variant: Variant, schedule: Schedule, device: Device, folder: Path, name: str
) -> CudaModule:
    """Compile a variant's program with nvcc and export it to `folder/name.so`.

    Raises
    ------
    CompileFailed
        Where nvcc or libcuda.so.1 (or its stub) is missing, or nvcc refuses the program.
    """
    import tvm
    import tvm_ffi

    from fa2tvm import kernels

    if shutil.which("nvcc") is None:
        raise CompileFailed(
            "nvcc is not on PATH, but the CUDA families need it; install a CUDA toolkit."
        )
    if needs_driver_stub():
        raise CompileFailed(
            "libcuda.so.1 is missing, and TVM would embed source instead of a cubin; put a driver "
            "or its stub on LD_LIBRARY_PATH."
        )
    folder.mkdir(parents=True, exist_ok=True)
    cubin, source = folder / f"{name}.cubin", folder / f"{name}.cu"
    log = ""

    def compile_cubin(code: str) -> bytes:
        nonlocal log
        source.write_text(code)
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                "nvcc", "-cubin", "-O3", "-std=c++17", "--expt-relaxed-constexpr",
                "--use_fast_math",
                "-gencode", f"arch={device.arch.replace('sm_', 'compute_')},code={device.arch}",
                "--ptxas-options=-v", "-o", str(cubin), str(source),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        log = done.stdout + done.stderr
        if done.returncode:
            raise CompileFailed(f"nvcc refused {variant.name}: {log[-2000:]}")
        return cubin.read_bytes()

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cubin, override=True)
    target = tvm.target.Target(device.target())
    with target:
        executable = tvm.compile(
            kernels.build(variant, schedule, device), target=target, tir_pipeline="tirx"
        )
    library = folder / f"{name}.so"
    executable.export_library(str(library))
    return CudaModule(library, cubin, source, parse_report(log))
