"""CUDA kernels by themselves, without a module around them: what tries the emulator itself out."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from emulator import toolchain
from emulator.memory import Array, Guarded


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel of CUDA source whose parameters are pointers only."""

    code: str
    kernel: str
    grid: int
    threads: int
    shared_bytes: int
    arrays: tuple[Array, ...]
    seed: int


def launch(asked: Launch, folder: Path) -> tuple[dict[str, np.ndarray[Any, Any]], str]:
    """What a launch wrote, by the arrays' names, and the sentence of what is wrong with it."""
    library = ctypes.CDLL(os.fspath(toolchain.library(asked.code, folder)))
    arrays = [Guarded(x) for x in asked.arrays]
    library.fa2tvm_emulate_order(ctypes.c_uint64(asked.seed), ctypes.c_uint(1))
    library.fa2tvm_emulate_memory(b"", None, ctypes.c_size_t(0), 0)
    pointers = []
    for x in arrays:
        pointers.append(ctypes.c_void_p(x.bytes.ctypes.data))
        library.fa2tvm_emulate_memory(
            x.array.name.encode(), pointers[-1], ctypes.c_size_t(x.bytes.nbytes), x.array.writable
        )
    message = ctypes.create_string_buffer(4096)
    library.fa2tvm_emulate(
        asked.kernel.encode(),
        (ctypes.c_uint * 3)(asked.grid, 1, 1),
        (ctypes.c_uint * 3)(asked.threads, 1, 1),
        ctypes.c_uint(asked.shared_bytes),
        (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(x) for x in pointers)),
        message,
        ctypes.c_size_t(len(message)),
    )
    return {x.array.name: x.bytes.copy() for x in arrays if x.array.writable}, (
        message.value.decode()
    )
