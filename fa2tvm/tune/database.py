"""The log of a tuning job: one trial a line, on disk as soon as it is finished."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fa2tvm.errors import CorruptRecord, JobBusy, StoreUnavailable
from fa2tvm.files import keep_aside, lock_within, storing, wait_for_lock
from fa2tvm.records import positive

TRIALS = "trials.jsonl"
JOB = "job.json"
# A process that a killed job was about to start keeps the lock until it runs its own program.
LOCK_PATIENCE_S = 1.0


@dataclass(frozen=True)
class Trial:
    """One candidate that was tried, measured or not.

    Attributes
    ----------
    trial
        Its number in the log, from 0.
    key, problem
        What it belongs to: `records.tuning_key` and the problem's name.
    decisions
        The schedule.
    us, us_default
        Median microseconds of the candidate, and of the default schedule in the same rounds;
        None where it failed.
    runs_us
        The single measurements.
    error, reason
        Kind of failure ("build", "wrong", "crash", "hang", "memory", "timing") and one sentence;
        None where it was measured.
    date
        UTC, ISO 8601.
    predicted
        What the cost model expected just before: the default's time over its own. None where it
        had not learned yet, or nobody asked it; a line may lack it.
    """

    trial: int
    key: str
    problem: str
    decisions: dict[str, Any]
    us: float | None
    us_default: float | None
    runs_us: tuple[float, ...]
    error: str | None
    reason: str | None
    date: str
    predicted: float | None = None

    @property
    def relative(self) -> float:
        """Its time over the default's, in the same rounds; below 1 is faster.

        Raises
        ------
        ValueError
            Where it failed.
        """
        if self.us is None or self.us_default is None:
            raise ValueError(f"trial {self.trial} has no time ({self.reason})")
        return self.us / self.us_default

    def to_line(self) -> str:
        """The trial as one line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, text: str | bytes, where: str) -> Trial:
        """Parse one line; `where` (file and line) stands in the error.

        Raises
        ------
        CorruptRecord
            For anything but a complete trial.
        """
        try:
            row = json.loads(text.decode() if isinstance(text, bytes) else text)
            if not isinstance(row, dict) or set(row) | {"predicted"} != set(_KINDS):
                raise ValueError("its fields are not those of a trial")
            row = {"predicted": None, **row}
            for name, kinds in _KINDS.items():
                if type(row[name]) not in kinds:
                    raise TypeError(f"{name} is {row[name]!r}")
            if (row["us"] is None) == (row["error"] is None):
                raise ValueError("it must have either a time or an error")
            if (row["us"] is None) != (row["us_default"] is None):
                raise ValueError("it must have the default's time beside its own")
            numbers = [row[name] for name in ("us", "us_default") if row[name] is not None]
            for number in (*row["runs_us"], *numbers):
                positive(number, "a time")
            return cls(**{**row, "runs_us": tuple(row["runs_us"])})
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CorruptRecord(f"{where} is no trial ({error}); it is skipped.") from error


_OPTIONAL_NUMBER = (float, int, type(None))
_OPTIONAL_TEXT = (str, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "trial": (int,),
    "key": (str,),
    "problem": (str,),
    "decisions": (dict,),
    "us": _OPTIONAL_NUMBER,
    "us_default": _OPTIONAL_NUMBER,
    "runs_us": (list,),
    "error": _OPTIONAL_TEXT,
    "reason": _OPTIONAL_TEXT,
    "date": (str,),
    "predicted": _OPTIONAL_NUMBER,
}


