"""The processes in which modules are compiled and run: they know the stand-ins for CUDA only."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulator import kernels, modules, toolchain
from emulator.memory import Array, Guarded
from fa2tvm import cuda_runtime
from fa2tvm.device import Device, usable_cores
from fa2tvm.errors import Fa2tvmError

_stand_ins: list[ctypes.CDLL] = []
_loaded: dict[Path, Any] = {}


class EmulationFailed(AssertionError):
    """The emulator refused what a kernel does; the message says what."""


@dataclass(frozen=True)
class Call:
    """One call of a module's function.

    Attributes
    ----------
    arguments
        `Array`s and numbers, in the order of the kernel ABI.
    seed
        Of the adversarial order.
    device
        What the module is compiled for.
    mutant
        As `Program`.
    limit_s
        Seconds of CPU that it may take.
    """

    module: Path
    function: str
    arguments: tuple[Array | int | float, ...]
    seed: int
    device: Device
    mutant: int = -1
    limit_s: float = 120.0


Storages = dict[str, np.ndarray[Any, Any]]


class Emulator:
    """Processes that compile and run, as many as there are cores."""

    def __init__(self, workers: int | None = None) -> None:
        self._folder = modules.folder()
        toolchain.stand_ins(self._folder)
        self._workers = workers or usable_cores()
        self._pool = self._new_pool()
        self._modules: dict[Path, Future[None]] = {}

    def __enter__(self) -> Emulator:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def build(self, program: modules.Program) -> Path:
        """Begin to compile a program; the path of the module that it will be."""
        path = program.path
        if path not in self._modules and not path.exists():
            self._modules[path] = self._pool.submit(modules.make, program, path)
        return path

    def mutants(self, program: modules.Program) -> list[str]:
        """What the mutants of a program leave out."""
        program = dataclasses.replace(program, mutant=-1)
        path = self.build(program)
        if path in self._modules:
            self._modules[path].result()
        return program.mutants

    def run(self, call: Call) -> Storages:
        """The storages of a call's writable arrays afterwards, once its module is compiled.

        Raises
        ------
        EmulationFailed
            Where the emulator finds fault with the kernel, or a call takes too long.
        """
        if call.module in self._modules:
            self._modules[call.module].result()
        return self._answer(self._pool.submit(_run, call))

    def launch(self, launch: kernels.Launch) -> Storages:
        """As `run`, for a kernel by itself."""
        return self._answer(self._pool.submit(kernels.launch, launch, self._folder))

    def _answer(self, future: Future[tuple[Storages, str]]) -> Storages:
        try:
            results, failure = future.result()
        except BrokenProcessPool:
            self._pool = self._new_pool()
            self._modules.clear()
            raise EmulationFailed(
                "the process that ran the kernel died: a crash, or too long without an end"
            ) from None
        if failure:
            raise EmulationFailed(failure)
        return results

    def _new_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(self._workers, context, _start, (self._folder,))


def _start(folder: Path) -> None:
    """Load the stand-ins before anything that might load the real ones."""
    # tvm_ffi imports PyTorch where it can, and that of a GPU brings CUDA's libraries along.
    sys.modules["torch"] = None  # type: ignore[assignment]
    for path in toolchain.stand_ins(folder):
        _stand_ins.append(ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_GLOBAL))
    cuda_runtime.load_libraries()


def _run(call: Call) -> tuple[Storages, str]:
    """What a call wrote, and the sentence of what is wrong with it."""
    import tvm_ffi

    driver = _stand_ins[0]
    arrays = {x.name: Guarded(x) for x in call.arguments if isinstance(x, Array)}
    cores, shared_bytes = call.device.cores, call.device.shared_bytes
    driver.fa2tvm_driver_order(ctypes.c_uint64(call.seed), ctypes.c_uint(cores))
    driver.fa2tvm_driver_shared_bytes(ctypes.c_uint(shared_bytes))
    driver.fa2tvm_driver_mutant(ctypes.c_int(call.mutant))
    driver.fa2tvm_driver_memory(b"", None, ctypes.c_size_t(0), 0)
    for name, x in arrays.items():
        address, size = ctypes.c_void_p(x.bytes.ctypes.data), ctypes.c_size_t(x.bytes.nbytes)
        driver.fa2tvm_driver_memory(name.encode(), address, size, int(x.array.writable))
    if call.module not in _loaded:
        _loaded[call.module] = tvm_ffi.load_module(os.fspath(call.module))
    function = _loaded[call.module][call.function]
    arguments = [
        tvm_ffi.from_dlpack(arrays[x.name]) if isinstance(x, Array) else x for x in call.arguments
    ]
    # What does not end is ended: the process dies of this signal.
    signal.setitimer(signal.ITIMER_VIRTUAL, call.limit_s)
    failure = ""
    try:
        function(*arguments)
    except (RuntimeError, ValueError, TypeError, Fa2tvmError) as error:
        failure = str(error)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    failure = failure or next((r for r in (x.why_damaged() for x in arrays.values()) if r), "")
    return {n: x.bytes.copy() for n, x in arrays.items() if x.array.writable}, failure
