"""Promotion on a toy family: what a job found is measured again, and the winner is kept.

The rows named are of BUGS.md, section I.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_family import ToyForward
from tuner_stubs import (  # noqa: F401
    DEVICE,
    PROBLEM,
    StubBuilder,
    StubRunner,
    by_block,
    offered,
    quick,
)

from fa2tvm.errors import CorruptRecord
from fa2tvm.lookup import lookup
from fa2tvm.problem import Variant
from fa2tvm.records import read_records
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.nouns import Failure
from fa2tvm.tune.promote import Promoted, promote


def promoted(tmp_path: Path, us: Callable[[dict[str, Any]], float], **options: Any) -> Promoted:
    """Promote on stubs what `quick` has logged."""
    builder, runner = StubBuilder(tmp_path), StubRunner(us, options.pop("wrong", lambda _: False))
    return promote(
        PROBLEM,
        DEVICE,
        family="toy",
        logs=tmp_path / "logs",
        schedules=tmp_path / "schedules",
        workers=(builder, runner),
        **options,
    )


def test_promote_writes_a_record_that_points_to_its_trial(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    offer(block_kv=(1, 2, 4, 8))
    result = quick(tmp_path, by_block)
    verdict = promoted(tmp_path, by_block)
    assert verdict.record.decisions["block_kv"] == 8
    assert verdict.record.ratio == pytest.approx(8.0)
    records, complaints = read_records(verdict.path)
    assert not complaints
    assert records[0].decisions == verdict.record.decisions
    name, _, number = verdict.record.log.partition("#")
    trials = TrialLog((tmp_path / "logs" / name).parent).load()
    assert trials[int(number)].decisions == verdict.record.decisions
    assert trials[int(number)] == result.best
    assert [c.schedule.block_kv for c in verdict.contenders] == [1, 8, 4, 2]


def test_promote_keeps_the_default_unless_it_is_beaten_clearly(
    tmp_path: Path, offer: Callable[..., None]
) -> None:
    offer(block_kv=(1, 2, 4, 8))
    quick(tmp_path, by_block)
    verdict = promoted(tmp_path, lambda d: 99.0 if d["block_kv"] == 8 else 100.0)
    assert verdict.record.decisions["block_kv"] == 1
    assert verdict.record.ratio == 1.0
    assert "default schedule" in verdict.message


def test_promote_checks_again(tmp_path: Path, offer: Callable[..., None]) -> None:
    """BUGS I04: a trial that passed by luck is refused on fresh data, however fast it is."""
    offer(block_kv=(1, 2, 4, 8))
    quick(tmp_path, by_block)
    verdict = promoted(tmp_path, by_block, wrong=lambda d: d["block_kv"] == 8)
    assert verdict.record.decisions["block_kv"] == 4
    assert [c.failure.kind for c in verdict.contenders if c.failure] == ["wrong"]


def test_promote_needs_trials_of_this_kernel(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=(1, 2))
    with pytest.raises(CorruptRecord, match="tune it first"):
        promoted(tmp_path, by_block)
    quick(tmp_path, by_block)
    monkeypatch.setattr("fa2tvm.tune.promote.program_version", lambda *_: "newer")
    with pytest.raises(CorruptRecord, match="tune it first"):
        promoted(tmp_path, by_block)


def test_promoted_record_is_what_lookup_finds(
    tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(block_kv=(1, 2, 4))
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path))
    quick(tmp_path, by_block)
    assert lookup(PROBLEM, DEVICE, family="toy").origin == "default"
    verdict = promoted(tmp_path, by_block)
    found = lookup(PROBLEM, DEVICE, family="toy")
    assert (found.origin, found.schedule) == ("user overlay", ToyForward(4))
    assert found.record is not None
    assert found.record.key == verdict.record.key


@pytest.mark.parametrize("is_full", [False, True])
def test_the_winners_module_is_kept_for_the_first_call(
    is_full: bool, tmp_path: Path, offer: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for it, the verdict stands all the same."""
    offer(block_kv=(1, 2, 4))
    monkeypatch.setenv("FA2TVM_HOME", str(tmp_path / "home"))

    class Builder(StubBuilder):
        def build(self, variant: Variant, schedules: Sequence[ToyForward]) -> list[Path | Failure]:
            made = super().build(variant, schedules)
            for path in made:
                assert isinstance(path, Path)
                path.mkdir()
                (path / "module.so").write_text(path.name)
            return made

    quick(tmp_path, by_block)
    workers = (Builder(tmp_path), StubRunner(by_block))
    roots = {"logs": tmp_path / "logs", "schedules": tmp_path / "schedules"}
    if is_full:

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("fa2tvm.tune.job.cache.put", fail)
    verdict = promote(PROBLEM, DEVICE, family="toy", workers=workers, **roots)
    assert [r.place for r in read_records(verdict.path)[0]] == [verdict.record.place]
    kept = [path.name for path in (tmp_path / "home" / "cache").iterdir()]
    blocks = sorted(json.loads(name.partition("-")[2])["block_kv"] for name in kept)
    assert blocks == ([] if is_full else [1, 4])
