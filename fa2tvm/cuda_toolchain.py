"""CUDA source to cubin: by nvcc where it is on PATH, else by NVRTC, which pip installs.

    pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cuda-crt

is all that NVRTC needs (the library, CUDA's headers and those of libcu++); no driver, no toolkit.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fa2tvm.errors import CompileFailed

_SERIALISED = re.compile(r"Potential Performance Loss|serializ|setmaxnreg' ignored")
_TOOLKITS = ("/usr/local/cuda", "/opt/cuda")
# NVRTC reads no <cuda.h>; a kernel that takes a tensor map by value needs its size and alignment.
_NVRTC_PREAMBLE = """\
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
"""


@dataclass(frozen=True)
class PtxasReport:
    """What ptxas says of a kernel: registers at entry, bytes spilled, and its warnings."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Cubin:
    """Machine code of one architecture, the report on it and the compiler that made it."""

    code: bytes
    report: PtxasReport
    compiler: str


@dataclass(frozen=True)
class Nvrtc:
    """Where NVRTC's library is, and the folders of the headers that it reads."""

    library: str
    includes: tuple[Path, ...]


def compile_source(code: str, arch: str, what: str) -> Cubin:
    """Compile CUDA source for one architecture.

    Parameters
    ----------
    arch
        `sm_90a` and the like.
    what
        What is compiled, for messages.

    Raises
    ------
    CompileFailed
        Where neither compiler is there, or the one that is refuses the source.
    """
    if shutil.which("nvcc"):
        return _by_nvcc(code, arch, what)
    found = find_nvrtc()
    if found is None:
        raise CompileFailed(
            f"{what} needs a CUDA compiler, but nvcc is not on PATH and no NVRTC with its headers "
            "is installed; run pip install 'fa2tvm[cuda]' or install a CUDA toolkit."
        )
    return _by_nvrtc(found, code, arch, what)


def describe_compiler() -> str | None:
    """The compiler that `compile_source` would use, in words; None where there is none."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        return f"nvcc ({nvcc})"
    found = find_nvrtc()
    return None if found is None else f"NVRTC ({found.library})"


def find_nvrtc() -> Nvrtc | None:
    """NVRTC from pip's packages or a toolkit, with the headers beside it; None if incomplete."""
    for root in [*_pip_roots(), *map(Path, _TOOLKITS)]:
        includes = [root / "include", root / "include" / "cccl", root / "cccl" / "include"]
        includes += [root / "cccl"]
        headers = tuple(path for path in includes if path.is_dir())
        has_all = all(
            any((path / name).is_file() for path in headers)
            for name in ("cuda_bf16.h", "cuda/std/cstdint")
        )
        for folder in ("lib", "lib64"):
            libraries = sorted((root / folder).glob("libnvrtc.so.[1-9]*"))
            if libraries and has_all:
                return Nvrtc(os.fspath(libraries[-1]), headers)
    return None


def _pip_roots() -> list[Path]:
    """Folders like site-packages/nvidia/cu13, which pip's CUDA packages share."""
    spec = importlib.util.find_spec("nvidia")
    if spec is None:
        return []
    parents = [Path(place) for place in spec.submodule_search_locations or ()]
    return [root for parent in parents for root in sorted(parent.glob("cu[1-9]*"), reverse=True)]


def _by_nvcc(code: str, arch: str, what: str) -> Cubin:
    with tempfile.TemporaryDirectory(prefix="fa2tvm-") as scratch:
        source, cubin = Path(scratch) / "program.cu", Path(scratch) / "program.cubin"
        source.write_text(code, encoding="utf-8")
        command = [
            "nvcc", "-cubin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "--use_fast_math",
            "-gencode", f"arch={arch.replace('sm_', 'compute_')},code={arch}",
            "--ptxas-options=-v", "-o", os.fspath(cubin), os.fspath(source),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=scratch, check=False)
        log = done.stdout + done.stderr
        if done.returncode:
            raise CompileFailed(f"nvcc refused {what}: {log[-2000:]}")
        return Cubin(cubin.read_bytes(), parse_report(log), "nvcc")


def _by_nvrtc(found: Nvrtc, code: str, arch: str, what: str) -> Cubin:
    nvrtc = ctypes.CDLL(found.library)
    program = ctypes.c_void_p()
    text = (_NVRTC_PREAMBLE + code).encode()
    options = [f"-arch={arch}", "-std=c++17", "--use_fast_math", "-default-device", "-w"]
    options += ["--ptxas-options=-v", *(f"-I{path}" for path in found.includes)]
    raw = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, b"program.cu", 0, None, None):
        raise CompileFailed(f"{found.library} could not take the source of {what}.")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), raw)
        log = _nvrtc_bytes(nvrtc, "ProgramLog", program).decode(errors="replace")
        if failed:
            raise CompileFailed(f"NVRTC refused {what} (error {failed}): {log[-2000:]}")
        cubin = _nvrtc_bytes(nvrtc, "CUBIN", program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Cubin(cubin, parse_report(log), "NVRTC")


def _nvrtc_bytes(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    """What nvrtcGet<what> gives of a program."""
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw[:-1] if what == "ProgramLog" else buffer.raw


def parse_report(log: str) -> PtxasReport:
    """Read what `ptxas -v` says of a program: the worst of its kernels."""

    def worst(pattern: str) -> int:
        return max((int(n) for n in re.findall(pattern, log)), default=0)

    warnings = tuple(line.strip() for line in log.splitlines() if _SERIALISED.search(line))
    return PtxasReport(
        worst(r"Used (\d+) registers"),
        worst(r"(\d+) bytes spill stores"),
        worst(r"(\d+) bytes spill loads"),
        warnings,
    )
