"""g++: the stand-ins for CUDA's libraries, and the library of an emulated module."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fa2tvm.errors import CompileFailed

HERE = Path(__file__).parent
# What is not of the emulated modules themselves.
_DRIVER = "driver.cpp"
_STAND_INS = {"libcuda.so.1": "cu[A-Z]*; fa2tvm_driver_*", "libcudart.so.13": "cuda*"}
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")


def why_not() -> str | None:
    """Why nothing can be emulated here; None where it can."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "the emulator runs on x86-64 Linux only"
    if shutil.which("g++") is None:
        return "the emulator needs g++"
    found = importlib.util.find_spec("tvm")
    if found is None or found.origin is None:
        return "the emulator needs TVM's compiler"
    return None


@functools.cache
def version() -> str:
    """Hex digits over what enters a library: the emulator's code, the flags and the compiler."""
    digest = hashlib.sha256(repr(_flags()).encode())
    for path in sorted([*HERE.glob("translate*.py"), *HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(_run("g++", "--version").encode())
    return digest.hexdigest()[:16]


def stand_ins(folder: Path) -> list[Path]:
    """The libraries that take the place of the driver and of CUDA's runtime, in load order."""
    made = [folder / name for name in _STAND_INS]
    for library, (name, exported) in zip(made, _STAND_INS.items(), strict=True):
        if library.exists():
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            symbols = Path(scratch) / "symbols.map"
            symbols.write_text(f"{name} {{ global: {exported}; local: *; }};\n", encoding="utf-8")
            _link(
                Path(scratch) / name,
                library,
                *("-fvisibility=default", f"-Wl,-soname={name}"),
                f"-Wl,--version-script={symbols}",
                os.fspath(HERE / _DRIVER),
                "-ldl",
            )
    return made


def library(code: str, folder: Path) -> Path:
    """The library that runs CUDA source; compiled once for each source.

    Raises
    ------
    CompileFailed
        Where the source has what the emulator does not know.
    """
    from emulator import translate

    made = folder / f"{hashlib.sha256(code.encode()).hexdigest()[:24]}.so"
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = Path(scratch) / "module.cpp"
            source.write_text(translate.translate(code), encoding="utf-8")
            objects = [os.fspath(x) for x in sorted(HERE.glob("*.cpp")) if x.name != _DRIVER]
            _link(Path(scratch) / made.name, made, os.fspath(source), *objects)
    return made


def _flags() -> tuple[str, ...]:
    try:
        from emulator import translate
    except ImportError:
        return _FLAGS
    return (*_FLAGS, *getattr(translate, "FLAGS", ()))


def _link(staged: Path, library: Path, *arguments: str) -> None:
    """Compile a shared library; it appears whole, whoever else makes it meanwhile."""
    _run("g++", "-shared", *_flags(), "-I", os.fspath(HERE), "-o", os.fspath(staged), *arguments)
    staged.rename(library)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(f"{command[0]} refused {command[-1]}: {done.stderr[-2000:]}")
    return done.stdout
