"""Tuned records: one verdict a line of JSON, with the provenance that proves it."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import io
import json
import math
import os
import re
import tempfile
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fa2tvm
from fa2tvm.device import Device
from fa2tvm.errors import CorruptRecord
from fa2tvm.files import keep_aside, locked, storing
from fa2tvm.problem import PassName, Problem, Shape, Variant
from fa2tvm.schedule import Schedule, schedule_from_dict

FORMAT = 1
_PACKAGE = Path(__file__).resolve().parent
_PASS_SUFFIX = {"forward": "fwd", "backward": "bwd"}
# Families that live outside fa2tvm/kernels (a plug-in, a test) name their source file here.
PROGRAM_SOURCES: dict[tuple[str, str], Path] = {}


@dataclass(frozen=True)
class Record:
    """The verdict of one tuning job: the best schedule of a problem on a device.

    Attributes
    ----------
    problem, family, decisions
        What was tuned, and the schedule that won.
    us, us_default
        Median microseconds of the winner and of the default schedule, interleaved in one process.
    device
        `slug`, `kind`, `arch`, `level` and `cores` of the device that was measured.
    program
        `program_version` of the kernel that was measured.
    versions
        Versions of fa2tvm and of its tools, by package.
    date
        UTC day and time of the measurement, ISO 8601.
    log
        Where the trial stands: `<path under tuning_logs>#<trial>`.
    """

    problem: Problem
    family: str
    decisions: dict[str, Any]
    us: float
    us_default: float
    device: dict[str, Any]
    program: str
    versions: dict[str, str]
    date: str
    log: str

    @property
    def ratio(self) -> float:
        """Default's time over the winner's: above 1 where tuning helped."""
        return self.us_default / self.us

    @property
    def key(self) -> str:
        """What must be equal for the record to apply, see `tuning_key`."""
        return tuning_key(
            self.problem, self.family, self.device["slug"], self.program, self.versions
        )

    @property
    def place(self) -> tuple[str, str, str]:
        """Device, family and problem: a newer verdict for the same place replaces this one."""
        return self.device["slug"], self.family, self.problem.name

    def schedule(self) -> Schedule:
        """The winning schedule.

        Raises
        ------
        InfeasibleSchedule
            Where the family's decisions have other names or types by now.
        """
        return schedule_from_dict(self.family, self.problem.variant.pass_, self.decisions)

    def to_line(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(
            {
                "format": FORMAT,
                "key": self.key,
                "problem": problem_to_dict(self.problem),
                "family": self.family,
                "decisions": self.decisions,
                "us": round(self.us, 3) or self.us,
                "us_default": round(self.us_default, 3) or self.us_default,
                "ratio": round(self.ratio, 4),
                "device": self.device,
                "program": self.program,
                "versions": self.versions,
                "date": self.date,
                "log": self.log,
            }
        )

    @classmethod
    def from_line(cls, text: str | bytes, where: str) -> Record:
        """Parse and validate one line; `where` (file and line) stands in the error.

        Raises
        ------
        CorruptRecord
            For anything but a complete record of this format.
        """
        try:
            row = json.loads(text.decode() if isinstance(text, bytes) else text)
            if row["format"] != FORMAT or isinstance(row["format"], bool):
                raise ValueError(f"format is {row['format']}, but this version reads {FORMAT}")
            record = cls(
                problem=problem_from_dict(row["problem"]),
                family=_typed(row, "family", str),
                decisions=_typed(row, "decisions", dict),
                us=positive(row["us"], "us"),
                us_default=positive(row["us_default"], "us_default"),
                device={n: _typed(row["device"], n, k) for n, k in DEVICE_FIELDS.items()},
                program=_typed(row, "program", str),
                versions={name: _typed(row["versions"], name, str) for name in row["versions"]},
                date=_typed(row, "date", str),
                log=_typed(row, "log", str),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            reason = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            raise CorruptRecord(
                f"{where} is no tuned record ({reason}); remove the line or tune again."
            ) from error
        return record


DEVICE_FIELDS: dict[str, type] = {"slug": str, "kind": str, "arch": str, "level": str, "cores": int}


def device_summary(device: Device) -> dict[str, Any]:
    """The fields of a device that a record keeps."""
    return {name: getattr(device, name) for name in DEVICE_FIELDS}


def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """A problem as plain values for JSON."""
    return {
        "variant": problem.variant.to_dict(),
        "shape": problem.shape.to_dict(),
        "alignment": problem.alignment,
    }


def problem_from_dict(row: dict[str, Any]) -> Problem:
    """The inverse of `problem_to_dict`.

    Raises
    ------
    KeyError, TypeError, UnsupportedProblem
        Where the fields are not those of a problem.
    """
    return Problem(Variant(**row["variant"]), Shape(**row["shape"]), row["alignment"])


def tuning_key(
    problem: Problem, family: str, slug: str, program: str, versions: dict[str, str]
) -> str:
    """Everything that decides whether a measurement says something about another call.

    The operation, pass, dtype, head dims, mask and length class; the device; the kernel's source
    and the compiler's minor version.
    """
    v = problem.variant
    mask = "causal" if v.causal else "full"
    compiler = ".".join(versions.get("apache-tvm", "none").split(".")[:2])
    return "/".join(
        (
            "attention",
            v.pass_,
            v.dtype,
            f"d{v.head_dim_qk}",
            f"dv{v.head_dim_v}",
            mask,
            problem.length_class,
            slug,
            family,
            program,
            f"tvm{compiler}",
        )
    )


@functools.cache
def versions() -> dict[str, str]:
    """Versions of fa2tvm and of the tools that shape its programs; "none" where one is absent."""
    found = {"fa2tvm": fa2tvm.__version__}
    for package in ("apache-tvm", "apache-tvm-ffi", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


@functools.cache
def program_version(family: str, pass_: PassName) -> str:
    """Twelve hex digits over the source of a family's kernel and the kernel files it imports.

    Comments, docstrings and layout do not count, so that only a change of the program retires
    its records.
    """
    first = PROGRAM_SOURCES.get(
        (family, pass_), _PACKAGE / "kernels" / f"{family}_{_PASS_SUFFIX[pass_]}.py"
    )
    digest = hashlib.sha256()
    for path in sorted(_source_closure(first)):
        digest.update(path.name.encode())
        digest.update(_code_only(path.read_text()).encode())
    return digest.hexdigest()[:12]


def _source_closure(first: Path) -> set[Path]:
    """`first` and every file of fa2tvm.kernels and fa2tvm.blocks that it imports, transitively."""
    todo, found = [first], set()
    while todo:
        path = todo.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in ("fa2tvm.kernels", "fa2tvm"):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                if name == "fa2tvm.blocks" or name.startswith("fa2tvm.kernels."):
                    todo.append(_PACKAGE / (name.removeprefix("fa2tvm.").replace(".", "/") + ".py"))
    return found


def _code_only(source: str) -> str:
    """Source without comments, docstrings, white space and trailing commas."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) or not body:
            continue
        head = body[0]
        if isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant):
            for row in range(head.lineno - 1, head.end_lineno or head.lineno):
                lines[row] = ""
    return re.sub(r",(?=[)\]}])", "", "".join("".join(lines).split()))


