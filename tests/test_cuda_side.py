"""The CUDA side as a machine without a GPU sees it: devices, choice, compiling, loading."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.machinery
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa2tvm import compile as compiler
from fa2tvm import (
    cuda_direct,
    cuda_launch,
    cuda_runtime,
    cuda_toolchain,
    direct,
    launch,
    linker,
    manifest,
    modules,
)
from fa2tvm.compile_cuda import compile_library
from fa2tvm.cuda_toolchain import compile_source, find_nvrtc, parse_report
from fa2tvm.device import GPUS, cuda_device, detect, gpu, nvidia_h200
from fa2tvm.errors import CompileFailed, StaleModule, UnsupportedProblem
from fa2tvm.lookup import choose_family, family_for, lookup
from fa2tvm.problem import PASSES, Problem, Shape, Variant
from fa2tvm.schedule import SCHEDULES, Sm90Forward

H200 = nvidia_h200()
FORWARD = Variant("forward", "bfloat16", 64, 64, True)
# ELF's number for NVIDIA's machine code, and where a file header has it.
EM_CUDA, ELF_MACHINE = 190, slice(18, 20)


def test_every_named_gpu_is_a_device() -> None:
    for slug, known in GPUS.items():
        device = gpu(slug)
        assert device == gpu(slug.removeprefix("nvidia_"))
        assert (device.slug, device.kind, device.arch) == (slug, "cuda", known.arch)
        assert device.target() == {"kind": "cuda", "arch": known.arch}
        assert 99 << 10 <= device.shared_bytes <= 227 << 10
    with pytest.raises(UnsupportedProblem, match="nvidia_h200"):
        gpu("nvidia_h2000")


@pytest.mark.parametrize(
    ("name", "capability", "slug", "arch"),
    [
        ("NVIDIA H200", (9, 0), "nvidia_h200", "sm_90a"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "nvidia_h100", "sm_90a"),
        ("NVIDIA H100 PCIe", (9, 0), "nvidia_h100_pcie", "sm_90a"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "nvidia_a100", "sm_80"),
        ("NVIDIA L40S", (8, 9), "nvidia_l40s", "sm_89"),
        ("NVIDIA L40", (8, 9), "nvidia_l40", "sm_89"),
        ("NVIDIA L4", (8, 9), "nvidia_l4", "sm_89"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "nvidia_geforce_rtx_4090", "sm_89"),
        ("NVIDIA B200", (10, 0), "nvidia_b200", "sm_100"),
    ],
)
def test_the_drivers_words(name: str, capability: tuple[int, int], slug: str, arch: str) -> None:
    device = cuda_device(name, capability, multiprocessors=7)
    assert (device.slug, device.arch, device.level, device.cores) == (slug, arch, arch, 7)
    assert device.shared_bytes >= 99 << 10
    exact = cuda_device(name, capability, 7, shared_bytes=123456, l2_bytes=654321)
    assert (exact.shared_bytes, exact.l2_bytes) == (123456, 654321)


def test_hopper_gets_its_family() -> None:
    assert family_for(H200, FORWARD) == family_for(H200) == "sm90"
    assert lookup(Problem(FORWARD, Shape(1, 1, 1, 9, 9)), H200).family == "sm90"


def test_a_family_that_cannot_is_passed_over_visibly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next family of the device does the variant, and the answer says why."""

    class Portable(Sm90Forward):
        family = "sm80"

        def reasons(self, variant: Variant, device: Any) -> list[str]:
            return []

    monkeypatch.setitem(SCHEDULES, ("sm80", "forward"), Portable)
    odd = dataclasses.replace(FORWARD, head_dim_qk=60)
    found = lookup(Problem(odd, Shape(1, 1, 1, 9, 9)), H200)
    assert found.family == "sm80"
    assert found.notes[0].startswith("sm90 was passed over: head_dim_qk is 60")
    family, notes = choose_family(gpu("a100"), FORWARD)
    assert family == "sm80"
    assert notes == ("sm90 was passed over: it needs sm_90a, but nvidia_a100 is sm_80.",)


