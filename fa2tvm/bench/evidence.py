"""All that is claimed of a GPU, in one run with a limit of time that compiles nothing.

Every cell is measured once before any is measured again, and each is on disk before the next one
begins: a run that is cut short has lost its repeats first. The modules are built before, on any
machine (`build`); a cell whose module is missing is a row with that reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fa2tvm import compile as compiler
from fa2tvm.bench import suite
from fa2tvm.bench.calls import measure_calls
from fa2tvm.bench.measure import Policy, Pool, measure
from fa2tvm.bench.peers import device_of
from fa2tvm.bench.rows import Row, write_rows
from fa2tvm.bench.suite import Cell
from fa2tvm.device import Device
from fa2tvm.lookup import family_for, lookup
from fa2tvm.modules import without_compiling
from fa2tvm.problem import PASSES, PassName, Variant
from fa2tvm.records import write_atomically
from fa2tvm.schedule import Schedule, schedule_class
from fa2tvm.workloads import tagged

Program: TypeAlias = "tuple[Variant, Schedule]"

# Fastest first, so that what is cut short by an error of the last ones is complete.
PEERS = ("fa2tvm", "fa2tvm-default", "flash-attn-3", "sdpa-cudnn", "sdpa-flash", "flash-attn-2")
SUSTAINED_PEERS = ("fa2tvm", "fa2tvm-default", "flash-attn-3", "sdpa-cudnn")
# It compiles each variant for seconds, so it comes last, beside ours once more.
LATE_PEERS = ("fa2tvm", "flash-attn-4")
_SUSTAINED_SEQ = 16384
_BURST, _SUSTAINED = Policy(0.5), Policy(0.3, 1.0)
_SEED = 0


@dataclass(frozen=True)
class Phase:
    """Cells that go into one file.

    Attributes
    ----------
    what
        The rows' `what`, and the name of their file.
    repeats
        Whether what is left of the time goes into measuring them again.
    """

    what: str
    cells: tuple[Cell, ...]
    peers: tuple[str, ...]
    policy: Policy
    repeats: bool = False


def phases(pass_: PassName = "forward") -> list[Phase]:
    """The speed table; back to back at 16384 and with grouped heads; late peers.

    The backward's table has whole steps of training in it, forward and backward.
    """
    ending = "" if pass_ == "forward" else f"_{pass_}"
    burst = tuple(suite.gpu_table(["forward"] if pass_ == "forward" else [pass_, "both"]))
    alone = [*suite.gpu_table([pass_]), *((w, "bfloat16", (pass_,)) for w in tagged("gqa"))]
    long = tuple(
        cell for cell in alone if "gqa" in cell[0].tags or cell[0].shape.seq_q == _SUSTAINED_SEQ
    )
    return [
        Phase(f"gpu{ending}", burst, PEERS, _BURST, repeats=True),
        Phase(f"sustained{ending}", long, SUSTAINED_PEERS, _SUSTAINED),
        Phase(f"gpu{ending}", burst, LATE_PEERS, _BURST),
    ]


def programs(plan: Sequence[Phase], device: Device, calls: bool = False) -> list[Program]:
    """What a plan runs of ours: of each problem the schedule in use, and the family's default.

    A backward runs after its forward. `calls`: what the cost of a call needs, too.
    """
    cells: list[Cell] = [cell for phase in plan for cell in phase.cells]
    if calls:
        cells += [(workload, "bfloat16", ("both",)) for workload in tagged("tiny")]
    found: dict[Program, None] = {}
    for workload, dtype, passes in cells:
        for pass_ in PASSES if set(passes) - {"forward"} else PASSES[:1]:
            problem = workload.problem(pass_, dtype)
            variant = problem.variant
            family = schedule_class(family_for(device, variant), variant.pass_)
            found[variant, lookup(problem, device).schedule] = None
            found[variant, family.default(variant, device)] = None
    return list(found)


@dataclass
class Evidence:
    """One run of a plan.

    Attributes
    ----------
    run
        The provenance of every row.
    seconds
        After so long no cell is begun.
    out
        Folder of the files.
    say
        Gets every row.
    """

    plan: Sequence[Phase]
    run: dict[str, Any]
    seconds: float
    out: Path
    kind: str = "cuda"
    say: Callable[[Row], None] = lambda _: None
    began: float = field(default_factory=time.monotonic)
    pool: Pool = field(default_factory=dict)
    rows: dict[str, dict[tuple[str, ...], Row]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def measure(self) -> None:
        """The cost of a call, everything once, our modules' checks, then repeats.

        Calls take seconds: they go first, before what fills the time.
        """
        with without_compiling():
            if self._is_over():
                self.left_out.append("calls")
            else:
                self._calls()
            for phase in self.plan:
                for cell in phase.cells:
                    if self._is_over():
                        self.left_out.append(f"{phase.what} {cell[0].name}")
                    else:
                        self._cell(phase, cell, _SEED)
            if self._is_over():
                self.left_out.append("checks")
                return
            self._checks()
            for number, (phase, cell) in enumerate(self._again()):
                if self._is_over():
                    return
                self._cell(phase, cell, _SEED + 1 + number)

    def _again(self) -> Iterator[tuple[Phase, Cell]]:
        repeated = [phase for phase in self.plan if phase.repeats]
        while repeated:
            for phase in repeated:
                for cell in phase.cells:
                    yield phase, cell

    def _is_over(self) -> bool:
        return time.monotonic() - self.began >= self.seconds

    def _cell(self, phase: Phase, cell: Cell, seed: int) -> None:
        workload, dtype, passes = cell
        arguments = (workload, dtype, passes, phase.peers, phase.policy, phase.what)
        for row in measure(*arguments, seed, self.kind, self.pool):
            self._keep(phase.what, row)
        self._write(phase.what)

    def _calls(self) -> None:
        for workload in tagged("tiny"):
            for row in measure_calls(workload, _SEED, self.kind):
                self._keep("calls", row)
            self._write("calls")

    def _keep(self, what: str, row: Row) -> None:
        row = {**row, "run": self.run}
        key = (row["workload"], row["dtype"], row["pass"], row["mode"], row["peer"])
        self.rows.setdefault(what, {})[key] = row
        self.say(row)

    def _write(self, what: str) -> None:
        write_rows(self.rows[what].values(), self.out / f"{what}.jsonl")

    def _checks(self) -> None:
        """Each of our modules twice on awkward sizes and poisoned memory, as the tuner does it."""
        from fa2tvm.tune import harness

        device, found = device_of(self.kind), []
        ours = programs(self.plan, device)
        for variant in dict.fromkeys(variant for variant, _ in ours):
            harness.expect(variant, _SEED, self.kind)
        for variant, schedule in ours:
            reason: str | None = "it is not compiled"
            if self._is_over():
                self.left_out.append(f"check of {variant.name}")
                continue
            folder = compiler.cached(variant, schedule, device)
            if folder is not None:
                reason = harness.check(compiler.load(folder), _SEED, self.kind)
            found.append(
                {
                    "variant": variant.to_dict(),
                    "family": schedule.family,
                    "schedule": schedule.to_dict(),
                    "error": reason,
                    "run": self.run,
                }
            )
            write_atomically(self.out / "checks.json", json.dumps(found, indent=1) + "\n")
