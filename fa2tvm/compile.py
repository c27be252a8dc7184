"""TensorIR to module: a content-addressed cache of compiled programs, and loading.

A module is a folder with `module.so` and `manifest.json`. Only `build` needs the TVM compiler.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2tvm import cache, cuda_runtime, linker, parallel
from fa2tvm.device import Device
from fa2tvm.errors import CompileFailed, Fa2tvmError, StaleModule
from fa2tvm.files import storing
from fa2tvm.manifest import (
    LIBRARY,
    MANIFEST,
    SUPPORT_IR,
    Verified,
    describe,
    require_fit,
    sha256_of,
    verified,
)
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.trust import require_private

_log = logging.getLogger("fa2tvm")
_loads = itertools.count()


@dataclass(frozen=True)
class Module:
    """A loaded program.

    Attributes
    ----------
    manifest
        What `manifest.json` says.
    variant, schedule
        What was compiled, and how.
    function
        The pass with the kernel's own arguments.
    function_on
        The same with one more argument at the end: the number of threads that it may use. On a GPU
        it is `function`.
    threads
        Keeps the program of a CPU connected to its thread pool.
    length_class
        The `Problem.length_class` that a pack holds it for; None for every length.
    """

    manifest: dict[str, Any]
    variant: Variant
    schedule: Schedule
    function: Callable[..., None]
    function_on: Callable[..., None]
    threads: parallel.Attachment | None = None
    length_class: str | None = None


def build(variant: Variant, schedule: Schedule, device: Device) -> Path:
    """The folder of the compiled program, from the cache or made now.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    CompileFailed
        Where the TVM compiler or a linker is absent, or the compiler refuses the program.
    StoreUnavailable
        Where the cache is full or vanishes.
    """
    schedule.require_feasible(variant, device)
    with storing(cache.root()):
        return _built(
            cache.root() / module_name(variant, schedule, device), variant, schedule, device
        )


def cached(variant: Variant, schedule: Schedule, device: Device) -> Path | None:
    """The folder of the compiled program in the cache; None where it is not there, or damaged."""
    folder = cache.root() / module_name(variant, schedule, device)
    return folder if _is_whole(folder, describe(variant, schedule, device)) else None


def _is_whole(folder: Path, wanted: dict[str, Any]) -> bool:
    """Whether a folder holds the program that its name says; one that does not is discarded."""
    if not folder.exists():
        return False
    try:
        # Nothing of it runs here; who may write it is asked when it is loaded.
        found, _ = verified(folder, trust=True)
        if {name: found.get(name) for name in wanted} != wanted:
            raise StaleModule(f"{folder} holds another program than its name says.")
    except StaleModule as damage:
        _log.warning("%s It is built again.", damage)
        cache.discard(folder)
        return False
    return True


def _built(folder: Path, variant: Variant, schedule: Schedule, device: Device) -> Path:
    wanted = describe(variant, schedule, device)
    if _is_whole(folder, wanted):
        return folder
    with cache.staging(folder.parent) as staged:
        code = _compile(variant, schedule, device, staged / LIBRARY) or {}
        manifest = wanted | {"sha256": sha256_of(staged / LIBRARY)}
        if code:
            manifest["code"] = code
        (staged / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        cache.put(staged, folder)
    return folder


def load(path: str | os.PathLike[str], *, trust: bool = False) -> Module:
    """Load a module folder after it is verified; needs no compiler.

    Parameters
    ----------
    trust
        Load it although other users of this machine may write to it.

    Raises
    ------
    StaleModule
        Where checksum, format, versions, machine, CPU features or GPU do not fit, a library of CUDA
        is missing, or others may have changed it.
    """
    folder = Path(path)
    return load_verified(folder, verified(folder, trust=trust), trust=trust)


def load_verified(folder: Path, module: Verified, *, trust: bool) -> Module:
    """Load a module from the bytes that were verified; otherwise as `load`."""
    manifest = module.manifest
    require_fit(folder, manifest)
    if not trust:
        require_private(folder, folder / LIBRARY, folder / MANIFEST)
    try:
        variant = Variant(**manifest["variant"])
        schedule = schedule_from_dict(manifest["family"], variant.pass_, manifest["schedule"])
    except (KeyError, TypeError, Fa2tvmError) as error:
        raise StaleModule(f"{folder} describes no program of this version ({error}).") from error
    is_cuda = manifest["target"].get("kind") == "cuda"
    if is_cuda:
        cuda_runtime.load_libraries()
    name = variant.pass_
    try:
        library = _open_library(folder, module.library)
        function = library[name]
        if is_cuda:
            return Module(manifest, variant, schedule, function, function)
        on = library[f"{name}_threads"]
        return Module(manifest, variant, schedule, function, on, parallel.Attachment(library))
    except (RuntimeError, AttributeError, OSError) as error:
        first = str(error).strip().splitlines()[:1]
        raise StaleModule(
            f"{folder / LIBRARY} holds no {name} pass that can be loaded ({''.join(first)}); "
            "export it again."
        ) from error


def _open_library(folder: Path, data: bytes) -> Any:
    """Hand bytes to the dynamic loader: those that were verified, not what a path leads to then.

    They are the process's own, so that a file that is overwritten in its place, by a copy of a
    newer pack over it, ends no process that runs the older one (SIGBUS, or other code).
    """
    import tvm_ffi

    if _is_cut(data):
        raise OSError("it ends before its last segment")
    try:
        handle = os.memfd_create(folder.name[:60])
    except (AttributeError, OSError):  # another system, or one that forbids it
        return tvm_ffi.load_module(os.fspath((folder / LIBRARY).absolute()))
    try:
        with open(handle, "wb", closefd=False) as stream:
            stream.write(data)
        # glibc takes a library for loaded where one was opened under the same name, and numbers of
        # descriptors return: each load spells its number's folder in another way.
        spelled = "".join("/." if bit == "1" else "//" for bit in f"{next(_loads):b}")
        load_file = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
        library = load_file(f"/proc/self{spelled}/fd/{handle}", "so")
        # As load_module does: code that threads or a GPU's driver may still know stays loaded.
        tvm_ffi.get_global_func("ffi.ModuleGlobalsAdd")(library)
        return library
    finally:
        os.close(handle)


def _is_cut(data: bytes) -> bool:
    """Whether a library ends early, where the dynamic loader would end the process (SIGBUS).

    Source: elf(5), the headers of a 64-bit little-endian file.
    """
    if len(data) < 64 or not data.startswith(b"\x7fELF\x02\x01"):
        return False  # the loader says what it thinks of that
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    if table + size * count > len(data) or (count and size < 56):
        return True
    for at in range(table, table + size * count, size or 1):
        (kind,) = struct.unpack_from("<I", data, at)
        (offset,) = struct.unpack_from("<Q", data, at + 8)
        (length,) = struct.unpack_from("<Q", data, at + 32)
        if kind == 1 and offset + length > len(data):  # PT_LOAD
            return True
    return False


def module_name(variant: Variant, schedule: Schedule, device: Device) -> str:
    """What a compiled program is called in the cache: all that shapes its code decides."""
    text = json.dumps(describe(variant, schedule, device), sort_keys=True)
    return f"{variant.name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def is_built(variant: Variant, schedule: Schedule, device: Device) -> bool:
    """Whether the cache has the program."""
    return (cache.root() / module_name(variant, schedule, device)).exists()


def lower(variant: Variant, schedule: Schedule, device: Device) -> Any:
    """The program as machine code: TVM's executable, not linked yet.

    Raises
    ------
    InfeasibleSchedule
        Where the schedule does not fit the variant or the device.
    CompileFailed
        Where the TVM compiler is absent or refuses the program.
    """
    try:
        import tvm

        from fa2tvm import kernels
    except ImportError as error:
        raise CompileFailed(
            f"the TVM compiler cannot be imported ({error}), but {variant.name} is not compiled "
            "yet; install apache-tvm or load a pack that holds it."
        ) from error
    target = tvm.target.Target(device.target())
    try:
        with target:
            return tvm.compile(kernels.build(variant, schedule, device), target=target)
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, Fa2tvmError):
            raise
        first = str(error).strip().splitlines()[:1]
        raise CompileFailed(
            f"TVM refused {variant.name} with schedule {schedule.to_dict()} ({''.join(first)})."
        ) from error


def _compile(
    variant: Variant, schedule: Schedule, device: Device, library: Path
) -> dict[str, Any] | None:
    """Compile the program and our support code and link them into one shared library.

    What comes back is the manifest's word on the machine code of a GPU.
    """
    if device.kind == "cuda":
        from fa2tvm.compile_cuda import compile_library

        return compile_library(variant, schedule, device, library)
    program = lower(variant, schedule, device)
    linker.require()
    import tvm

    objects = [library.with_name("program.o"), library.with_name("support.o")]
    source = library.with_name("support.ll")
    text = SUPPORT_IR.read_text(encoding="utf-8").replace("@PASS@", variant.pass_)
    source.write_text(text, encoding="utf-8")
    linker.write_object(program.mod, objects[0])
    linker.write_object(tvm.runtime.load_module(os.fspath(source)), objects[1])
    linker.link(objects, library)
    for made in (*objects, source):
        made.unlink()
    return None
