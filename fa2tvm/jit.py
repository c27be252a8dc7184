"""Programs compiled within this process, where no linker can make a module of them.

Slower to start, as nothing is kept; the code is the same.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fa2tvm import compile as compiler
from fa2tvm import manifest, parallel
from fa2tvm.compile import Module
from fa2tvm.device import Device
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule

# What a program finds in its surroundings when it is loaded, by the numbers of fa2tvm_address.
_CONTEXT = ("ParallelLaunch", "AllocWorkspace", "FreeWorkspace")
_lock = threading.Lock()


def load(variant: Variant, schedule: Schedule, device: Device) -> Module:
    """Compile and load a program without a file.

    Raises
    ------
    CompileFailed
        Where the TVM compiler is absent or refuses the program.
    """
    program = compiler.lower(variant, schedule, device)
    support = _support(program.mod, variant)
    threads = parallel.Attachment(support)
    with _lock, _context(support):
        function = program.mod[variant.pass_]
    limit = support["fa2tvm_limit"]

    def function_on(*arguments: Any) -> None:
        limit(arguments[-1])
        function(*arguments[:-1])

    described = manifest.describe(variant, schedule, device)
    return Module(described, variant, schedule, function, function_on, threads)


def _support(program: Any, variant: Variant) -> Any:
    """openmp.ll as a module of its own, since code compiled here finds no other code by name.

    Nor does it find variables of a thread: two threads that call at once may see each other's
    limit of threads, which costs time but changes no result.
    """
    import tvm

    text = manifest.SUPPORT_IR.read_text(encoding="utf-8")
    text = text[: text.index("; The pass with one more argument")]
    text = text.replace("internal thread_local global", "internal global")
    text = text.replace("declare i32 @__tvm_ffi_@PASS@(ptr, ptr, i32, ptr)", "")
    header = [
        line
        for line in program.inspect_source("ll").splitlines()
        if line.startswith(("target datalayout", "target triple"))
    ]
    with tempfile.TemporaryDirectory(prefix="fa2tvm-") as folder:
        path = Path(folder) / f"{variant.pass_}.ll"
        path.write_text("\n".join([*header, text]), encoding="utf-8")
        return tvm.runtime.load_module(os.fspath(path))


@contextmanager
def _context(support: Any) -> Iterator[None]:
    """Offer our functions to code that is loaded meanwhile, then TVM's own again."""
    import tvm_ffi.libinfo

    register = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()).TVMFFIEnvModRegisterContextSymbol
    library = parallel.tvm_runtime()
    assert library is not None, "the compiler is here without its runtime"
    runtime = ctypes.CDLL(os.fspath(library))
    try:
        for number, name in enumerate(_CONTEXT):
            address = ctypes.c_void_p(support["fa2tvm_address"](number))
            register(f"__TVMBackend{name}".encode(), address)
        yield
    finally:
        for name in _CONTEXT:
            theirs = ctypes.cast(getattr(runtime, f"TVMBackend{name}"), ctypes.c_void_p)
            register(f"__TVMBackend{name}".encode(), theirs)