class TrialLog:
    """The trials of one folder; several processes may append to it at once.

    Every append holds an exclusive lock on the file, takes the next number after what any process
    has written, and is on disk when it returns.

    Raises
    ------
    StoreUnavailable
        Where the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / TRIALS
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[Trial]:
        """Every readable trial, oldest first.

        A line that is none is skipped with a warning that names file and line.
        """
        if not self.path.exists():
            return []
        found = _Lines.of(self.path.read_bytes(), self.path)
        found.warn("it is skipped")
        return found.trials

    def append(self, **values: Any) -> Trial:
        """Number a trial, write it and wait until it is on disk.

        Lines that are no trials (cut by a kill, glued, foreign) are moved into a file of their own
        first, with a warning, so that the log reads cleanly afterwards.

        Parameters
        ----------
        values
            Every field of Trial but its number.

        Raises
        ------
        StoreUnavailable
            Where it cannot be written; the log stays as it was.
        """
        with storing(self.path):
            handle = self._open_locked()
            try:
                data = _read_all(handle)
                found = _Lines.of(data, self.path)
                trial = Trial(trial=found.highest + 1, **values)
                line = trial.to_line().encode()
                if found.damaged:
                    aside = keep_aside(self.path, [text for _, text, _ in found.damaged])
                    found.warn(f"it is kept in {aside.name}")
                    self._replace(b"".join(text + b"\n" for text in found.good) + line)
                else:
                    cut = b"" if data.endswith(b"\n") or not data else b"\n"
                    _write(handle, cut + line, len(data))
            finally:
                os.close(handle)
        return trial

    def _open_locked(self) -> int:
        """The log, opened and locked; opened again where it was replaced meanwhile."""
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                wait_for_lock(handle, self.path)
                if os.path.samestat(os.fstat(handle), self.path.stat()):
                    return handle
            except FileNotFoundError:
                pass
            except StoreUnavailable:
                os.close(handle)
                raise
            os.close(handle)

    def _replace(self, data: bytes) -> None:
        """The whole log anew, in one rename."""
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{TRIALS}.")
        try:
            os.fchmod(handle, 0o644)
            _write(handle, data, 0)
            Path(name).replace(self.path)
        finally:
            os.close(handle)
            Path(name).unlink(missing_ok=True)


@dataclass(frozen=True)
class _Lines:
    """What a log's bytes are: trials, their lines, and (number, bytes, reason) of what is none."""

    trials: list[Trial]
    good: list[bytes]
    damaged: list[tuple[int, bytes, str]]
    highest: int

    @classmethod
    def of(cls, data: bytes, path: Path) -> _Lines:
        """Sort the lines of a log; blank ones are nothing."""
        trials, good, damaged, numbers = [], [], [], [-1]
        for number, text in enumerate(data.split(b"\n"), 1):
            if not text.strip():
                continue
            try:
                trial = Trial.from_line(text, f"{path}:{number}")
            except CorruptRecord as error:
                damaged.append((number, text, str(error)))
                numbers.append(_number_in(text))
            else:
                trials.append(trial)
                good.append(text)
                numbers.append(trial.trial)
        return cls(trials, good, damaged, max(numbers))

    def warn(self, what: str) -> None:
        """One warning for each damaged line: file, line, reason, and what becomes of it."""
        for _, _, reason in self.damaged:
            warnings.warn(
                f"{reason.removesuffix('it is skipped.')}{what}.", RuntimeWarning, stacklevel=3
            )


@contextmanager
def job_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for one tuning job; the lock ends with the process, however it ends.

    Raises
    ------
    JobBusy
        Where another process holds it: two jobs would disturb each other's timing.
    StoreUnavailable
        Where the folder cannot be made or locked.
    """
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        with storing(folder):
            is_free = lock_within(handle, LOCK_PATIENCE_S)
        if not is_free:
            raise JobBusy(
                f"folder {folder} is in use by another tuning job; wait for it or choose another."
            )
        yield
    finally:
        os.close(handle)


def _read_all(handle: int) -> bytes:
    os.lseek(handle, 0, os.SEEK_SET)
    parts = []
    while part := os.read(handle, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _write(handle: int, data: bytes, size_before: int) -> None:
    """Write and wait for the disk; where that fails, nothing of it stays."""
    try:
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, size_before)
        raise


def _number_in(text: bytes) -> int:
    """The number of a line that is no trial, so that it is not given twice; -1 where none is."""
    try:
        number = json.loads(text)["trial"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return -1
    return number if type(number) is int else -1
