"""The linker that makes shared libraries of compiled programs: binutils or a compiler's driver."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fa2tvm.errors import CompileFailed

LINKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("ld", ()),
    ("ld.lld", ()),
    ("ld.bfd", ()),
    ("ld.gold", ()),
    ("cc", ("-nostdlib",)),
    ("gcc", ("-nostdlib",)),
    ("clang", ("-nostdlib",)),
)


def find() -> tuple[str, tuple[str, ...]] | None:
    """A program that links, with the options that it needs; None where PATH has none."""
    for name, extra in LINKERS:
        found = shutil.which(name)
        if found:
            return found, extra
    return None


def require() -> tuple[str, tuple[str, ...]]:
    """What `find` finds.

    Raises
    ------
    CompileFailed
        Where it finds none.
    """
    found = find()
    if found is None:
        raise CompileFailed(
            f"no linker is on PATH (looked for {', '.join(name for name, _ in LINKERS)}), but a "
            "module must be linked; install binutils or load a pack."
        )
    return found


def link(objects: Iterable[Path], library: Path, *options: str) -> None:
    """Link objects into a shared library whose own symbols bind to itself.

    Parameters
    ----------
    options
        More options, as `ld` spells them.

    Raises
    ------
    CompileFailed
        Where there is no linker, or it refuses.
    OSError
        Where there is no room for the library.
    """
    program, extra = require()
    objects = list(objects)
    _require_room(library, 2 * sum(path.stat().st_size for path in objects))
    wanted = ("-Bsymbolic", *options)
    if extra:
        wanted = tuple(f"-Wl,{option}" for option in wanted)
    command = [program, *extra, "-shared", *wanted, "-z", "noexecstack", "-o", os.fspath(library)]
    command += [os.fspath(path) for path in objects]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(
            f"{program} could not link {library.name} (exit code {done.returncode}): "
            f"{' '.join(done.stderr.split())[:300]}"
        )


def write_object(module: Any, path: Path) -> None:
    """Write the machine code of a TVM module as an object file.

    LLVM ends the whole process where a disk is full, hence it writes into memory first.

    Raises
    ------
    OSError
        Where the file cannot be written.
    """
    if not hasattr(os, "memfd_create"):
        module.write_to_file(os.fspath(path), "o")
        return
    handle = os.memfd_create(path.name)
    try:
        module.write_to_file(f"/proc/self/fd/{handle}", "o")
        path.write_bytes(os.pread(handle, os.fstat(handle).st_size, 0))
    finally:
        os.close(handle)


def _require_room(path: Path, n_bytes: int) -> None:
    """Raise OSError unless a file of this size fits; a linker says so in many lines."""
    with path.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, n_bytes)
    path.unlink()
