"""What the tuner's tests run on in place of worker processes: builds and times by a formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from toy_family import ToyForward

from fa2tvm.device import detect
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.tune.job import tune
from fa2tvm.tune.nouns import Failure, Measured
from fa2tvm.tune.runner import validated

DEVICE = detect()
PROBLEM = Problem(Variant("forward", "float32", 16, 8, True), Shape(1, 2, 1, 64, 64))


@pytest.fixture(name="offer", autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the toy's space."""

    def put(**choices: tuple[Any, ...]) -> None:
        monkeypatch.setattr(
            ToyForward,
            "offered",
            {"block_kv": (1,), "order": ("ij",), "fault": ("none",)} | choices,
        )

    put()
    return put


class StubBuilder:
    """Builds nothing: a module is a folder that is named by its decisions."""

    def __init__(
        self, folder: Path, fail: Callable[[ToyForward], str | None] = lambda _: None
    ) -> None:
        self.folder, self.fail, self.built = folder, fail, 0

    def build(self, variant: Variant, schedules: Sequence[ToyForward]) -> list[Path | Failure]:
        results: list[Path | Failure] = []
        for schedule in schedules:
            reason = self.fail(schedule)
            self.built += 1
            path = self.folder / f"{self.built}-{json.dumps(schedule.to_dict())}"
            results.append(Failure("build", reason) if reason else path)
        return results

    def submit(
        self, variant: Variant, schedule: ToyForward, order: int = 0
    ) -> Future[Path | Failure]:
        built: Future[Path | Failure] = Future()
        built.set_result(self.build(variant, [schedule])[0])
        return built

    def start(self) -> None: ...

    def close(self) -> None: ...


class StubRunner:
    """Times by a formula; `wrong` says which points the oracle refuses."""

    def __init__(
        self,
        us: Callable[[dict[str, Any]], float],
        wrong: Callable[[dict[str, Any]], bool] = lambda _: False,
    ) -> None:
        self.us, self.wrong, self.timed = us, wrong, 0

    def expect(self, variant: Variant, seed: int) -> None: ...

    def check(self, path: Path, seed: int) -> Failure | None:
        return Failure("wrong", "O is off") if self.wrong(self._decisions(path)) else None

    def time(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        self.timed += len(paths)
        times = [self.us(self._decisions(path)) for path in paths]
        return [validated([us] * rounds) for us in times]

    def sustain(
        self, problem: Problem, paths: Sequence[Path], rounds: int
    ) -> list[Measured | Failure]:
        raise AssertionError("a CPU has no power limit to wait for")

    def start(self) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def _decisions(path: Path) -> dict[str, Any]:
        decisions: dict[str, Any] = json.loads(path.name.partition("-")[2])
        return decisions


def by_block(decisions: dict[str, Any]) -> float:
    return 100.0 / float(decisions["block_kv"])


def lines(folder: Path) -> int:
    """Trials in all logs below a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("trials.jsonl"))


def quick(tmp_path: Path, us: Callable[[dict[str, Any]], float], **options: Any) -> Any:
    """A job on stubs."""
    runner = StubRunner(us, options.pop("wrong", lambda _: False))
    builder = StubBuilder(tmp_path, options.pop("fail", lambda _: None))
    return tune(
        PROBLEM,
        DEVICE,
        family="toy",
        out=tmp_path / "logs",
        workers=(builder, runner),
        **{"trials": 12, **options},
    )
