"""The CUDA side of this process: the GPUs as `Device`s, and the libraries that a module needs.

Needs torch, and of TVM two libraries of 4 MB, but not its Python package or its compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import threading
from pathlib import Path

from fa2tvm.device import Device, cuda_device
from fa2tvm.errors import StaleModule, UnsupportedProblem

# What TVM 0.27's CUDA runtime is linked to.
CUDART = "libcudart.so.13"
_LIBRARIES = ("libtvm_runtime.so", "libtvm_runtime_cuda.so")
_lock = threading.Lock()
_loaded: list[ctypes.CDLL] = []


@functools.cache
def device(index: int) -> Device:
    """A GPU of this process.

    Raises
    ------
    UnsupportedProblem
        Where PyTorch finds no such GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedProblem(
            f"the device is cuda:{index}, but PyTorch {torch.__version__} finds no NVIDIA GPU; "
            "name the GPU that is meant, like nvidia_h200."
        )
    found = torch.cuda.get_device_properties(index)
    return cuda_device(
        found.name,
        (found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        shared_bytes=getattr(found, "shared_memory_per_block_optin", 0),
        l2_bytes=getattr(found, "L2_cache_size", 0),
    )


def architectures() -> dict[str, str]:
    """The code that each GPU of this process runs (`sm_90a`), by its name."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {torch.cuda.get_device_name(i): device(i).arch for i in range(torch.cuda.device_count())}


def load_libraries() -> None:
    """Load TVM's runtime for CUDA, once.

    Raises
    ------
    StaleModule
        Where a library is missing; the message says which, and what to install.
    """
    # It brings libtvm_ffi.so, which the others are linked to.
    import tvm_ffi  # noqa: F401

    with _lock:
        if _loaded:
            return
        folder = _library_folder()
        _load_cudart()
        try:
            loaded = [ctypes.CDLL(os.fspath(folder / _LIBRARIES[0]), mode=ctypes.RTLD_GLOBAL)]
            loaded.append(ctypes.CDLL(os.fspath(folder / _LIBRARIES[1])))
        except OSError as error:
            raise StaleModule(_why_not(error)) from error
        _loaded.extend(loaded)


def _library_folder() -> Path:
    """The folder of TVM's libraries; `tvm` may be no more than a folder of that name."""
    spec = importlib.util.find_spec("tvm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "lib"
        if all((folder / name).exists() for name in _LIBRARIES):
            return folder
    raise StaleModule(
        f"{' and '.join(_LIBRARIES)} are not found in an installed tvm, but CUDA modules need "
        "them; install apache-tvm or put its lib folder on the Python path as tvm/lib."
    )


def _load_cudart() -> None:
    """CUDA's runtime, where pip installed one: the loader then knows it by name."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for found in Path(place).glob(f"*/lib/{CUDART}"):
            ctypes.CDLL(os.fspath(found), mode=ctypes.RTLD_GLOBAL)
            return


def _why_not(error: OSError) -> str:
    import torch

    built = torch.version.cuda
    if CUDART in str(error):
        torch_is = f"is built for CUDA {built}" if built else "is built without CUDA"
        return (
            f"{CUDART} is not found, but the runtime of TVM 0.27 needs it, and PyTorch "
            f"{torch.__version__} {torch_is}; install a PyTorch for CUDA 13, or "
            "pip install 'nvidia-cuda-runtime>=13'."
        )
    if "libcuda.so.1" in str(error):
        return "libcuda.so.1 is not found, but a GPU needs it; install NVIDIA's driver."
    return f"TVM's CUDA runtime cannot be loaded ({error}); install apache-tvm 0.27 again."
