"""The Hopper kernels compile as meant, without a GPU: registers, spills, instructions."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from early import EarlyBuild, hopper_build, parameters

from fa2tvm.cuda_toolchain import describe_compiler
from fa2tvm.device import nvidia_h200
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import SM90_HEAD_DIMS, Sm90Forward

DEVICE = nvidia_h200()
# Every tile width with either mask; float16, dims that TMA pads, dv != dqk; the other hand-picked
# schedules, whose warpgroups have the fewest registers.
SPECS = {
    **{f"d{d}": f"d={d}" for d in SM90_HEAD_DIMS},
    **{f"d{d}c": f"d={d},causal=True" for d in SM90_HEAD_DIMS},
    **{f"half{d}": f"d={d},dtype='float16',causal={d != 128}" for d in SM90_HEAD_DIMS},
    **{f"padded{d}": f"d={d},causal={d % 16 == 8}" for d in (8, 72, 80, 104, 160, 248)},
    **{
        f"mixed{d}_{dv}": f"d={d},dv={dv},causal={d > dv}"
        for d, dv in ((192, 128), (64, 128), (128, 64), (64, 256), (256, 96))
    },
    **{f"narrow{n}": f"d=64,causal={n % 2 == 1},pick={n}" for n in (1, 2)},
    **{f"d96_{n}": f"d=96,causal={n % 2 == 1},pick={n}" for n in (1, 2)},
}


def disassembler() -> str | None:
    """cuobjdump from PATH or from the pip package."""
    found = shutil.which("cuobjdump")
    if found is None and importlib.util.find_spec("nvidia") is not None:
        for folder in importlib.util.find_spec("nvidia").submodule_search_locations or ():
            found = next((str(p) for p in Path(folder).glob("**/bin/cuobjdump")), found)
    return found


def begin(items: list[pytest.Item], folder: Path) -> EarlyBuild | None:
    """Start to compile what the selected tests look at."""
    chosen = {p["name"] for p in parameters(items, "test_no_spills_no_serialised_gemms")}
    chosen |= {p["name"] for p in parameters(items, "test_tensor_cores_through_wgmma")}
    specs = {name: spec for name, spec in SPECS.items() if name in chosen}
    return hopper_build(folder, specs) if describe_compiler() else None


@pytest.fixture(scope="module")
def built(early: dict[str, Any]) -> Path:
    """A folder of the selected SPECS."""
    build: EarlyBuild | None = early[__name__]
    if build is None:
        pytest.skip("neither nvcc nor NVRTC is here: the Hopper kernels were not compiled")
    return build.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_no_spills_no_serialised_gemms(built: Path, name: str) -> None:
    report = json.loads((built / f"{name}.json").read_text())["report"]
    assert report["spill_store_bytes"] == report["spill_load_bytes"] == 0
    assert report["warnings"] == []
    assert 0 < report["registers"] <= 168


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_tensor_cores_through_wgmma(built: Path, name: str) -> None:
    tool = disassembler()
    if tool is None:
        pytest.skip("cuobjdump is neither on PATH nor installed: the code was not disassembled")
    sass = subprocess.run(
        [tool, "-sass", str(built / f"{name}.cubin")], capture_output=True, text=True, check=True
    ).stdout
    instructions = re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass, re.MULTILINE
    )
    assert instructions.count("HGMMA") > 0
    assert instructions.count("HMMA") == 0
    assert {"LDL", "STL"}.isdisjoint(instructions)
    assert "UTMALDG" in instructions


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (8, 8)], ids=str
)
@pytest.mark.parametrize("causal", [False, True])
def test_default_fits(dims: tuple[int, int], causal: bool) -> None:
    variant = Variant("forward", "bfloat16", *dims, causal)
    schedule = Sm90Forward.default(variant, DEVICE)
    assert schedule.reasons(variant, DEVICE) == []
    footprint = schedule.footprint(variant, DEVICE)
    assert footprint.scratch_bytes <= 232448
    registers = 128 * (
        schedule.consumer_warpgroups * schedule.consumer_registers + schedule.producer_registers
    )
    assert registers <= 65536


@pytest.mark.parametrize("d", [8, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_hand_picked_are_points_of_the_space(d: int, causal: bool) -> None:
    problem = Problem(Variant("forward", "float16", d, d, causal), Shape(1, 8, 2, 4096, 4096))
    picked = Sm90Forward.hand_picked(problem, DEVICE)
    choices = Sm90Forward.choices(problem, DEVICE)
    assert len(set(picked)) == len(picked) > 2
    assert picked[0] == Sm90Forward.default(problem.variant, DEVICE)
    for schedule in picked:
        assert schedule.feasible(problem.variant, DEVICE)
        assert all(getattr(schedule, name) in values for name, values in choices.items())


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_kv": 256}, "shared memory"),
        ({"block_kv": 72}, "multiple of 16"),
        ({"block_kv": 208, "k_stages": 1, "v_stages": 1}, "registers"),
        ({"lazy_rescale": 24}, "0 to 15"),
        ({"consumer_warpgroups": 1}, "pingpong"),
        ({"consumer_warpgroups": 5}, "1 to 4"),
    ],
    ids=str,
)
def test_infeasible_says_why(fields: dict[str, int], word: str) -> None:
    schedule = Sm90Forward(**fields)
    assert any(
        word in reason
        for reason in schedule.reasons(Variant("forward", "bfloat16", 128, 128), DEVICE)
    )


def test_other_dtypes_and_dims_are_refused() -> None:
    for variant in (
        Variant("forward", "float32", 64, 64),
        Variant("forward", "float16", 60, 64),
        Variant("forward", "float16", 64, 264),
    ):
        assert not Sm90Forward().feasible(variant, DEVICE)