def test_what_nobody_can_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SCHEDULES, ("sm90", "backward"), raising=False)
    monkeypatch.delitem(SCHEDULES, ("sm80", "backward"), raising=False)
    backward = dataclasses.replace(FORWARD, pass_="backward")
    with pytest.raises(UnsupportedProblem) as refused:
        family_for(H200, backward)
    said = str(refused.value)
    assert "backward_bfloat16_d64_causal on nvidia_h200 (sm_90a)" in said
    assert "sm90 was passed over: it has no backward kernel yet;" in said
    assert said.endswith("call PyTorch's own attention there.")
    assert said.count(". ") == 0


def test_multiprocessors_are_compiled_in() -> None:
    """A program for another number of them is another module."""
    schedule = Sm90Forward.default(FORWARD, H200)
    here, there = (compiler.module_name(FORWARD, schedule, d) for d in (H200, gpu("h100_pcie")))
    assert here != there


@pytest.fixture
def no_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nvcc" else which(name))


@pytest.mark.usefixtures("no_nvcc")
def test_no_cuda_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolchain, "find_nvrtc", lambda: None)
    with pytest.raises(CompileFailed, match=r"^it needs a CUDA compiler.*pip install 'fa2tvm"):
        compile_source("", "sm_90a", "it")


def test_nvrtc_is_found_with_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without CUDA's headers is none."""
    monkeypatch.setattr(cuda_toolchain, "_TOOLKITS", ())
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [os.fspath(tmp_path)]
    monkeypatch.setattr(cuda_toolchain.importlib.util, "find_spec", lambda _: spec)
    root = tmp_path / "cu13"
    (root / "lib").mkdir(parents=True)
    (root / "lib" / "libnvrtc.so.13").touch()
    assert find_nvrtc() is None
    (root / "include" / "cccl" / "cuda" / "std").mkdir(parents=True)
    (root / "include" / "cuda_bf16.h").touch()
    (root / "include" / "cccl" / "cuda" / "std" / "cstdint").touch()
    found = find_nvrtc()
    assert found is not None
    assert found.library == os.fspath(root / "lib" / "libnvrtc.so.13")
    assert found.includes == (root / "include", root / "include" / "cccl")


def test_report_is_the_worst_kernel() -> None:
    log = (
        "ptxas info    : Function properties for a\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers\n"
        "ptxas info    : Function properties for b\n"
        "    8 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized\n"
    )
    report = parse_report(log)
    assert (report.registers, report.spill_store_bytes, report.spill_load_bytes) == (168, 8, 16)
    assert len(report.warnings) == 1


def cuda_compiler_or_skip(kind: str) -> None:
    found = shutil.which("nvcc") if kind == "nvcc" else find_nvrtc()
    if found is None:
        pytest.skip(f"no {kind} is here: the Hopper program was not compiled")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nvcc", "NVRTC"])
