"""The portable kernels compile for every NVIDIA GPU since Ampere, without one: no GPU, no driver.

No spills in the default schedules, shared memory within each architecture's limit, and tensor-core
instructions in the machine code.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from early import EarlyBuild, parameters
from sm80_build import SHARED_BYTES, device, name_of, spec_of

from fa2tvm.problem import PASSES, DType, PassName, Problem, Shape, Variant
from fa2tvm.schedule import SM80_MAX_HEAD_DIM, Sm80Backward, Sm80Forward, schedule_class

SCRIPT = Path(__file__).with_name("sm80_build.py")
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
# What is compiled for each architecture, and what the one with the least room must do besides.
COMPILED = [(arch, d, d, "bfloat16", True) for arch in SHARED_BYTES for d in (128, 256)]
COMPILED += [(arch, 64, 64, "bfloat16", True) for arch in ("sm_80", "sm_89", "sm_90")]
# Another default than the causal one's.
COMPILED += [(arch, 128, 128, "bfloat16", False) for arch in ("sm_90", "sm_100")]
COMPILED += [("sm_100", 64, 128, "bfloat16", False)]
COMPILED += [
    (arch, d, dv, dtype, causal)
    for arch in ("sm_89",)
    for d, dv, dtype, causal in (
        (32, 32, "bfloat16", True),
        (96, 96, "bfloat16", False),
        (160, 160, "bfloat16", False),
        (192, 128, "bfloat16", True),
        (64, 64, "float16", True),
        (128, 128, "float16", False),
        (256, 256, "bfloat16", False),
        (40, 72, "float16", True),
    )
]


def disassembler() -> str | None:
    """cuobjdump from PATH or from the pip package."""
    found = shutil.which("cuobjdump")
    if found is None and importlib.util.find_spec("nvidia") is not None:
        for folder in importlib.util.find_spec("nvidia").submodule_search_locations or ():
            found = next((str(p) for p in Path(folder).glob("**/bin/cuobjdump")), found)
    return found


def begin(items: list[pytest.Item], folder: Path) -> EarlyBuild | None:
    """Start to compile what the selected tests look at."""
    chosen = [
        spec_of(str(p["arch"]), variant_of(**p))  # type: ignore[arg-type]
        for p in parameters(items, "test_compiles_without_spills")
    ]
    return EarlyBuild(folder, SCRIPT, chosen) if shutil.which("nvcc") else None


@pytest.fixture(scope="module")
def built(early: dict[str, Any]) -> Path:
    """A folder of the modules of COMPILED."""
    build: EarlyBuild | None = early[__name__]
    if build is None:
        pytest.skip("nvcc is not on PATH: the portable kernels were not compiled")
    return build.wait()


def variant_of(
    d: int, dv: int, dtype: DType, causal: bool, pass_: PassName, **_: object
) -> Variant:
    return Variant(pass_, dtype, d, dv, causal)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(("arch", "d", "dv", "dtype", "causal"), COMPILED, ids=str)
def test_compiles_without_spills(
    arch: str, d: int, dv: int, dtype: DType, causal: bool, pass_: PassName, built: Path
) -> None:
    library = built / f"{name_of(spec_of(arch, variant_of(d, dv, dtype, causal, pass_)))}.so"
    facts = json.loads(library.with_suffix(".json").read_text())
    assert facts["arch"] == arch
    assert facts["spill_bytes"] == 0
    assert facts["warnings"] == []
    assert 0 < facts["registers"] <= 255
    assert facts["shared_bytes"] <= SHARED_BYTES[arch]
    instructions = machine_code(library)
    assert instructions.count("HMMA") > 0
    assert "LDSM" in instructions
    assert "LDGSTS" in instructions
    assert {"LDL", "STL"}.isdisjoint(instructions)


def machine_code(library: Path) -> list[str]:
    """The instructions of the cubin in a module."""
    tool = disassembler()
    if tool is None:
        pytest.skip("cuobjdump is neither on PATH nor installed: the code was not disassembled")
    image = library.read_bytes()
    cubin = library.with_suffix(".cubin")
    cubin.write_bytes(image[image.index(b"\x7fELF", 4) :])
    sass = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True)
    return re.findall(
        r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass.stdout, re.MULTILINE
    )


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pass_", PASSES)
def test_default_fits_everywhere(arch: str, causal: bool, dtype: str, pass_: PassName) -> None:
    where = device(arch)
    for d in HEAD_DIMS:
        for dv in HEAD_DIMS:
            variant = Variant(pass_, dtype, d, dv, causal)  # type: ignore[arg-type]
            schedule = schedule_class("sm80", pass_).default(variant, where)
            assert schedule.reasons(variant, where) == [], (d, dv)
            assert schedule.footprint(variant, where).scratch_bytes <= SHARED_BYTES[arch]


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_kv": 512}, "shared memory"),
        ({"block_kv": 72}, "multiple of 16"),
        ({"block_q": 96}, "multiple of 64"),
        ({"block_q": 256}, "registers"),
        ({"lazy_rescale": 24}, "0 to 15"),
        ({"stages": 1}, "2 to 8"),
        ({"warps": 5}, "1, 2, 4, 8 or 16"),
        ({"split_keys": True, "block_q": 16, "block_kv": 32}, "multiple of 64"),
    ],
    ids=str,
)
def test_infeasible_says_why(fields: dict[str, int], word: str) -> None:
    schedule = Sm80Forward(**fields)  # type: ignore[arg-type]
    variant = Variant("forward", "bfloat16", 128, 128)
    assert any(word in reason for reason in schedule.reasons(variant, device("sm_90")))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_q": 128, "stages": 2}, "registers"),
        ({"block_kv": 96}, "one of"),
        ({"column_groups": 2, "block_kv": 256}, "shared memory"),
        ({"warps": 8, "block_kv": 64}, "too many"),
        ({"query_groups": 2, "column_groups": 2, "late": True}, "which takes 3"),
        ({"stages": 1, "late": True}, "which takes 2"),
        ({"stages": 3}, "which takes 2"),
        ({"column_groups": 4}, "multiple of 64"),
    ],
    ids=str,
)
def test_infeasible_backward_says_why(fields: dict[str, int], word: str) -> None:
    schedule = Sm80Backward(**fields)
    variant = Variant("backward", "bfloat16", 128, 128)
    assert any(word in reason for reason in schedule.reasons(variant, device("sm_90")))


@pytest.mark.parametrize("d", [64, 128, 256])
def test_hand_picked_backwards_are_points_of_the_space(d: int) -> None:
    where = device("sm_90")
    problem = Problem(Variant("backward", "bfloat16", d, d, True), Shape(1, 1, 1, 512, 512))
    picked = Sm80Backward.hand_picked(problem, where)
    assert picked[0] == Sm80Backward.default(problem.variant, where)
    assert len(set(picked)) == len(picked) > 1
    choices = Sm80Backward.choices(problem, where)
    for schedule in picked:
        assert schedule.feasible(problem.variant, where)
        assert all(value in choices[name] for name, value in schedule.to_dict().items())


def test_split_gradients_need_equal_columns() -> None:
    schedule = Sm80Backward(query_groups=2, split_gradients=True)
    where = device("sm_90")
    assert schedule.reasons(Variant("backward", "bfloat16", 128, 64), where) != []
    assert schedule.reasons(Variant("backward", "bfloat16", 64, 64), where) == []


def test_other_dtypes_and_dims_are_refused() -> None:
    for variant in (
        Variant("forward", "float32", 64, 64),
        Variant("forward", "float16", 60, 64),
        Variant("forward", "float16", 64, SM80_MAX_HEAD_DIM + 8),
    ):
        assert not Sm80Forward().feasible(variant, device("sm_90"))
