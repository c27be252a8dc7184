"""How: the decisions of one kernel family, their choices, and whether they fit (nowhere else)."""

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

    @classmethod
    def default(cls, variant: Variant, device: Device) -> Schedule:
        """The hand-picked schedule that is good by itself where nothing is tuned."""
        raise NotImplementedError

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """The space: the values that each decision may take, by field name."""
        raise NotImplementedError

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
            raise InfeasibleSchedule(f"schedule {self.to_dict()} does not fit {variant.name}: {reasons[0]}")

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
            f"decision {wrong[0]!r} is unknown or missing for {family} {pass_}, whose decisions are "
            f"{', '.join(known)}; tune again with this version."
        )
    for name, value in decisions.items():
        want = type(getattr(cls, name))
        if type(value) is not want:
            raise InfeasibleSchedule(
                f"decision {name} is {value!r}, but it must be of type {want.__name__}; correct the record."
            )
    return cls(**decisions)


@dataclass(frozen=True)
class CpuForward(Schedule):
    """Decisions of Algorithm 1 on a CPU.

    Attributes
    ----------
    block_q, block_kv
        Rows of Q_i (one task) and of K_j, V_j.
    panel
        Queries of one register tile: they lie on the vector lanes.
    s_rows, o_rows
        Keys of an S tile and value columns of an O tile; times `panel` floats, they stay in registers.
    """

    family: ClassVar[str] = "cpu"
    pass_: ClassVar[PassName] = "forward"

    block_q: int = 128
    block_kv: int = 64
    panel: int = 32
    s_rows: int = 8
    o_rows: int = 8

    @classmethod
    def default(cls, variant: Variant, device: Device) -> CpuForward:
        """Two native vectors of queries a panel."""
        return cls(panel=2 * device.lanes, s_rows=8 if device.vector_bytes >= 64 else 4,
                   o_rows=8 if device.vector_bytes >= 64 else 4)

    @classmethod
    def choices(cls, problem: Problem, device: Device) -> dict[str, tuple[Any, ...]]:
        """Powers of two around the caches and register files of x86-64."""
        return {
            "block_q": (64, 128, 256),
            "block_kv": (32, 64, 128, 256),
            "panel": (device.lanes, 2 * device.lanes, 4 * device.lanes),
            "s_rows": (4, 6, 8, 12),
            "o_rows": (4, 6, 8, 12),
        }

    def footprint(self, variant: Variant, device: Device) -> Footprint:
        """Packed Q_i, K_j, V_j, the O_i accumulator and one S panel."""
        keys = -(-self.block_kv // self.s_rows) * self.s_rows
        columns = -(-variant.head_dim_v // self.o_rows) * self.o_rows
        floats = self.block_q * (variant.head_dim_qk + columns) + keys * (
            variant.head_dim_qk + columns + self.panel
        )
        vectors = -(-self.panel // device.lanes)
        return Footprint(4 * floats, max(self.s_rows, self.o_rows) * vectors)

    def reasons(self, variant: Variant, device: Device) -> list[str]:
        """Whole vectors, whole panels, and accumulators that leave registers for the operands."""
        reasons = []
        if self.panel % device.lanes:
            reasons.append(f"panel is {self.panel}, but it must be a multiple of {device.lanes} lanes.")
        if self.block_q % self.panel:
            reasons.append(f"block_q is {self.block_q}, but it must be a multiple of panel {self.panel}.")
        registers = 32 if device.vector_bytes == 64 else 16
        vectors = -(-self.panel // device.lanes)
        used = self.footprint(variant, device).accumulator_registers + vectors + 1
        if used > registers:
            reasons.append(
                f"a register tile needs {used} vector registers, but there are {registers}; "
                "take fewer rows or a narrower panel."
            )
        return reasons


SCHEDULES["cpu", "forward"] = CpuForward