def test_a_module_holds_machine_code(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, a driver or a C compiler; what it says of its code is what ptxas said."""
    cuda_compiler_or_skip(kind)
    if kind == "NVRTC":
        tools = tmp_path / "tools"
        tools.mkdir()
        program, _ = linker.require()
        (tools / Path(program).name).symlink_to(program)
        monkeypatch.setenv("PATH", os.fspath(tools))
    library = tmp_path / "module.so"
    code = compile_library(FORWARD, Sm90Forward.default(FORWARD, H200), H200, library)
    assert code["compiler"] == kind
    assert (code["arch"], code["runtime"]) == ("sm_90a", "libcudart.so.13")
    assert code["spill_bytes"] == 0
    assert 0 < code["registers"] <= 168
    assert 0 < code["shared_bytes"] <= H200.shared_bytes
    data = library.read_bytes()
    headers = [data[at : at + 64] for at in _all(data, b"\x7fELF")]
    machines = [int.from_bytes(header[ELF_MACHINE], "little") for header in headers]
    assert machines.count(EM_CUDA) == 1


def _all(data: bytes, pattern: bytes) -> list[int]:
    places, at = [], data.find(pattern)
    while at >= 0:
        places.append(at)
        at = data.find(pattern, at + 1)
    return places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A module folder for Hopper whose library is never loaded."""
    (tmp_path / manifest.LIBRARY).write_bytes(b"no library")
    described = manifest.describe(FORWARD, Sm90Forward.default(FORWARD, H200), H200)
    described["sha256"] = manifest.sha256_of(tmp_path / manifest.LIBRARY)
    (tmp_path / manifest.MANIFEST).write_text(json.dumps(described))
    return tmp_path


def test_another_gpu_is_refused_with_both_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS J01: code of another architecture is never launched."""
    monkeypatch.setattr(cuda_runtime, "architectures", lambda: {"NVIDIA A100": "sm_80"})
    with pytest.raises(StaleModule, match="compiled for sm_90a, but NVIDIA A100 is sm_80"):
        compiler.load(folder, trust=True)
    monkeypatch.setattr(cuda_runtime, "architectures", dict)
    with pytest.raises(StaleModule, match="compiled for sm_90a, but PyTorch finds no GPU here"):
        compiler.load(folder, trust=True)


def test_missing_libraries_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No TVM, a PyTorch of another CUDA, no driver: each is one sentence with the remedy."""
    monkeypatch.setattr(cuda_runtime, "architectures", lambda: {"NVIDIA H200": "sm_90a"})
    monkeypatch.setattr(cuda_runtime, "_loaded", [])
    monkeypatch.setattr(cuda_runtime.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StaleModule, match=r"libtvm_runtime_cuda.so are not found.*tvm/lib"):
        compiler.load(folder, trust=True)
    monkeypatch.setattr(cuda_runtime, "_library_folder", lambda: tmp_path)
    for reason, remedy in (
        ("libcudart.so.13: cannot open shared object file", "is built .*a PyTorch for CUDA 13"),
        ("libcuda.so.1: cannot open shared object file", "install NVIDIA's driver"),
        ("something else", "cannot be loaded .something else.; install apache-tvm"),
    ):

        def refuse(*_: Any, said: str = reason, **__: Any) -> None:
            raise OSError(said)

        monkeypatch.setattr(cuda_runtime.ctypes, "CDLL", refuse)
        with pytest.raises(StaleModule, match=remedy):
            compiler.load(folder, trust=True)


def test_tvm_may_be_a_folder_of_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libtvm_runtime.so", "libtvm_runtime_cuda.so"):
        (tmp_path / "tvm" / "lib").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tvm" / "lib" / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[os.fspath(tmp_path / "tvm")])
    monkeypatch.setattr(cuda_runtime.importlib.util, "find_spec", lambda _: spec)
    assert cuda_runtime._library_folder() == tmp_path / "tvm" / "lib"


def test_alignment() -> None:
    """What TMA cannot read is copied, and nothing else is."""
    x = torch.zeros(2, 6, 4, 64, dtype=torch.bfloat16)
    fine = [x, x[:, 1:], x[..., 8:56], x[:1].as_strided((1, 6, 4, 64), (7, 256, 64, 1))]
    fine.append(x[:1].expand(3, -1, -1, -1))
    assert all(cuda_launch.aligned(y) is y for y in fine)
    flat = torch.zeros(5000, dtype=torch.bfloat16)
    for y in (flat[1:].as_strided((1, 6, 4, 64), (1536, 256, 64, 1)), x[..., 1:9],
              flat.as_strided((2, 6, 1, 64), (500, 68, 1, 1))):  # fmt: skip
        copied = cuda_launch.aligned(y)
        assert copied is not y
        assert copied.is_contiguous()
        assert copied.equal(y)


@pytest.mark.parametrize(("scale", "factor"), [(0.25, 1.0), (-0.25, -1.0), (0.0, 0.0), (-0.0, 0.0)])
def test_scales_become_positive(scale: float, factor: float) -> None:
    q = torch.tensor([3.0, -2.0, torch.nan])
    changed, positive, by = cuda_launch.positive_scale(q, scale)
    assert by == factor
    assert positive > 0
    torch.testing.assert_close(changed * positive, q * scale, equal_nan=True)


def test_modules_of_a_cpu_are_untouched() -> None:
    """A CPU pack needs none of CUDA's libraries, and is chosen as before."""
    assert family_for(detect()) == "cpu"
    assert "code" not in manifest.describe(
        dataclasses.replace(FORWARD, dtype="float32"), SCHEDULES["cpu", "forward"](), detect()
    )


@dataclasses.dataclass
class Recorder:
    """A module that keeps what it is called with."""

    schedule: Any
    variant: Variant
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)

    def function(self, *arguments: Any) -> None:
        self.calls.append(arguments)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """Modules of both passes that launch nothing, under calls on tensors of the CPU."""
    found: dict[str, Recorder] = {}
    for pass_ in PASSES:
        variant = dataclasses.replace(FORWARD, pass_=pass_)
        found[pass_] = Recorder(SCHEDULES["sm90", pass_].default(variant, H200), variant)
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(cuda_direct, "module_for", lambda p, _: found[p.variant.pass_])
    monkeypatch.setattr(cuda_launch, "element", lambda dtype, _: torch.empty((), dtype=dtype))
    monkeypatch.setattr(cuda_launch, "unread", lambda _: torch.empty(cuda_launch.UNREAD_FLOATS))
    monkeypatch.setattr(cuda_launch, "counter", lambda *_, **__: counter)
    monkeypatch.setattr(cuda_launch, "unused_counter", lambda _: counter)
    monkeypatch.setattr(cuda_launch, "on_device_of", contextlib.nullcontext)
    modules.forget()
    return found


