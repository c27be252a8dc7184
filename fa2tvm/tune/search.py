"""MetaSchedule's evolutionary search over a Space: propose schedules, hear how fast they were."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from fa2tvm.schedule import Schedule
from fa2tvm.tune.cost_model import WARMUP_TRIALS, make_cost_model
from fa2tvm.tune.space import Space, import_meta_schedule

# Rounds without one new candidate after which the space counts as exhausted.
_EMPTY_ROUNDS = 5
# The search itself has no limit: the job stops it by trials and by time.
_NO_LIMIT = 1 << 20


class Search:
    """Evolutionary search with postprocessor, mutator and cost model of this package.

    Parameters
    ----------
    space
        What may be proposed.
    seed
        Decides every random choice: equal results give equal proposals.
    batch
        Schedules that one round of evolution picks.
    neighbours
        Points one decision away from the default that are proposed before all but the hand-picked
        ones: what each decision is worth by itself teaches the model most.
    """

    def __init__(self, space: Space, seed: int, batch: int, neighbours: int = 0) -> None:
        ms = import_meta_schedule()
        import tvm

        self._ms = ms
        self._space = space
        self._seen: set[Schedule] = set()
        self._tried: set[Schedule] = set()
        self._queue: deque[Schedule] = deque(first_picks(space, seed, neighbours))
        self._candidates: dict[Schedule, Any] = {}
        self.rejections: Counter[str] = Counter()
        self._mod = space.workload()
        logger = logging.getLogger("fa2tvm.tune.search")
        logger.setLevel(logging.ERROR)
        self._context = ms.TuneContext(
            self._mod,
            target=tvm.target.Target(space.device.target()),
            space_generator=ms.space_generator.ScheduleFn(
                space.sample,
                sch_rules=[],
                postprocs=[_feasibility(space, self.rejections)],
                mutator_probs={_one_decision(seed): 1.0},
            ),
            search_strategy=ms.search_strategy.EvolutionarySearch(
                population_size=64,
                init_min_unmeasured=1,
                genetic_num_iters=3,
                eps_greedy=0.1,
            ),
            task_name=space.problem.name,
            rand_state=1 + seed % (2**31 - 2),
            num_threads=1,
            logger=logger,
        )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._mod)
        self._model = make_cost_model(space, seed)
        designs = self._context.generate_design_space()
        self._context.pre_tuning(_NO_LIMIT, batch, designs, self._database, self._model)

    def propose(self, most: int) -> list[Schedule]:
        """New feasible schedules, the most promising first; empty when the space has no more.

        The hand-picked ones come before all others.
        """
        found: list[Schedule] = []
        for _ in range(_EMPTY_ROUNDS):
            while self._queue and len(found) < most:
                schedule = self._queue.popleft()
                if schedule not in self._tried:
                    self._tried.add(schedule)
                    found.append(schedule)
            if found:
                break
            self._queue.extend(self._generate())
        return found

    def predict(self, schedules: Sequence[Schedule]) -> list[float | None]:
        """The model's score of each: the best time so far over its own; None before it learned."""
        if not schedules or self._model.measured < WARMUP_TRIALS:
            return [None] * len(schedules)
        candidates = [self._candidates.get(s) or self._candidate(s) for s in schedules]
        return [float(score) for score in self._model.predict(self._context, candidates)]

    def expect(self, schedules: Sequence[Schedule]) -> None:
        """Propose none of these any more: another search has, and the results will be reported."""
        self._seen.update(schedules)
        self._tried.update(schedules)

    def _generate(self) -> list[Schedule]:
        """One round of evolution: what is new among its picks."""
        fresh = []
        for candidate in self._context.generate_measure_candidates() or ():
            schedule = self._space.read(candidate.sch)
            if schedule not in self._seen:
                self._seen.add(schedule)
                self._candidates[schedule] = candidate
                fresh.append(schedule)
        return fresh

    def report(self, schedules: Sequence[Schedule], seconds: Sequence[float | None]) -> None:
        """Tell the population and the cost model; None is a failed trial.

        Also for schedules that were never proposed: the default, or trials of an earlier job.
        """
        ms = self._ms
        candidates, results = [], []
        for schedule, time in zip(schedules, seconds, strict=True):
            self._seen.add(schedule)
            self._tried.add(schedule)
            candidate = self._candidates.pop(schedule, None) or self._candidate(schedule)
            candidates.append(candidate)
            failed = ms.runner.RunnerResult(None, "failed")
            results.append(failed if time is None else ms.runner.RunnerResult([time], None))
            if time is not None:
                self._database.commit_tuning_record(
                    ms.database.TuningRecord(
                        candidate.sch.trace,
                        self._workload,
                        [time],
                        self._context.target,
                        candidate.args_info,
                    )
                )
        if candidates:
            self._model.update(self._context, candidates, results)
            self._context.notify_runner_results(candidates, results)

    def _candidate(self, schedule: Schedule) -> Any:
        from tvm.s_tir import Schedule as Trace

        sch = Trace(self._mod)
        self._space.apply(sch, schedule)
        args = self._ms.arg_info.ArgInfo.from_entry_func(self._mod, remove_preproc=False)
        return self._ms.MeasureCandidate(sch, args)


