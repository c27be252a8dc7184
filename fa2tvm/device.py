"""Where it runs: a CPU or GPU as tuning, lookup and code generation see it."""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fa2tvm.errors import UnsupportedProblem

# (vendor, family) -> ((first model, last model, LLVM name), ...).
# Source: LLVM's Host.cpp tables and AMD's and Intel's revision guides.
_MICROARCHITECTURES: dict[tuple[str, int], tuple[tuple[int, int, str], ...]] = {
    ("AuthenticAMD", 23): ((0x00, 0x2F, "znver1"), (0x30, 0xFF, "znver2")),
    ("AuthenticAMD", 25): (
        (0x10, 0x1F, "znver4"),
        (0x60, 0x7F, "znver4"),
        (0xA0, 0xAF, "znver4"),
        (0x00, 0x5F, "znver3"),
    ),
    ("AuthenticAMD", 26): ((0x00, 0xFF, "znver5"),),
    ("GenuineIntel", 6): (
        (0x55, 0x55, "skylake-avx512"),
        (0x6A, 0x6A, "icelake-server"),
        (0x6C, 0x6C, "icelake-server"),
        (0x8F, 0x8F, "sapphirerapids"),
        (0xAD, 0xAE, "graniterapids"),
        (0xCF, 0xCF, "emeraldrapids"),
    ),
}
# What each x86-64 level needs of /proc/cpuinfo. Source: x86-64 psABI, micro-architecture levels.
X86_64_LEVELS: dict[str, frozenset[str]] = {
    "x86-64-v3": frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}),
    "x86-64-v4": frozenset(
        {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
        | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    ),
}
_ICE_LAKE = frozenset(
    {"avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_vnni"}
    | {"avx512_bitalg", "avx512_vpopcntdq", "gfni"}
)
# What code for a named CPU may use beyond its level. Source: LLVM's X86.td; instructions that
# LLVM never chooses by itself (AES, SHA, AMX) are left out.
_BEYOND_LEVEL: dict[str, tuple[str, frozenset[str]]] = {
    "znver1": ("x86-64-v3", frozenset({"sse4a"})),
    "znver2": ("x86-64-v3", frozenset({"sse4a"})),
    "znver3": ("x86-64-v3", frozenset({"sse4a"})),
    "znver4": ("x86-64-v4", _ICE_LAKE | {"sse4a", "avx512_bf16"}),
    "znver5": ("x86-64-v4", _ICE_LAKE | {"sse4a", "avx512_bf16", "avx_vnni"}),
    "skylake-avx512": ("x86-64-v4", frozenset()),
    "icelake-server": ("x86-64-v4", _ICE_LAKE),
    "sapphirerapids": ("x86-64-v4", _ICE_LAKE | {"avx512_bf16", "avx512_fp16", "avx_vnni"}),
    "emeraldrapids": ("x86-64-v4", _ICE_LAKE | {"avx512_bf16", "avx512_fp16", "avx_vnni"}),
    "graniterapids": ("x86-64-v4", _ICE_LAKE | {"avx512_bf16", "avx512_fp16", "avx_vnni"}),
}