def described(arguments: tuple[Any, ...]) -> list[Any]:
    """What a program sees: sizes, strides and dtype of a tensor, anything else itself."""
    return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x for x in arguments]


def inputs() -> list[torch.Tensor]:
    q = torch.randn(2, 70, 4, 64).to(torch.bfloat16)
    return [q, *(torch.randn(2, 90, 2, 64).to(torch.bfloat16) for _ in "kv")]


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_the_direct_forward_passes_what_launch_does(
    recorders: dict[str, Recorder], alignment: Any
) -> None:
    """Twice, since the second call takes what the first one remembered."""
    module = recorders["forward"]
    q, k, v = inputs()
    for keep_lse in (True, False):
        out, lse = cuda_direct.attention(q, k, v, None, True, alignment, keep_lse) or (None, None)
        assert module.calls[-1][0] is q
        assert module.calls[-1][3] is out
        assert module.calls[-1][4] is lse
        offset = 20 if alignment == "bottom_right" else 0
        launch._forward_on_gpu(module, q, k, v, out, lse, 0.125, offset)
        assert described(module.calls[-2]) == described(module.calls[-1])


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, True), (True, False, False)])
def test_the_direct_backward_passes_what_launch_does(
    recorders: dict[str, Recorder], needs: tuple[bool, bool, bool]
) -> None:
    """After a forward of the same shapes, whose remembered call is another one."""
    module = recorders["backward"]
    q, k, v = inputs()
    out, lse = cuda_direct.attention(q, k, v, None, True, "bottom_right") or (q, q)
    dout = torch.randn_like(out)
    for _ in range(2):
        gradients = cuda_direct.backward(q, k, v, out, lse, dout, None, True, "bottom_right", needs)
        assert gradients is not None
        assert tuple(x is not None for x in gradients) == needs
        for gradient, x in zip(gradients, (q, k, v), strict=True):
            assert gradient is None or gradient.shape == x.shape
        arguments = (q, k, v, out, lse, dout, None, 0.125, 20)
        launch._backward_on_gpu(module, *arguments, gradients)
        direct_call, launch_call = module.calls[-2:]
        assert described(direct_call) == described(launch_call)
        assert all(x is y for x, y in zip(direct_call[:10], launch_call[:10], strict=True)), (
            "a tensor is in another place"
        )


