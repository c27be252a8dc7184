"""Host memory that a module takes for a GPU's: DLPack tensors of type CUDA between guards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_GUARD_BYTES = 4096
_ALIGNMENT_BYTES = 256
# Of every byte: NaN in each floating type.
_POISON = 0xFF
_CUDA = 2
# DLDataTypeCode and bits.
_DTYPES = {"bfloat16": (4, 16), "float16": (2, 16), "float32": (2, 32), "int32": (0, 32)}


@dataclass(frozen=True)
class Array:
    """A tensor as one process hands it to another.

    Attributes
    ----------
    storage
        All bytes of the memory that the tensor is a view of.
    shape, strides, offset
        In elements.
    writable
        Whether kernels may write to it; the storage then comes back.
    """

    name: str
    dtype: str
    storage: np.ndarray[Any, Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    writable: bool = False


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
    )


@_Deleter
def _keep(_: int | None) -> None:
    """Nothing to free: `Guarded` owns the memory."""


_new_capsule: Callable[..., Any] = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object  # type: ignore[attr-defined]
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)  # type: ignore[attr-defined]


class Guarded:
    """An array in memory of its own, with guards before and behind; what DLPack exports.

    It must outlive the tensors made of it.
    """

    def __init__(self, array: Array) -> None:
        self.array = array
        size = array.storage.nbytes
        self._memory = np.full(size + 2 * _GUARD_BYTES + _ALIGNMENT_BYTES, _POISON, np.uint8)
        start = _GUARD_BYTES
        start += -(self._memory.ctypes.data + start) % _ALIGNMENT_BYTES
        self.bytes = self._memory[start : start + size]
        self.bytes[:] = array.storage.view(np.uint8).reshape(-1)
        self._guards = (self._memory[:start], self._memory[start + size :])
        code, bits = _DTYPES[array.dtype]
        dims = len(array.shape)
        self._sizes = (ctypes.c_int64 * dims)(*array.shape)
        self._strides = (ctypes.c_int64 * dims)(*array.strides)
        tensor = _DLTensor(
            self.bytes.ctypes.data + array.offset * bits // 8,
            _CUDA,
            0,
            dims,
            code,
            bits,
            1,
            self._sizes,
            self._strides,
            0,
        )
        self._managed = _DLManagedTensor(tensor, None, _keep)

    def __dlpack__(self) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def why_damaged(self) -> str | None:
        """What was written where nothing may be; None if nothing was."""
        name = self.array.name
        for guard, where in zip(self._guards, ("before", "behind"), strict=True):
            if (guard != _POISON).any():
                return f"memory {where} {name} was written to"
        if not self.array.writable and (self.bytes != self.array.storage.reshape(-1)).any():
            return f"{name} was written to, but it is an input"
        return None
