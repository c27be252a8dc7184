"""What a launch on a GPU needs beside the tensors: their alignment, device, scale and tile counter.

Counters. A kernel whose thread blocks draw their tiles from a shared counter gets one int32 that is
zero, and leaves it zero. Launches that may overlap must not share one, and those of one stream
never overlap: every (device, stream) has its own for the life of the process. A graph may be
replayed on any stream, so a call that is captured gets a counter of its own, zeroed by the graph
itself, in memory that belongs to the graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

Tensor = torch.Tensor
# TMA and 16-byte loads want base and strides aligned so.
ALIGNMENT_BYTES = 16
# int32 elements between two counters, a cache line, and counters of one allocation.
_SPACING, _SLOTS = 32, 128
UNREAD_FLOATS = 4096
# cudaStreamPerThread is one handle for a stream of each thread.
_PER_THREAD_STREAM = 2
_counters: dict[tuple[int, int], Tensor] = {}
_free: dict[int, list[Tensor]] = {}
_lock = threading.Lock()
_C: Any = torch._C


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its base or a stride is no multiple of 16 bytes.

    Its innermost stride is 1 already.
    """
    if is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    """Whether base and strides are multiples of 16 bytes; those of size-1 dims do not matter."""
    size = tensor.element_size()
    return tensor.data_ptr() % ALIGNMENT_BYTES == 0 and all(
        n == 1 or stride * size % ALIGNMENT_BYTES == 0
        for n, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def positive_scale(q: Tensor, softmax_scale: float) -> tuple[Tensor, float, float]:
    """Q and a scale above 0 of the same logits, and the factor by which that Q is the given one.

    The kernels' running maximum wants a positive scale. What is exact: negation, and zero (times a
    NaN still NaN).
    """
    if softmax_scale < 0:
        return -q, -softmax_scale, -1.0
    if softmax_scale == 0:
        return q * 0, 1.0, 0.0
    return q, softmax_scale, 1.0


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Make the tensor's GPU the current one, which TVM's launch does and does not undo."""
    if _C._cuda_getDevice() == tensor.device.index:
        yield
    else:
        with torch.cuda.device(tensor.device):
            yield


def counter(index: int, *, is_used: bool = True) -> Tensor:
    """A tile counter for a launch on GPU `index`'s current stream, which is the current device.

    Parameters
    ----------
    is_used
        False where the kernel takes a counter but does not touch it.
    """
    if not is_used:
        return unused_counter(index)
    stream = _C._cuda_getCurrentRawStream(index)
    found = _counters.get((index, stream))
    # The default stream, 0, cannot be captured.
    if found is not None and not (stream and _C._cuda_isCurrentStreamCapturing()):
        return found
    if stream == _PER_THREAD_STREAM or _C._cuda_isCurrentStreamCapturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    with _lock:
        if (index, stream) not in _counters:
            if not _free.get(index):
                _free[index] = _new_counters(index)
            _counters[index, stream] = _free[index].pop()
        return _counters[index, stream]


@functools.cache
def unused_counter(index: int) -> Tensor:
    """A counter for kernels that take one and do not touch it, on any stream."""
    return _outside_of_graphs(
        index, lambda: torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    )


@functools.cache
def unread(index: int) -> Tensor:
    """float32 memory for results that nobody reads; it stays, as graphs may hold its address."""
    return _outside_of_graphs(
        index, lambda: torch.empty(UNREAD_FLOATS, dtype=torch.float32, device=f"cuda:{index}")
    )


@functools.cache
def element(dtype: torch.dtype, index: int) -> Tensor:
    """One element on a GPU, of any value, in memory of no graph."""
    return _outside_of_graphs(index, lambda: torch.empty((), dtype=dtype, device=f"cuda:{index}"))


def _new_counters(index: int) -> list[Tensor]:
    def zeros() -> Tensor:
        memory = torch.zeros(_SLOTS, _SPACING, dtype=torch.int32, device=f"cuda:{index}")
        torch.cuda.current_stream().synchronize()
        return memory

    return [row[:1] for row in _outside_of_graphs(index, zeros).unbind()]


def _outside_of_graphs(index: int, allocate: Callable[[], Tensor]) -> Tensor:
    """Allocate in a thread of its own, which no capture routes to the memory of its graph.

    What lives as long as the process must not lie there.
    """
    made: list[Tensor] = []

    def run() -> None:
        with torch.inference_mode(False), torch.cuda.device(index):
            made.append(allocate())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]
