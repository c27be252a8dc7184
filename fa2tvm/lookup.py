"""Problem and Device to Schedule: the tuned record that applies, or the family's default."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fa2tvm.device import Device
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem
from fa2tvm.problem import Problem, Variant
from fa2tvm.records import Record, program_version, read_records, tuning_key, versions
from fa2tvm.schedule import SCHEDULES, Schedule, schedule_class, schedule_from_dict

Origin = Literal[
    "explicit", "user overlay", "shipped for this device", "shipped for this arch", "default"
]
# A record speaks for sequences up to so many times shorter or longer than its own: one of a single
# query (decode) says nothing about a prefill of the same variant and length class.
SIMILAR_LENGTHS = 8
# Where records lie, in the order of lookup, and which.
Stored: TypeAlias = "tuple[tuple[Origin, Path, tuple[Record, ...]], ...]"
# Families by kind of device, the fastest first.
FAMILIES: dict[str, tuple[str, ...]] = {"llvm": ("cpu",), "cuda": ("sm90", "sm80")}
# Architectures that a family is bound to; the others run on every device of their kind.
BOUND_TO: dict[str, tuple[str, ...]] = {"sm90": ("sm_90a",)}


@dataclass(frozen=True)
class Found:
    """The answer of `lookup`.

    Attributes
    ----------
    family, schedule
        What to build.
    origin
        The step that gave it.
    record
        The tuned record behind it; None for an explicit or a default schedule.
    notes
        One sentence for each faster family that cannot do the variant, and for each stored record
        of it that did not apply.
    """

    family: str
    schedule: Schedule
    origin: Origin
    record: Record | None = None
    notes: tuple[str, ...] = ()


def home() -> Path:
    """The user's folder ($FA2TVM_HOME, else ~/.fa2tvm): cache, schedules and tuning logs."""
    given = os.environ.get("FA2TVM_HOME")
    if given:
        return Path(given)
    try:
        return Path.home() / ".fa2tvm"
    except RuntimeError:
        # HOME is unset and the user has no entry in the password file.
        return Path(tempfile.gettempdir()) / f"fa2tvm-{os.geteuid()}"


@functools.cache
def shipped_root() -> Path:
    """The folder that holds the shipped `schedules` and `tuning_logs`.

    In a wheel it is the package; in a checkout (editable or bare) it is the folder above.
    """
    package = Path(__file__).resolve().parent
    if (package / "schedules").is_dir():
        return package
    return package.parent


def family_for(device: Device, variant: Variant | None = None) -> str:
    """The fastest kernel family of a device, or the fastest that can do a variant.

    Raises
    ------
    UnsupportedProblem
        Where no family can run on it, or none can do the variant.
    """
    return choose_family(device, variant)[0]


def choose_family(device: Device, variant: Variant | None = None) -> tuple[str, tuple[str, ...]]:
    """What `family_for` gives, and one sentence for each faster family that was passed over.

    Raises
    ------
    UnsupportedProblem
        As `family_for` does.
    """
    if device.kind not in FAMILIES:
        raise UnsupportedProblem(
            f"device is of kind {device.kind!r}, but kernels exist only for "
            f"{', '.join(FAMILIES)}; choose another device."
        )
    notes: list[str] = []
    for family in FAMILIES[device.kind]:
        reason = _cannot(family, device, variant)
        if reason is None:
            return family, tuple(notes)
        notes.append(f"{family} was passed over: {reason}")
    what = "any problem" if variant is None else variant.name
    raise UnsupportedProblem(
        f"no kernel family can do {what} on {device.slug} ({device.arch}): "
        f"{' '.join(_clause(note) for note in notes).rstrip(' ;')}; call PyTorch's own attention "
        "there."
    )


def _clause(note: str) -> str:
    return note.rstrip(".") + ";"


def _cannot(family: str, device: Device, variant: Variant | None) -> str | None:
    """Why a family cannot do a variant on a device of its kind, or None where it can."""
    arches = BOUND_TO.get(family, (device.arch,))
    if device.arch not in arches:
        return f"it needs {' or '.join(arches)}, but {device.slug} is {device.arch}."
    if variant is None:
        return None if any(known == family for known, _ in SCHEDULES) else "it has no kernel yet."
    if (family, variant.pass_) not in SCHEDULES:
        return f"it has no {variant.pass_} kernel yet."
    default = schedule_class(family, variant.pass_).default(variant, device)
    reasons = default.reasons(variant, device)
    return reasons[0] if reasons else None


