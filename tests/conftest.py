"""Fixtures of all tests: one home for compiled modules, fresh seeds, poisoned memory."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import toolchain
from emulator.processes import Emulator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, help="repeat a run's random data (its header names it)")
    parser.addoption(
        "--pack", type=Path, help="take the GPU's modules from this pack (gpu_pack.py)"
    )
    parser.addoption("--fuzz", type=int, default=200, help="inputs of each fuzzed parser")
    parser.addoption("--home", type=Path, help="keep compiled modules here between runs")
    parser.addoption(
        "--emulate-all", action="store_true", help="every GPU program on the CPU, for an hour"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = secrets.randbelow(2**31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random data: --seed {config.getoption('--seed')}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(scope="session", autouse=True)
def fa2tvm_home(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """One FA2TVM_HOME for the run: nothing of the user's is read, a module is compiled once."""
    home = request.config.getoption("--home") or tmp_path_factory.mktemp("fa2tvm_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FA2TVM_HOME", os.fspath(Path(home).absolute()))
        yield home


@pytest.fixture(scope="session", autouse=True)
def early(
    request: pytest.FixtureRequest,
    fa2tvm_home: Path,  # noqa: ARG001 - it must be there first
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """What test modules began to compile beside the first tests, by the module's name; early.py."""
    items = [item for item in request.session.items if "built" in getattr(item, "fixturenames", ())]
    modules = {item.module for item in items}  # type: ignore[attr-defined]
    begun = {
        module.__name__: module.begin(items, tmp_path_factory.mktemp(module.__name__))
        for module in sorted(modules, key=lambda module: module.__name__)
        if hasattr(module, "begin")
    }
    yield begun
    for build in begun.values():
        if build is not None:
            build.close()


@pytest.fixture(scope="session")
def emulator(fa2tvm_home: Path) -> Iterator[Emulator]:  # noqa: ARG001 - it must be there first
    """Runs GPU programs on the CPU."""
    reason = toolchain.why_not()
    if reason is not None:
        pytest.skip(reason)
    with Emulator() as made:
        yield made


@pytest.fixture(scope="session")
def pack(request: pytest.FixtureRequest, fa2tvm_home: Path) -> None:  # noqa: ARG001
    """The modules of --pack, where one is given: no compiler is needed then."""
    given = request.config.getoption("--pack")
    if given is not None:
        import fa2tvm

        fa2tvm.use_pack(given, trust=True)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh in each run, different in each test, and the same when a test is run alone."""
    return zlib.crc32(request.node.nodeid.encode()) ^ int(request.config.getoption("--seed"))


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A source of random tensors."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty returns NaN (or the largest integer), so that what is never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all(), "torch no longer fills uninitialised memory"
    yield
    torch.use_deterministic_algorithms(before)
