"""What the Schedule of every kernel family and pass has in common, and the table of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from fa2tvm.device import Device
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.problem import PassName, Problem, Variant


@dataclass(frozen=True)
class Footprint:
    """What one task (CPU thread or GPU block) of a schedule occupies."""

    scratch_bytes: int
    accumulator_registers: int
    threads: int = 1


@dataclass(frozen=True)
class Schedule:
    """Base of every family's decisions; each field of a subclass is one decision.

    A subclass sets `family` and `pass_`, gives every field a default that is good on an
    unknown device, lists in `choices` what the tuner may pick, and writes its limits in
    `footprint` and `reasons`.
    """

    family: ClassVar[str]
    pass_: ClassVar[PassName]
    # GPU forward: whether the kernel has an argument for a zeroed int32 tile counter.
    takes_counter: ClassVar[bool] = False

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Schedule:
        """The hand-picked schedule that is good by itself where nothing is tuned."""
        raise NotImplementedError

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space: the values that each decision may take, by field name."""
        raise NotImplementedError

    @classmethod
    def hand_picked(cls, problem: Problem, device: Device) -> tuple[Schedule, ...]:
        """Points of the space that the tuner tries first; the default is tried anyway."""
        del problem, device
        return ()

    @property
    def counts_tiles(self) -> bool:
        """Whether the kernel touches the counter that it takes."""
        return self.takes_counter

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """What one task occupies."""
        raise NotImplementedError

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Every limit that this schedule breaks for the variant on the device; empty if it fits."""
        raise NotImplementedError

    def feasible(self, variant: Variant, device: Device) -> bool:
        """Whether the schedule fits."""
        return not self.reasons(variant, device)

    def require_feasible(self, variant: Variant, device: Device) -> None:
        """Raise InfeasibleSchedule, naming the first limit that is broken."""
        reasons = self.reasons(variant, device)
        if reasons:
            raise InfeasibleSchedule(
                f"schedule {self.to_dict()} does not fit {variant.name}: {reasons[0]}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The decisions as plain values; `schedule_from_dict` is the inverse."""
        return asdict(self)


SCHEDULES: dict[tuple[str, PassName], type[Schedule]] = {}


def schedule_class(family: str, pass_: PassName) -> type[Schedule]:
    """The Schedule class of a family's pass.

    Raises
    ------
    InfeasibleSchedule
        Where the family has no such pass.
    """
    try:
        return SCHEDULES[family, pass_]
    except KeyError:
        known = ", ".join(f"{f} {p}" for f, p in SCHEDULES)
        raise InfeasibleSchedule(
            f"family is {family!r} for the {pass_} pass, but only {known} exist; choose one."
        ) from None


def schedule_from_dict(family: str, pass_: PassName, decisions: dict[str, Any]) -> Schedule:
    """Rebuild a schedule from its decisions.

    Raises
    ------
    InfeasibleSchedule
        For an unknown, missing or wrongly typed decision.
    """
    cls = schedule_class(family, pass_)
    known = {f.name: f for f in fields(cls)}
    wrong = sorted(set(decisions) ^ set(known))
    if wrong:
        raise InfeasibleSchedule(
            f"decision {wrong[0]!r} is unknown or missing for {family} {pass_}, whose decisions "
            f"are {', '.join(known)}; tune again with this version."
        )
    for name, value in decisions.items():
        want = type(getattr(cls, name))
        if type(value) is not want:
            raise InfeasibleSchedule(
                f"decision {name} is {value!r}, but it must be of type {want.__name__}; "
                "correct the record."
            )
    return cls(**decisions)
