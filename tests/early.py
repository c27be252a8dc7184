"""GPU programs that tests look at are compiled beside the first tests, which leave a core idle.

A test module that has them offers `begin(items, folder)`, which starts to compile what its selected
tests need at the lowest priority. These are processes of their own: a pool's manager thread in this
one did not outlive all of the tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from fa2tvm.device import usable_cores

LOWEST = 19
HOPPER = Path(__file__).resolve().parent.parent / "benchmarks" / "hopper_build.py"


def parameters(items: list[pytest.Item], test: str) -> list[dict[str, object]]:
    """Those that a test was selected with."""
    return [
        item.callspec.params  # type: ignore[attr-defined]
        for item in items
        if getattr(item, "originalname", "") == test
    ]


class EarlyBuild:
    """What a script compiles, by as many processes as cores: SCRIPT FOLDER TEXT ..."""

    def __init__(self, folder: Path, script: Path, texts: Sequence[str]) -> None:
        self._folder, self._script = folder, script
        builders = min(usable_cores(), 8, len(texts))
        self._running = [self._start(n, texts[n::builders]) for n in range(builders)]

    def _start(self, n: int, texts: Sequence[str]) -> subprocess.Popen[bytes]:
        nice = ["nice", "-n", str(LOWEST)] if shutil.which("nice") else []
        command = [*nice, sys.executable, str(self._script), str(self._folder), *texts]
        with (self._folder / f"{n}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self) -> Path:
        """The folder, once everything is in it."""
        codes = [process.wait() for process in self._running]
        logs = "\n".join(path.read_text() for path in self._folder.glob("*.log"))
        assert not any(codes), logs[-4000:]
        return self._folder

    def close(self) -> None:
        """End what still runs."""
        for process in self._running:
            process.kill()
            process.wait()


def hopper_build(folder: Path, specs: Mapping[str, str]) -> EarlyBuild:
    """Modules of hopper_build.py: NAME -> fields."""
    return EarlyBuild(folder, HOPPER, [f"{name}={spec}" for name, spec in specs.items()])
