"""The Hopper kernels compile as meant, without a GPU: registers, spills, instructions."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fa2tvm.device import nvidia_h200
from fa2tvm.problem import Variant
from fa2tvm.schedule import SM90_HEAD_DIMS, Sm90Forward

ROOT = Path(__file__).resolve().parent.parent
DEVICE = nvidia_h200()
# Every head dim with either mask, and what the others have not: float16, a padded dim, dv != dqk.
SPECS = {
    **{f"d{d}": f"d={d}" for d in SM90_HEAD_DIMS},
    **{f"d{d}c": f"d={d},causal=True" for d in SM90_HEAD_DIMS},
    "half": "d=64,dtype='float16',causal=True",
    "padded": "d=80,causal=True",
    "latent": "d=192,dv=128,causal=True",
}


def disassembler() -> str | None:
    """cuobjdump from PATH or from the pip package."""
    found = shutil.which("cuobjdump")
    if found is None and importlib.util.find_spec("nvidia") is not None:
        for folder in importlib.util.find_spec("nvidia").submodule_search_locations or ():
            found = next((str(p) for p in Path(folder).glob("**/bin/cuobjdump")), found)
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all SPECS, compiled in one process."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH: the Hopper kernels were not compiled")
    if not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler is on PATH to stub the driver with")
    folder = tmp_path_factory.mktemp("sm90")
    command = [sys.executable, str(ROOT / "benchmarks" / "hopper_build.py"), str(folder)]
    command += [f"{name}={spec}" for name, spec in SPECS.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


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


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"block_kv": 256}, "shared memory"),
        ({"block_kv": 72}, "multiple of 16"),
        ({"block_kv": 208, "k_stages": 1, "v_stages": 1}, "registers"),
        ({"lazy_rescale": 24}, "0 to 15"),
        ({"consumer_warpgroups": 1}, "pingpong"),
        ({"consumer_warpgroups": 4}, "1 to 3"),
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