def read_records(path: Path) -> tuple[list[Record], list[str]]:
    """The valid records of a file and one sentence for each line that is none."""
    records, damaged = _sorted_lines(path)
    return records, [complaint for _, complaint in damaged]


def _sorted_lines(path: Path) -> tuple[list[Record], list[tuple[bytes, str]]]:
    """The valid records of a file, and what is none with one sentence each."""
    records, damaged = [], []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            records.append(Record.from_line(line, f"{path}:{number}"))
        except CorruptRecord as error:
            damaged.append((line, str(error)))
    return records, damaged


def merge_records(path: Path, new: Iterable[Record]) -> None:
    """Put records into a file: each replaces its `place`, everything else stays, in one rename.

    Lines that are no records are moved to `<name>.damaged`. Several processes may merge at once.

    Raises
    ------
    StoreUnavailable
        Where the file cannot be written.
    """
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            old, damaged = _sorted_lines(path) if path.exists() else ([], [])
            merged = {record.place: record for record in old}
            merged.update((record.place, record) for record in new)
            if damaged:
                keep_aside(path, [line for line, _ in damaged])
            lines = [merged[place].to_line() + "\n" for place in sorted(merged)]
            write_atomically(path, "".join(lines))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new, never a part.

    Raises
    ------
    StoreUnavailable
        Where it cannot be written; the old text stays.
    """
    with storing(path):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def _typed(row: Any, name: str, kind: type) -> Any:
    if not isinstance(row, dict):
        raise TypeError(f"{row!r} stands where an object with the field {name} must be")
    if type(row[name]) is not kind:
        raise TypeError(f"{name} is {row[name]!r}, but it must be of type {kind.__name__}")
    return row[name]


def positive(value: Any, name: str) -> float:
    """A time as a float; anything that is none is a TypeError, ValueError or OverflowError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}, but it must be a number")
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} is {value}, but a time is positive and finite")
    return float(value)
