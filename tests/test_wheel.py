"""What a user installs: sdist and wheel hold the data, and the wheel works on its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from python_process import PATIENCE_S

import fa2tvm

ROOT = Path(fa2tvm.__file__).resolve().parent.parent
LOGS_LIMIT_BYTES = 5 << 20

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="this is no checkout, so nothing can be built"
)

SMOKE = """
import pathlib, sys, torch, fa2tvm
from fa2tvm.lookup import shipped_root
here = pathlib.Path(fa2tvm.__file__).parent
assert pathlib.Path(sys.prefix) in here.parents, here
assert shipped_root() == here or not (here / "schedules").exists(), shipped_root()
q, k, v = (torch.randn(1, 5, 2, 64, requires_grad=True) for _ in range(3))
out = fa2tvm.attention(q, k, v)
out.sum().backward()
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
torch.testing.assert_close(out, want.transpose(1, 2))
print("smoke test passed")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist, so what the sdist lacks shows."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scripts folder of a fresh environment with the wheel; its dependencies are those of ours."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    scripts = home / "bin"
    (site,) = home.glob("lib/python*/site-packages")
    # A line of a .pth file is a path only: the editable fa2tvm behind it stays out of sight.
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(scripts / "python")]
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, *install, str(built[1])],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return scripts


def tracked(*folders: str) -> list[str]:
    """Files below the folders that git tracks or that lie there where there is no git."""
    return [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    ]


def test_wheel_holds_code_and_data(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[1]).namelist())
    for path in tracked("fa2tvm"):
        assert path in names
    for path in tracked("schedules", "tuning_logs"):
        assert f"fa2tvm/{path}" in names
    outside = {name for name in names if not name.startswith(("fa2tvm/", "fa2tvm-"))}
    assert not outside
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_logs_in_the_wheel_stay_small(built: tuple[Path, Path]) -> None:
    infos = zipfile.ZipFile(built[1]).infolist()
    logs = [i.file_size for i in infos if i.filename.startswith("fa2tvm/tuning_logs/")]
    assert sum(logs) <= LOGS_LIMIT_BYTES


def test_sdist_can_be_tested(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "tests/conftest.py"):
        assert name in names
    for path in tracked("schedules", "tuning_logs"):
        assert path in names


def test_installed_wheel_runs(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "python", "-c", SMOKE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.strip() == "smoke test passed", done.stderr


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    for arguments in (["--version"], ["doctor"], ["schedules", "--problems"]):
        done = subprocess.run(
            [installed / "fa2tvm", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
