"""Whose threads run a kernel: PyTorch's OpenMP pool, reached without linking against it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

Pool = Literal["openmp", "tvm", "serial"]
_OPENMP_FUNCTIONS = ("GOMP_parallel", "omp_get_max_threads", "omp_in_parallel")


@dataclass(frozen=True)
class Threads:
    """Where kernels get their threads from.

    Attributes
    ----------
    pool
        "openmp" is PyTorch's own pool, "tvm" is that of TVM's runtime library where no OpenMP
        runtime is found, "serial" where neither exists.
    addresses
        Of `GOMP_parallel`, `omp_get_max_threads` and `omp_in_parallel`; zeros without OpenMP.
    """

    pool: Pool
    addresses: tuple[int, int, int] = (0, 0, 0)


class Attachment:
    """A loaded module's connection to its threads; the module keeps it alive."""

    def __init__(self, library: Any) -> None:
        self._setup = library["fa2tvm_setup"]
        threads = find()
        self._setup(*threads.addresses, threads.pool == "tvm")
        _attached.add(self)
        _register_fork_handler()
        if _in_forked_child:
            self.detach()

    def detach(self) -> None:
        """From now on the module runs on its caller's thread alone."""
        self._setup(0, 0, 0, False)


_in_forked_child = False
_attached: weakref.WeakSet[Attachment] = weakref.WeakSet()


@functools.cache
def find() -> Threads:
    """The pool that this process has; TVM's is started here where there is no better one."""
    addresses = _openmp()
    if addresses is not None:
        return Threads("openmp", addresses)
    return Threads("tvm" if _start_tvm_pool() else "serial")


def count() -> int:
    """Threads that a call made now may use: `torch.get_num_threads()`, 1 in a forked child.

    The workers of an OpenMP pool do not survive a fork; waiting for them would hang.
    """
    return 1 if _in_forked_child else torch.get_num_threads()


def _openmp() -> tuple[int, int, int] | None:
    """Functions of the OpenMP runtime that torch itself is bound to.

    The dynamic linker answers as it answered torch: the process's global symbols first, then the
    libraries that libtorch_cpu depends on.
    """
    libraries: list[ctypes.CDLL] = [ctypes.CDLL(None)]
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if torch_cpu.exists():
        libraries.append(ctypes.CDLL(os.fspath(torch_cpu)))
    for library in libraries:
        if all(hasattr(library, name) for name in _OPENMP_FUNCTIONS):
            first, second, third = (
                ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
                for name in _OPENMP_FUNCTIONS
            )
            return first, second, third
    return None


def tvm_runtime() -> Path | None:
    """TVM's small runtime library, where it is installed."""
    spec = importlib.util.find_spec("tvm")
    if spec is None or not spec.submodule_search_locations:
        return None
    library = Path(spec.submodule_search_locations[0]) / "lib" / "libtvm_runtime.so"
    return library if library.exists() else None


def _start_tvm_pool() -> bool:
    """Load TVM's runtime library, which offers its pool to modules loaded later."""
    library = tvm_runtime()
    if library is None:
        return False
    # TVM pins its workers to cores by default, and several processes then share one core.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    os.environ.setdefault("TVM_NUM_THREADS", str(torch.get_num_threads()))
    ctypes.CDLL(os.fspath(library), mode=ctypes.RTLD_GLOBAL)
    return True


@functools.cache
def _register_fork_handler() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    global _in_forked_child
    _in_forked_child = True
    for attachment in _attached:
        attachment.detach()
