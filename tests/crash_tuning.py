"""Kill a real tuning job at random moments and look at what is left.

    python tests/crash_tuning.py --kills 100 --folder DIR

Each cycle continues one job (a small attention problem, built, checked and timed in worker
processes) in a fork of this process, which has imported the tuner already. The job is killed with
SIGKILL at a random moment: while it starts, builds, checks, times or writes. Afterwards the store
must load without a warning and hold every trial that the job had reported as finished; what it
held before must be its beginning, byte by byte, and no worker may live. One line of JSON sums up,
also where a job ends by itself: then it says why, and nothing more is killed. The problem has some
sixty feasible schedules, so a new store is begun before they are used up.
`--signal INT` sends what Ctrl-C sends instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from fa2tvm.device import detect
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.tune.database import TrialLog
from fa2tvm.tune.job import tune
from fa2tvm.tune.nouns import Options, Progress
from fa2tvm.tune.space import import_meta_schedule

# A worker that is not gone after this time is an orphan.
ORPHAN_S = 10.0
ENDED = "ended.txt"
KILLS_A_STORE = 25
PROBLEM = Problem(Variant("forward", "float32", 8, 8, True), Shape(1, 2, 1, 256, 256))
# A machine with many times more work than cores is slow, and nothing hangs.
OPTIONS = Options(batch=2, rounds=1, builders=1, build_timeout_s=600.0, run_timeout_s=600.0)


@dataclass
class Outcome:
    """What the cycles so far have shown.

    Attributes
    ----------
    trials, reported
        Finished trials that came into the stores, and those that the killed jobs had reported.
    lost
        Reported trials that the store lacks, and earlier ones that changed.
    orphans
        Workers that lived on.
    unclean
        Loads with a warning.
    moments
        Kills by how far the job was: before its first trial, or after.
    ended
        Why the last job ended by itself; None where all were killed.
    """

    kills: int = 0
    trials: int = 0
    reported: int = 0
    lost: int = 0
    orphans: int = 0
    unclean: int = 0
    slowest_end_s: float = 0.0
    moments: dict[str, int] = field(default_factory=lambda: {"before a trial": 0, "after": 0})
    ended: str | None = None


def crash(kills: int, root: Path, seed: int, how: signal.Signals = signal.SIGKILL) -> Outcome:
    """Run the cycles in a folder, which may hold an earlier run's stores."""
    outcome, rng = Outcome(), random.Random(seed)
    while outcome.kills < kills:
        folder = root / f"store{outcome.kills // KILLS_A_STORE}"
        scratch = folder / "tmp"
        scratch.mkdir(parents=True, exist_ok=True)
        before = _bytes_of(folder)
        (folder / ENDED).unlink(missing_ok=True)
        with _job(folder, scratch, rng.randrange(1 << 16)) as (pid, said):
            reported, lives = _wait(said, rng)
            if lives:
                os.kill(pid, how)
            reported += len(said.read())
            _, status = os.waitpid(pid, 0)
        if not lives or (how == signal.SIGKILL and os.waitstatus_to_exitcode(status) != -how):
            said_last = folder / ENDED
            reason = said_last.read_text() if said_last.exists() else "it said nothing"
            outcome.ended = f"exit code {os.waitstatus_to_exitcode(status)}: {reason}"
            return outcome
        _look(outcome, folder, before, reported)
        started = time.monotonic()
        while living(scratch) and time.monotonic() < started + ORPHAN_S:
            time.sleep(0.01)
        outcome.orphans += len(living(scratch))
        outcome.slowest_end_s = max(outcome.slowest_end_s, time.monotonic() - started)
        outcome.kills += 1
        outcome.moments["after" if reported else "before a trial"] += 1
    return outcome


@contextmanager
def _job(folder: Path, scratch: Path, seed: int) -> Iterator[tuple[int, IO[bytes]]]:
    """A job in a forked process, and what it says: one byte a finished trial."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            (folder / ENDED).write_text(_tune(folder, scratch, seed, writing))
        except BaseException:  # noqa: BLE001 - the process ends here
            (folder / ENDED).write_text(traceback.format_exc())
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, "rb", buffering=0) as said:  # noqa: PTH123 - a descriptor
        try:
            yield pid, said
        except BaseException:
            os.kill(pid, signal.SIGKILL)
            raise


def _tune(folder: Path, scratch: Path, seed: int, writing: int) -> str:
    """Run the job; what it says where it comes to an end."""
    told = 0

    def tell(progress: Progress) -> None:
        nonlocal told
        os.write(writing, b"." * (progress.trials - told))
        told = progress.trials

    tempfile.tempdir = os.environ["TMPDIR"] = os.fspath(scratch)
    where = {"out": folder / "logs", "seed": seed, "progress": tell}
    return tune(PROBLEM, detect(), trials=1000, options=OPTIONS, **where).message


def _wait(said: IO[bytes], rng: random.Random) -> tuple[int, bool]:
    """Wait until a random moment: some trials into the job, or none, and a little more.

    Returns
    -------
    tuple
        Trials so far, and whether the job still ran when the last of them was awaited.
    """
    wanted, seen = rng.choice((0, 0, 1, 1, 1, 2, 3)), 0
    while seen < wanted:
        piece = said.read(1)
        if not piece:
            return seen, False
        seen += len(piece)
    time.sleep(rng.uniform(0, 2) if wanted else rng.uniform(0, 8))
    return seen, True


def _logs(folder: Path) -> list[Path]:
    return list((folder / "logs").rglob("trials.jsonl"))


def _bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in _logs(folder))


def _look(outcome: Outcome, folder: Path, before: bytes, reported: int) -> None:
    """Compare the store with what it held and what the job said."""
    after = _bytes_of(folder)
    n_before = before.count(b"\n")
    outcome.lost += 0 if after.startswith(before) else n_before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trials = [trial for path in _logs(folder) for trial in TrialLog(path.parent).load()]
    outcome.unclean += bool(caught)
    outcome.lost += max(0, n_before + reported - len(trials))
    outcome.lost += [trial.trial for trial in trials] != list(range(len(trials)))
    outcome.trials += len(trials) - n_before
    outcome.reported += reported


def living(scratch: Path) -> list[int]:
    """Processes that were started with a folder as their TMPDIR and have not ended."""
    found = []
    mark = f"TMPDIR={scratch}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry.name)] if state != "Z" else []
        except OSError:
            continue
    return found


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    options.add_argument("--folder", type=Path, help="continue its stores (default: a new one)")
    options.add_argument("--signal", choices=("KILL", "INT"), default="KILL")
    asked = options.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="fa2tvm-crash-"))
    import xgboost  # noqa: F401 - every job imports it

    import_meta_schedule()
    started = time.monotonic()
    outcome = crash(
        asked.kills, folder.absolute(), asked.seed, signal.Signals[f"SIG{asked.signal}"]
    )
    seconds = round(time.monotonic() - started)
    print(json.dumps({**asdict(outcome), "seed": asked.seed, "seconds": seconds}))  # noqa: T201
    sys.exit(bool(outcome.lost or outcome.orphans or outcome.unclean or outcome.ended))


if __name__ == "__main__":
    main()