@dataclass(frozen=True)
class Device:
    """A compilation and tuning target.

    Attributes
    ----------
    slug
        Folder name of its schedules and logs, e.g. `cpu_znver4`.
    kind
        "llvm" or "cuda".
    arch
        What the code generator is told: an LLVM CPU name (`mcpu`) or an `sm_` number.
    level
        The coarser class that shares schedules: an x86-64 level, or the machine name.
    features
        CPU features that its code may use; a module is refused where one is missing.
    cores, l1_bytes, l2_bytes, vector_bytes
        Cores this process may use, data-cache sizes of one core, native vector width. On a GPU:
        its multiprocessors, the L1 of one, the L2 of all, the widest load.
    shared_bytes
        GPU: shared memory that one thread block may use; 0 on a CPU.
    """

    slug: str
    kind: str
    arch: str
    level: str
    features: tuple[str, ...]
    cores: int
    l1_bytes: int
    l2_bytes: int
    vector_bytes: int
    shared_bytes: int = 0

    @property
    def lanes(self) -> int:
        """float32 elements of one native vector."""
        return self.vector_bytes // 4

    def target(self) -> dict[str, Any]:
        """The argument of `tvm.target.Target`."""
        if self.kind == "llvm":
            target: dict[str, Any] = {"kind": "llvm", "mcpu": self.arch}
            if self.vector_bytes == 64 and not self.arch.startswith("znver"):
                # LLVM halves 64-byte vectors on these unless told not to; the kernels' register
                # tiles are laid out for whole ones.
                target["mattr"] = ["-prefer-256-bit"]
            return target
        return {"kind": "cuda", "arch": self.arch}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Gpu:
    """What code and schedules depend on: architecture, multiprocessors, memories of one and all."""

    arch: str
    multiprocessors: int
    shared_bytes: int
    l2_mib: int
    l1_kib: int


# GPUs that code can be made for without having one. Source: CUDA's programming guide, compute
# capabilities (shared memory a thread block may opt in to), and NVIDIA's data sheets; the H200 as
# read on one, 2026-11-30.
GPUS: dict[str, Gpu] = {
    "nvidia_h200": Gpu("sm_90a", 132, 232448, 60, 256),
    "nvidia_h100": Gpu("sm_90a", 132, 232448, 50, 256),
    "nvidia_h100_pcie": Gpu("sm_90a", 114, 232448, 50, 256),
    "nvidia_a100": Gpu("sm_80", 108, 166912, 40, 192),
    "nvidia_a10": Gpu("sm_86", 72, 101376, 6, 128),
    "nvidia_geforce_rtx_3090": Gpu("sm_86", 82, 101376, 6, 128),
    "nvidia_l4": Gpu("sm_89", 58, 101376, 48, 128),
    "nvidia_l40s": Gpu("sm_89", 142, 101376, 96, 128),
    "nvidia_geforce_rtx_4090": Gpu("sm_89", 128, 101376, 72, 128),
}


def baseline(level: str = "x86-64-v3") -> Device:
    """The portable x86-64 device of a level: what a pack for unknown machines is compiled for.

    Raises
    ------
    UnsupportedProblem
        For a level that does not exist.
    """
    if level not in X86_64_LEVELS:
        raise UnsupportedProblem(
            f"level is {level!r}, but only {', '.join(X86_64_LEVELS)} exist; choose one."
        )
    vector_bytes = 64 if level == "x86-64-v4" else 32
    return Device(
        slug="cpu_" + level.replace("-", "_"),
        kind="llvm",
        arch=level,
        level=level,
        features=tuple(sorted(X86_64_LEVELS[level])),
        cores=usable_cores(),
        l1_bytes=32 << 10,
        l2_bytes=256 << 10,
        vector_bytes=vector_bytes,
    )


def nvidia_h200() -> Device:
    """NVIDIA H200 (SXM)."""
    return gpu("nvidia_h200")


def gpu(name: str) -> Device:
    """A GPU by the name of `GPUS`, with or without its `nvidia_`: what a pack is made for.

    Raises
    ------
    UnsupportedProblem
        For a name that the table lacks.
    """
    slug = name if name.startswith("nvidia_") else f"nvidia_{name}"
    if slug not in GPUS:
        raise UnsupportedProblem(
            f"device is {name!r}, but only {', '.join(GPUS)} are known; choose one."
        )
    return _gpu(slug, GPUS[slug])


