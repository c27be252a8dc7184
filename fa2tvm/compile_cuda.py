"""TensorIR to a shared library with the cubin inside; no GPU, driver or toolkit need be there.

TVM embeds CUDA source instead of a cubin, silently, where its CUDA runtime cannot be loaded. Where
libcuda.so.1 or libcudart.so.13 is missing, the program is therefore compiled in a process of its
own that finds stubs of them, of which nothing is ever called; and the result is looked at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa2tvm import cuda_runtime, linker
from fa2tvm.cuda_pipeline import pipeline_for
from fa2tvm.cuda_toolchain import Cubin, PtxasReport, compile_source
from fa2tvm.device import Device
from fa2tvm.errors import CompileFailed, Fa2tvmError
from fa2tvm.problem import Variant
from fa2tvm.schedule import Schedule, schedule_from_dict

# What libtvm_runtime_cuda.so asks of the driver and of CUDA's runtime.
_STUBS = {
    "libcuda.so.1": (
        "cuDeviceGetName cuFuncSetAttribute cuGetErrorName cuGetErrorString cuLaunchKernelEx "
        "cuModuleGetFunction cuModuleLoadData cuModuleUnload cuTensorMapEncodeTiled"
    ),
    "libcudart.so.13": (
        "cudaDeviceGetAttribute cudaEventCreate cudaEventDestroy cudaEventElapsedTime "
        "cudaEventRecord cudaEventSynchronize cudaFree cudaFreeHost cudaGetDevice "
        "cudaGetDeviceCount cudaGetDeviceProperties cudaGetErrorName cudaGetErrorString "
        "cudaGetLastError cudaGraphDestroy cudaGraphExecDestroy cudaGraphInstantiate "
        "cudaGraphLaunch cudaMalloc cudaMallocHost cudaMemGetInfo cudaMemcpyAsync "
        "cudaMemcpyPeerAsync cudaPeekAtLastError cudaSetDevice cudaStreamBeginCapture "
        "cudaStreamCreate cudaStreamCreateWithFlags cudaStreamDestroy cudaStreamEndCapture "
        "cudaStreamSynchronize cudaStreamWaitEvent"
    ),
}
# CUDA's "no device", which is what a stub answers if it is called after all.
_NO_DEVICE = 100
_CALLBACK = "tvm_callback_cuda_compile"
# Source, architecture and what is compiled -> machine code.
Compiler = Callable[[str, str, str], Cubin]
_lock = threading.Lock()


@dataclass(frozen=True)
class CudaModule:
    """A compiled module: the library to load, its cubin, its CUDA source and the report on it."""

    library: Path
    cubin: Path
    source: Path
    report: PtxasReport


def compile_library(
    variant: Variant, schedule: Schedule, device: Device, library: Path
) -> dict[str, Any]:
    """Compile a variant's program into `library`.

    Returns
    -------
    dict
        What the manifest says of the code: `arch`, `runtime`, `compiler`, `registers`,
        `spill_bytes`, `shared_bytes`, `warnings`.

    Raises
    ------
    CompileFailed
        Where TVM, a linker or a CUDA compiler is missing or refuses the program.
    """
    if needs_stubs():
        return _in_process_with_stubs(variant, schedule, device, library)
    return _compile_here(variant, schedule, device, library)[0]


def needs_stubs() -> bool:
    """Whether this process cannot load TVM's CUDA runtime, without which TVM embeds source."""
    try:
        cuda_runtime.load_libraries()
    except Fa2tvmError:
        return True
    return False