def test_the_direct_path_leaves_the_rest_to_launch(recorders: dict[str, Recorder]) -> None:
    """A scale that Q must change for, and tensors that must be copied."""
    q, k, v = inputs()
    ask = ("bottom_right",)
    assert cuda_direct.attention(q, k, v, -0.5, True, *ask) is None
    assert cuda_direct.attention(q, k, v, 0.0, True, *ask) is None
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert cuda_direct.attention(shifted, k, v, None, True, *ask) is None
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)
    assert cuda_direct.attention(turned, k, v, None, True, *ask) is None
    assert cuda_direct.attention(torch._neg_view(q), k, v, None, True, *ask) is None
    out, lse = cuda_direct.attention(q, k, v, None, True, *ask) or (q, q)
    expanded = torch.ones((), dtype=q.dtype).expand(q.shape)
    everything = (True, True, True)
    assert cuda_direct.backward(q, k, v, out, lse, expanded, None, True, *ask, everything) is None
    assert len(recorders["forward"].calls) == 1
    assert not recorders["backward"].calls


def test_pytorchs_switch_chooses_a_deterministic_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled if need be; a pack's that is deterministic serves the others last."""
    chosen: list[Any] = []
    monkeypatch.setattr(modules, "_load", lambda _, schedule, __: chosen.append(schedule))
    backward = Problem(dataclasses.replace(FORWARD, pass_="backward"), Shape(1, 1, 1, 64, 64))
    modules.forget()
    monkeypatch.setattr(modules, "_loaded", {})
    modules.module_for(backward, H200)
    modules.module_for(backward, H200, deterministic=True)
    assert [s.deterministic for s in chosen] == [False, True]
    modules.forget()

    def packed(deterministic: bool) -> SimpleNamespace:
        return SimpleNamespace(
            variant=backward.variant,
            length_class=None,
            manifest={"target": H200.target()},
            schedule=dataclasses.replace(chosen[0], deterministic=deterministic),
        )

    both = [packed(True), packed(False)]
    monkeypatch.setattr(modules, "_packs", both)
    assert modules.module_for(backward, H200) is both[1]
    assert modules.module_for(backward, H200, deterministic=True) is both[0]
    modules.forget()
    monkeypatch.setattr(modules, "_packs", both[:1])
    assert modules.module_for(backward, H200) is both[0]
    modules.forget()


def test_a_remembered_forward_is_not_taken_for_a_backward(
    recorders: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that `launch` does, after a forward of the same shapes on the direct path."""
    q, k, v = inputs()
    out, lse = cuda_direct.attention(q, k, v, None, True, "bottom_right") or (q, q)
    given: list[Any] = []

    def backward(*arguments: Any) -> tuple[None, None, None]:
        given.extend(arguments)
        return None, None, None

    monkeypatch.setattr(direct, "module_for", lambda p, _: recorders[p.variant.pass_])
    monkeypatch.setattr(launch, "backward", backward)
    context = SimpleNamespace(
        saved_tensors=(q, k, v, out, lse),
        options=(None, True, "bottom_right"),
        needs_input_grad=(True, True, True, False),
    )
    with torch.no_grad():
        direct._OutAndLse.backward(context, torch.ones_like(out), None)
    assert given[0] is recorders["backward"]
    assert given[8:] == [0.125, 20, (True, True, True)]