def lookup(
    problem: Problem,
    device: Device,
    explicit: Schedule | dict[str, Any] | None = None,
    family: str | None = None,
    stored: Stored | None = None,
) -> Found:
    """The schedule of a problem on a device, and the step that gave it. Never tunes.

    Parameters
    ----------
    explicit
        A schedule, or its decisions, that the caller insists on.
    family
        The kernel family; by default the device's fastest that can do the variant.
    stored
        The records to choose from; those that the files hold now by default.

    Raises
    ------
    InfeasibleSchedule
        Where the explicit schedule does not fit, or not even the default does.
    UnsupportedProblem
        Where no family runs on the device or can do the variant there.
    """
    variant = problem.variant
    if explicit is not None:
        if isinstance(explicit, Schedule):
            schedule = explicit
        else:
            family = family or family_for(device, variant)
            schedule = schedule_from_dict(family, variant.pass_, explicit)
        schedule.require_feasible(variant, device)
        return Found(schedule.family, schedule, "explicit")
    notes: list[str] = []
    if family is None:
        family, passed_over = choose_family(device, variant)
        notes.extend(passed_over)
    for origin, path, records in stored or stored_now(variant.pass_, device):
        for record in _nearest(records, problem, family):
            reason = _why_not(record, problem, device)
            if reason is None:
                return Found(family, record.schedule(), origin, record, tuple(notes))
            notes.append(f"{path}: {record.problem.name} was passed over, {reason}.")
    default = schedule_class(family, variant.pass_).default(variant, device)
    default.require_feasible(variant, device)
    return Found(family, default, "default", None, tuple(notes))


def stored_now(pass_: str, device: Device) -> Stored:
    """What the files hold for a pass, in the order of lookup."""
    return tuple((origin, path, _load(path)) for origin, path in _paths(pass_, device))


def stored_records(device: Device) -> Iterator[tuple[Origin, Record]]:
    """Every stored record that a lookup on the device may meet, in lookup order."""
    for pass_ in ("forward", "backward"):
        for origin, _, records in stored_now(pass_, device):
            for record in records:
                yield origin, record


def _paths(pass_: str, device: Device) -> Iterator[tuple[Origin, Path]]:
    """Record files of a pass in the order of lookup."""
    name = f"{pass_}.jsonl"
    yield "user overlay", home() / "schedules" / device.slug / name
    shipped = shipped_root() / "schedules"
    yield "shipped for this device", shipped / device.slug / name
    if shipped.is_dir():
        for folder in sorted(shipped.iterdir()):
            if folder.name != device.slug:
                yield "shipped for this arch", folder / name


def _nearest(records: tuple[Record, ...], problem: Problem, family: str) -> list[Record]:
    """Records of the same variant and length class, the most similar sizes first."""
    same = [
        record
        for record in records
        if record.family == family
        and record.problem.variant == problem.variant
        and record.problem.length_class == problem.length_class
        and _similar(record.problem.shape.seq_q, problem.shape.seq_q)
        and _similar(record.problem.shape.seq_kv, problem.shape.seq_kv)
    ]
    return sorted(same, key=lambda record: _distance(record.problem, problem))


def _similar(a: int, b: int) -> bool:
    return max(a, b) <= SIMILAR_LENGTHS * max(1, min(a, b))


def _distance(a: Problem, b: Problem) -> float:
    """How unlike two problems of one variant are: octaves of work per size."""
    pairs = (
        (a.shape.batch * a.shape.heads_q, b.shape.batch * b.shape.heads_q),
        (a.shape.seq_q, b.shape.seq_q),
        (a.shape.seq_kv, b.shape.seq_kv),
        (a.shape.group, b.shape.group),
    )
    return sum(abs(math.log2(1 + x) - math.log2(1 + y)) for x, y in pairs)


def _why_not(record: Record, problem: Problem, device: Device) -> str | None:
    """Why a record of this variant does not apply here, or None where it does."""
    if record.device["kind"] != device.kind or record.device["level"] != device.level:
        return f"it was measured on {record.device['slug']} ({record.device['level']})"
    program = program_version(record.family, problem.variant.pass_)
    slug = record.device["slug"]
    if record.key != tuning_key(problem, record.family, slug, program, versions()):
        return "it was measured with another version of the kernel or of TVM"
    try:
        schedule = record.schedule()
    except InfeasibleSchedule as error:
        return str(error).rstrip(".")
    reasons = schedule.reasons(problem.variant, device)
    return f"its schedule does not fit here ({reasons[0]})" if reasons else None


def _load(path: Path) -> tuple[Record, ...]:
    """Records of a file, parsed again only when the file has changed."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return _parse(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _parse(path: Path, _mtime_ns: int, _size_bytes: int) -> tuple[Record, ...]:
    records, complaints = read_records(path)
    for complaint in complaints:
        warnings.warn(complaint, RuntimeWarning, stacklevel=4)
    return tuple(records)