def stub_environment(folder: Path) -> dict[str, str]:
    """The environment with stubs of CUDA's libraries in `folder` first on the library path.

    Raises
    ------
    CompileFailed
        Where TVM or a linker is missing.
    """
    import tvm

    folder.mkdir(parents=True, exist_ok=True)
    for name, functions in _STUBS.items():
        source, program = folder / f"{name}.ll", folder / f"{name}.o"
        lines = (f"define i32 @{f}() {{ ret i32 {_NO_DEVICE} }}\n" for f in functions.split())
        source.write_text("".join(lines), encoding="utf-8")
        linker.write_object(tvm.runtime.load_module(os.fspath(source)), program)
        symbols = folder / f"{name}.map"
        symbols.write_text(f"{name} {{ global: *; }};\n", encoding="utf-8")
        linker.link([program], folder / name, f"-soname={name}", f"--version-script={symbols}")
    paths = [os.fspath(folder.absolute()), os.environ.get("LD_LIBRARY_PATH", "")]
    return os.environ | {"LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def compile_module(
    variant: Variant,
    schedule: Schedule,
    device: Device,
    folder: Path,
    name: str,
    compiler: Compiler = compile_source,
) -> CudaModule:
    """Compile a variant's program to `folder/name.so` and leave its cubin and source beside it.

    Parameters
    ----------
    compiler
        What takes the CUDA source.

    Raises
    ------
    CompileFailed
        As `compile_library` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}.so"
    _, cubin, code = _compile_here(variant, schedule, device, library, compiler)
    binary, source = folder / f"{name}.cubin", folder / f"{name}.cu"
    binary.write_bytes(cubin.code)
    source.write_text(code, encoding="utf-8")
    return CudaModule(library, binary, source, cubin.report)


def _compile_here(
    variant: Variant,
    schedule: Schedule,
    device: Device,
    library: Path,
    compiler: Compiler = compile_source,
) -> tuple[dict[str, Any], Cubin, str]:
    """Compile in this process: what the manifest says, the cubin and its source."""
    try:
        import tvm
        import tvm_ffi

        from fa2tvm import kernels
    except ImportError as error:
        raise CompileFailed(
            f"the TVM compiler cannot be imported ({error}), but {variant.name} is not compiled "
            "yet; install apache-tvm or load a pack that holds it."
        ) from error
    made: list[tuple[Cubin, str]] = []
    refused: list[CompileFailed] = []

    def compile_cubin(code: str) -> bytes:
        try:
            made.append((compiler(code, device.arch, variant.name), code))
        except CompileFailed as error:
            # TVM passes it on as an error of its own.
            refused.append(error)
            raise
        return made[-1][0].code

    target = tvm.target.Target(device.target())
    with _lock:
        theirs = tvm_ffi.get_global_func(_CALLBACK, allow_missing=True)
        tvm_ffi.register_global_func(_CALLBACK, compile_cubin, override=True)
        try:
            with target:
                program = kernels.build(variant, schedule, device)
                executable = tvm.compile(
                    program, target=target, tir_pipeline=pipeline_for(schedule)
                )
            executable.export_library(os.fspath(library), fcompile=_export)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, Fa2tvmError):
                raise
            if refused:
                raise refused[0] from None
            first = "".join(str(error).strip().splitlines()[:1])
            raise CompileFailed(
                f"TVM refused {variant.name} with schedule {schedule.to_dict()} ({first})."
            ) from error
        finally:
            if theirs is not None:
                tvm_ffi.register_global_func(_CALLBACK, theirs, override=True)
    if len(made) != 1 or made[0][0].code not in library.read_bytes():
        raise CompileFailed(
            f"TVM embedded no machine code in {library.name} of {variant.name}, because its CUDA "
            "runtime is not loaded; report this as a bug."
        )
    cubin, code = made[0]
    return _facts(variant, schedule, device, cubin), cubin, code


def _facts(variant: Variant, schedule: Schedule, device: Device, cubin: Cubin) -> dict[str, Any]:
    report = cubin.report
    return {
        "arch": device.arch,
        "runtime": cuda_runtime.CUDART,
        "compiler": cubin.compiler,
        "registers": report.registers,
        "spill_bytes": report.spill_store_bytes + report.spill_load_bytes,
        "shared_bytes": schedule.footprint(variant, device).scratch_bytes,
        "warnings": list(report.warnings),
    }


def _export(library: str, objects: list[str], **_: Any) -> None:
    """How TVM links an exported module: by the linker that CPU modules use, no C compiler."""
    linker.link([Path(path) for path in objects], Path(library))


def _in_process_with_stubs(
    variant: Variant, schedule: Schedule, device: Device, library: Path
) -> dict[str, Any]:
    request = {
        "variant": variant.to_dict(),
        "family": schedule.family,
        "schedule": schedule.to_dict(),
        "device": asdict(device),
        "library": os.fspath(library.absolute()),
    }
    with tempfile.TemporaryDirectory(prefix="fa2tvm-stubs-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "fa2tvm.compile_cuda"],
            input=json.dumps(request),
            env=stub_environment(Path(folder)) | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise CompileFailed(
            f"the process that compiled {variant.name} ended with code {done.returncode} and no "
            f"answer: {done.stderr.strip()[-500:]}"
        ) from None
    if "error" in answer:
        raise CompileFailed(answer["error"])
    return dict(answer)


def _main() -> None:
    """Compile what standard input asks for, and answer on standard output."""
    asked = json.loads(sys.stdin.read())
    variant = Variant(**asked["variant"])
    schedule = schedule_from_dict(asked["family"], variant.pass_, asked["schedule"])
    device = Device(**asked["device"] | {"features": tuple(asked["device"]["features"])})
    try:
        cuda_runtime.load_libraries()
        answer = _compile_here(variant, schedule, device, Path(asked["library"]))[0]
    except Fa2tvmError as error:
        answer = {"error": str(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    _main()
