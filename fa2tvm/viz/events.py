"""An event of the trace, and the tape that events are written on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Version = Literal[1, 2]
# Tensors are 16-bit as on a GPU; statistics of rows and what is accumulated are float32.
TENSOR_BYTES, STATISTIC_BYTES = 2, 4


@dataclass(frozen=True)
class Event:
    """One step of an algorithm.

    Attributes
    ----------
    op
        What happens: the page's key for its words.
    line
        Line of the paper's algorithm.
    i, j
        Query and key block, None where the step belongs to no single one.
    values
        What the step computes or loads, by the paper's name.
    matmul_flops, other_flops
        Floating-point operations of matrix products, and all others; a comparison counts as one.
    read_bytes, written_bytes
        Traffic of HBM.
    shared, registers
        Names of what lies in shared memory and in registers after the step.
    """

    op: str
    line: int
    i: int | None
    j: int | None
    values: Mapping[str, Any]
    matmul_flops: int
    other_flops: int
    read_bytes: int
    written_bytes: int
    shared: tuple[str, ...]
    registers: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: None is what was never written, "-inf" minus infinity."""
        return {
            "op": self.op,
            "line": self.line,
            "i": self.i,
            "j": self.j,
            "values": {name: plain(value) for name, value in self.values.items()},
            "matmul_flops": self.matmul_flops,
            "other_flops": self.other_flops,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "shared": list(self.shared),
            "registers": list(self.registers),
        }


def plain(value: Any) -> Any:
    """Lists and numbers that JSON can hold."""
    if isinstance(value, np.ndarray):
        return [plain(x) for x in value.tolist()]
    if isinstance(value, list):
        return [plain(x) for x in value]
    if isinstance(value, float):
        if value == -np.inf:
            return "-inf"
        return None if np.isnan(value) else value
    return value


@dataclass
class Tape:
    """Events in order, and what is on chip meanwhile."""

    events: list[Event] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    registers: list[str] = field(default_factory=list)

    def load(self, *names: str) -> None:
        """Matrices are in shared memory from the next event on."""
        self.shared += [name for name in names if name not in self.shared]

    def hold(self, *names: str) -> None:
        """Values are in registers from the next event on."""
        self.registers += [name for name in names if name not in self.registers]

    def drop(self, *names: str) -> None:
        """Values are no longer on chip from the next event on."""
        self.shared = [name for name in self.shared if name not in names]
        self.registers = [name for name in self.registers if name not in names]

    def add(
        self,
        op: str,
        line: int,
        at: tuple[int | None, int | None],
        values: Mapping[str, Any],
        flops: tuple[int, int] = (0, 0),
        traffic: tuple[int, int] = (0, 0),
    ) -> None:
        """Write an event; `flops` is (matmul, other) and `traffic` (read, written) bytes."""
        kept = {
            name: value.copy() if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        self.events.append(
            Event(op, line, *at, kept, *flops, *traffic, tuple(self.shared), tuple(self.registers))
        )


def final(events: list[Event]) -> dict[str, Any]:
    """The last value of every name."""
    state: dict[str, Any] = {}
    for event in events:
        state.update(event.values)
    return state
