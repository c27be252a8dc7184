"""The Hopper backward compiles as meant, without a GPU; its schedules fit or say why not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from early import EarlyBuild, hopper_build, parameters
from test_sm90_compile import disassembler

from fa2tvm.cuda_toolchain import describe_compiler
from fa2tvm.device import nvidia_h200
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import SM90_HEAD_DIMS, Sm90Backward

DEVICE = nvidia_h200()
# Every tile width, either mask and dtype, dims that TMA pads, dv != dqk, both ways of dQ, both
# orders of its sum, and the arrangements that are no default.
SPECS = {
    "d64": "d=64",
    "d64c": "d=64,causal=True",
    "d128": "d=128",
    "half128c": "d=128,dtype='float16',causal=True",
    "d256c": "d=256,causal=True",
    "padded": "d=80,causal=True",
    "mixed": "d=192,dv=128",
    "registers": "d=64,bulk_dq=False,early_dk=False",
    "ordered": "d=64,causal=True,deterministic=True",
    "late": "d=64,causal=True,early_dv=False,halves=False",
    "halves": "d=128,early_dk=False",
    "roles": "d=256,causal=True,block_kv=64,do_stages=2",
}


def begin(items: list[pytest.Item], folder: Path) -> EarlyBuild | None:
    """Start to compile what the selected tests look at."""
    tests = (
        "test_no_serialised_gemms",
        "test_tensor_cores_through_wgmma",
        "test_no_spills_between_gemms",
    )
    chosen = {p["name"] for test in tests for p in parameters(items, test)}
    specs = {n: f"pass_='backward',{spec}" for n, spec in SPECS.items() if n in chosen}
    return hopper_build(folder, specs) if describe_compiler() else None


@pytest.fixture(scope="module")
def built(early: dict[str, Any]) -> Path:
    """A folder of the selected SPECS."""
    build: EarlyBuild | None = early[__name__]
    if build is None:
        pytest.skip("neither nvcc nor NVRTC is here: the Hopper kernels were not compiled")
    return build.wait()


def kernels(cubin: Path) -> dict[str, list[str]]:
    """The instructions of each kernel, in order."""
    tool = disassembler()
    if tool is None:
        pytest.skip("cuobjdump is neither on PATH nor installed: the code was not disassembled")
    sass = subprocess.run(
        [tool, "-sass", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = {}
    for part in sass.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        found[name.strip()] = re.findall(
            r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", body, re.MULTILINE
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_no_serialised_gemms(built: Path, name: str) -> None:
    report = json.loads((built / f"{name}.json").read_text())["report"]
    assert report["warnings"] == []
    assert 0 < report["registers"] <= 168


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_tensor_cores_through_wgmma(built: Path, name: str) -> None:
    found = kernels(built / f"{name}.cubin")
    assert len(found) == 4
    everything = [instruction for kernel in found.values() for instruction in kernel]
    assert "HMMA" not in everything
    sweeps = [k for k in found.values() if "HGMMA" in k]
    assert len(sweeps) == 2
    for kernel in found.values():
        if "HGMMA" in kernel:
            assert "UTMALDG" in kernel
        else:
            assert {"LDL", "STL"}.isdisjoint(kernel)
    # Where dQ is not needed, a fifth of the products is not made.
    fewer, all_five = sorted(sweep.count("HGMMA") for sweep in sweeps)
    assert fewer < all_five


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_no_spills_between_gemms(built: Path, name: str) -> None:
    """What little is spilled is spilled between tiles: between exp and dS of a step nothing is."""
    sweep = max(
        (k for k in kernels(built / f"{name}.cubin").values() if "HGMMA" in k),
        key=lambda kernel: kernel.count("HGMMA"),
    )
    steps = []
    for first in (n for n, instruction in enumerate(sweep) if instruction == "STSM"):
        back = max(n for n in range(first) if sweep[n] == "HGMMA")
        # Gradients of a tile go through shared memory too, without exp or a difference.
        if not {"MUFU", "FADD"}.isdisjoint(sweep[back:first]):
            steps.append(sweep[back:first])
    assert steps
    for step in steps:
        assert {"LDL", "STL"}.isdisjoint(step)


@pytest.mark.parametrize(
    "dims",
    [(8, 8), (64, 64), (64, 128), (96, 96), (128, 128), (192, 128), (256, 256), (64, 256)],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_hand_picked_fit(dims: tuple[int, int], causal: bool) -> None:
    variant = Variant("backward", "bfloat16", *dims, causal)
    problem = Problem(variant, Shape(1, 1, 1, 512, 512))
    picked = Sm90Backward.hand_picked(problem, DEVICE)
    assert picked[0] == Sm90Backward.default(variant, DEVICE)
    for schedule in picked:
        assert schedule.reasons(variant, DEVICE) == []
        assert schedule.footprint(variant, DEVICE).scratch_bytes <= 232448


def test_choices_hold_the_hand_picked() -> None:
    for d in SM90_HEAD_DIMS:
        for causal in (False, True):
            problem = Problem(
                Variant("backward", "bfloat16", d, d, causal), Shape(1, 1, 1, 512, 512)
            )
            choices = Sm90Backward.choices(problem, DEVICE)
            for schedule in Sm90Backward.hand_picked(problem, DEVICE):
                for name, value in schedule.to_dict().items():
                    assert value in choices[name], (d, name, value)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_q": 128}, "shared memory"),
        ({"block_q": 72}, "multiple of 16"),
        ({"block_q": 80, "k_stages": 1}, "registers"),
        ({"block_kv": 96}, "64, 80 or 128"),
        ({"block_kv": 80, "block_q": 48}, "takes 64"),
        ({"halves": True, "early_dv": False}, "early_dv"),
        ({"block_kv": 64}, "bulk_dq"),
        ({"q_stages": 0}, "at least 1"),
        ({"block_kv": 64, "q_stages": 1}, "at least 2"),
        ({"ds_stages": 1}, "takes 2"),
    ],
    ids=str,
)
def test_infeasible_says_why(fields: dict[str, int], word: str) -> None:
    schedule = Sm90Backward(**fields)  # type: ignore[arg-type]
    variant = Variant("backward", "bfloat16", 128, 128)
    assert any(word in reason for reason in schedule.reasons(variant, DEVICE))


def test_workspace_holds_what_the_kernels_write() -> None:
    """A counter, two statistics a row and dQ of whole blocks; with turns where they are taken."""
    problem = Problem(Variant("backward", "bfloat16", 80, 80), Shape(2, 6, 3, 130, 70))
    blocks = 2 * 6 * 3
    floats = 32 + blocks * 64 * (2 + 128)
    assert Sm90Backward(64).workspace_floats(problem) == floats
    assert Sm90Backward(64, deterministic=True).workspace_floats(problem) == floats + blocks * 8


def test_other_dtypes_and_dims_are_refused() -> None:
    for variant in (
        Variant("backward", "float32", 64, 64),
        Variant("backward", "float16", 60, 64),
        Variant("backward", "float16", 64, 264),
    ):
        assert not Sm90Backward().feasible(variant, DEVICE)