def first_picks(space: Space, seed: int, neighbours: int) -> list[Schedule]:
    """The family's hand-picked points, and some that differ from its default in one decision."""
    default = space.default
    near = [
        dataclasses.replace(default, **{name: value})
        for name, values in space.choices.items()
        for value in values
        if value != getattr(default, name)
    ]
    near = [schedule for schedule in near if not space.reasons(schedule)]
    chosen = random.Random(seed).sample(near, min(neighbours, len(near)))
    picked = type(default).hand_picked(space.problem, space.device)
    fitting = [s for s in picked if space.contains(s) and not space.reasons(s)]
    return [s for s in dict.fromkeys([*fitting, *chosen]) if s != default]


def _feasibility(space: Space, rejections: Counter[str]) -> Any:
    """A postprocessor that refuses what Schedule.reasons refuses, and counts why."""
    ms = import_meta_schedule()
    from tvm.ir.utils import derived_object

    @derived_object
    class Feasible(ms.postproc.PyPostproc):  # type: ignore[misc, name-defined]
        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, sch: Any) -> bool:
            reasons = space.reasons(space.read(sch))
            if reasons:
                rejections[reasons[0]] += 1
            return not reasons

        def clone(self) -> Any:
            return Feasible()

    return Feasible()


def _one_decision(seed: int) -> Any:
    """A mutator that moves one decision: half the time to a neighbouring choice, else anywhere.

    TVM's own mutators leave general categorical samples alone, and hand a Python mutator its
    random state by value, so that it needs a generator of its own.
    """
    ms = import_meta_schedule()
    from tvm.ir.utils import derived_object

    @derived_object
    class OneDecision(ms.mutator.PyMutator):  # type: ignore[misc, name-defined]
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.rng = random.Random(seed)

        def _initialize_with_tune_context(self, context: Any) -> None:
            pass

        def apply(self, trace: Any, _: Any) -> Any:
            movable = [
                inst
                for inst in trace.insts
                if inst.kind.name == "SampleCategorical" and len(inst.attrs[0]) > 1
            ]
            if not movable:
                return None
            inst = self.rng.choice(movable)
            now, n = int(trace.decisions[inst]), len(inst.attrs[0])
            others = [i for i in range(n) if i != now]
            if self.rng.random() < 0.5:
                others = [i for i in others if abs(i - now) == 1]
            return trace.with_decision(inst, self.rng.choice(others), remove_postproc=True)

        def clone(self) -> Any:
            return OneDecision(self.rng.randrange(2**31))

    return OneDecision(seed)
