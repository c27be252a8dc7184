"""A family's decisions as MetaSchedule sees them: sampled categoricals, annotations, a trace.

The workload is a tiny module that carries the problem; a candidate is that module with one
annotation `fa2tvm.<decision>` per decision on its root block. Only the builder turns the decisions
into a program, so that this file knows Schedule, Problem and Device, and no kernel.
"""

from __future__ import annotations

import json
import math
import sys
import types
from dataclasses import dataclass
from typing import Any

from fa2tvm.device import Device
from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.problem import Problem
from fa2tvm.records import problem_to_dict
from fa2tvm.schedule import Schedule, schedule_class

PREFIX = "fa2tvm."


def import_meta_schedule() -> Any:
    """`tvm.s_tir.meta_schedule`, without the tensor intrinsics that its TuneContext would import.

    Importing tvm.s_tir.tensor_intrin takes more than a minute of CPU (tvm 0.27.0.post1,
    2026-11-28), and no space here uses an intrinsic.
    """
    name = "tvm.s_tir.tensor_intrin"
    sys.modules.setdefault(name, types.ModuleType(name))
    from tvm.s_tir import meta_schedule

    return meta_schedule


@dataclass(frozen=True)
class Space:
    """All schedules of one family for one problem on one device.

    Attributes
    ----------
    default
        The family's default schedule; always a point of the space.
    choices
        The values of each decision, by name.
    """

    problem: Problem
    device: Device
    family: str
    default: Schedule
    choices: dict[str, tuple[Any, ...]]

    @classmethod
    def of(cls, problem: Problem, device: Device, family: str) -> Space:
        """The space of a family, after checking that its default is feasible.

        Raises
        ------
        InfeasibleSchedule
            Where the family has no such pass or its default does not fit.
        """
        schedules = schedule_class(family, problem.variant.pass_)
        default = schedules.default(problem.variant, device)
        default.require_feasible(problem.variant, device)
        choices = {}
        offered = schedules.choices(problem, device)
        for name, value in default.to_dict().items():
            values = tuple(offered.get(name, ()))
            choices[name] = values if value in values else (value, *values)
        return cls(problem, device, family, default, choices)

    @property
    def size(self) -> int:
        """Number of points, feasible or not."""
        return math.prod(len(values) for values in self.choices.values())

    def reasons(self, schedule: Schedule) -> list[str]:
        """Every limit that a point breaks."""
        return schedule.reasons(self.problem.variant, self.device)

    def contains(self, schedule: Schedule) -> bool:
        """Whether the search could have proposed this schedule."""
        decisions = schedule.to_dict()
        return all(decisions[name] in values for name, values in self.choices.items())

    def workload(self) -> Any:
        """The IRModule that carries the problem; equal problems give structurally equal modules."""
        import tvm
        from tvm.script import tirx as T

        @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]
        def main(marker: T.Buffer((1,), "float32")):  # type: ignore[no-untyped-def, valid-type]
            for i in range(1):
                with T.sblock("problem"):
                    marker[i] = T.float32(0)

        carried = {
            "family": self.family,
            "problem": problem_to_dict(self.problem),
            "device": self.device.slug,
            "choices": self.choices,
        }
        func = main.with_attr("global_symbol", "main")
        func = func.with_attr(PREFIX + "workload", json.dumps(carried, sort_keys=True))
        return tvm.IRModule({"main": func})

    def sample(self, sch: Any) -> None:
        """The space generator: draw every decision and write it down as an annotation."""
        self._decide(sch, {})

    def apply(self, sch: Any, schedule: Schedule) -> None:
        """The same trace with the decisions of one schedule.

        Raises
        ------
        InfeasibleSchedule
            Where a decision is not among the choices.
        """
        decisions = {}
        for name, value in schedule.to_dict().items():
            if value not in self.choices[name]:
                raise InfeasibleSchedule(
                    f"decision {name} is {value!r}, but the space offers {self.choices[name]}; "
                    "choose one of those."
                )
            decisions[name] = self.choices[name].index(value)
        self._decide(sch, decisions)

    def _decide(self, sch: Any, decisions: dict[str, int]) -> None:
        root = sch.get_sblock("root")
        for name, values in self.choices.items():
            n = len(values)
            drawn = sch.sample_categorical(list(range(n)), [1 / n] * n, decisions.get(name))
            sch.annotate(root, PREFIX + name, drawn)

    def read(self, sch: Any) -> Schedule:
        """The schedule that the annotations of a candidate mean."""
        annotations = sch.get(sch.get_sblock("root")).annotations
        decisions = {
            name: values[int(annotations[PREFIX + name])] for name, values in self.choices.items()
        }
        return type(self.default)(**decisions)