def cuda_device(
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    shared_bytes: int = 0,
    l2_bytes: int = 0,
) -> Device:
    """The GPU that its driver describes so; zeros where it does not say.

    A GPU of the table takes its slug from there, whatever follows in its name, so that it finds
    the schedules of its kind.
    """
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    known = [slug for slug in GPUS if f"{plain}_".startswith(f"{slug}_")]
    slug = max(known, key=len, default=plain)
    arch = _arch(capability)
    alike = [g for g in (GPUS.get(slug), *GPUS.values()) if g is not None and g.arch == arch]
    like = alike[0] if alike else Gpu(arch, 0, 101376, 4, 128)
    found = replace(
        like,
        arch=arch,
        multiprocessors=multiprocessors,
        shared_bytes=shared_bytes or like.shared_bytes,
    )
    device = _gpu(slug, found)
    return replace(device, l2_bytes=l2_bytes) if l2_bytes else device


def _arch(capability: tuple[int, int]) -> str:
    """What the compiler is told; Hopper's wgmma exists only in the `a` variant of its code."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability == (9, 0) else "")


def _gpu(slug: str, found: Gpu) -> Device:
    return Device(
        slug=slug,
        kind="cuda",
        arch=found.arch,
        level=found.arch,
        features=(),
        cores=found.multiprocessors,
        l1_bytes=found.l1_kib << 10,
        l2_bytes=found.l2_mib << 20,
        vector_bytes=16,
        shared_bytes=found.shared_bytes,
    )


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_features() -> frozenset[str]:
    """Feature flags of this CPU as the kernel reports them; empty where it reports none."""
    return frozenset(_cpuinfo().get("flags", "").split())


def features_of(arch: str) -> frozenset[str]:
    """CPU features that code for an LLVM CPU name may use, in the words of /proc/cpuinfo."""
    if arch in _BEYOND_LEVEL:
        level, beyond = _BEYOND_LEVEL[arch]
        return X86_64_LEVELS[level] | beyond
    return X86_64_LEVELS.get(arch, frozenset())


@functools.cache
def detect() -> Device:
    """The CPU of this machine.

    A virtual machine may hide features of the CPU that it names; then the code generator is told
    the level that is left.
    """
    flags = cpu_features()
    level = next(
        (name for name in ("x86-64-v4", "x86-64-v3") if X86_64_LEVELS[name] <= flags),
        platform.machine() or "generic",
    )
    name = _microarchitecture(_cpuinfo())
    if name is not None and not features_of(name) <= flags:
        name = None
    arch = name or (level if level in X86_64_LEVELS else "generic")
    vector_bytes = {"x86-64-v4": 64, "x86-64-v3": 32}.get(level, 16)
    return Device(
        slug="cpu_" + re.sub(r"[^a-z0-9]+", "_", (name or level).lower()),
        kind="llvm",
        arch=arch,
        level=level,
        features=tuple(sorted(features_of(arch))),
        cores=usable_cores(),
        l1_bytes=_cache_bytes(1, 32 << 10),
        l2_bytes=_cache_bytes(2, 256 << 10),
        vector_bytes=vector_bytes,
    )


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is none (not Linux)."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text().split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _microarchitecture(info: dict[str, str]) -> str | None:
    """LLVM's name of this CPU, or None where the table has none."""
    try:
        key = (info["vendor_id"], int(info["cpu family"]))
        model = int(info["model"])
    except (KeyError, ValueError):
        return None
    for first, last, name in _MICROARCHITECTURES.get(key, ()):
        if first <= model <= last:
            return name
    return None


def _cache_bytes(level: int, default: int) -> int:
    """Size of this core's data cache of a level, from sysfs."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            same_level = int((index / "level").read_text()) == level
            kind = (index / "type").read_text().strip()
            size = (index / "size").read_text().strip()
        except (OSError, ValueError):
            continue
        if same_level and kind in ("Data", "Unified") and size.endswith("K"):
            return int(size[:-1]) << 10
    return default


def cpu_model() -> str:
    """The name that the CPU gives itself; the machine's architecture where it gives none."""
    return _cpuinfo().get("model name") or platform.machine() or "unknown"
