"""One problem of a tuning job: its search, its log and where it stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fa2tvm.errors import InfeasibleSchedule
from fa2tvm.records import program_version, tuning_key, versions
from fa2tvm.schedule import Schedule, schedule_from_dict
from fa2tvm.tune.database import Trial, TrialLog
from fa2tvm.tune.nouns import (
    Failure,
    JobResult,
    Measured,
    Stop,
    is_unserved,
    require_served,
)
from fa2tvm.tune.provenance import utc_now
from fa2tvm.tune.search import Search
from fa2tvm.tune.space import Space


@dataclass
class Job:
    """What is known of one problem: its trials, its search and the best so far."""

    space: Space
    log: TrialLog
    search: Search
    done: int = 0
    failed: int = 0
    default: Trial | None = None
    best: Trial | None = None

    @property
    def key(self) -> str:
        """What its trials belong to."""
        problem, device = self.space.problem, self.space.device
        program = program_version(self.space.family, problem.variant.pass_)
        return tuning_key(problem, self.space.family, device.slug, program, versions())

    def earlier(self) -> list[Trial]:
        """Trials of this very problem, kernel and versions; others never apply."""
        name, key = self.space.problem.name, self.key
        return [t for t in self.log.load() if t.key == key and t.problem == name]

    def known(self, earlier: Sequence[Trial]) -> dict[Schedule, Trial]:
        """Which schedules of the space earlier trials have tried; the default is measured again."""
        found: dict[Schedule, Trial] = {}
        for trial in earlier:
            if trial.error == "lost":  # that was not the candidate's doing, as far as is known
                continue
            try:
                schedule = schedule_from_dict(
                    self.space.family, self.space.problem.variant.pass_, trial.decisions
                )
            except InfeasibleSchedule:
                continue
            if self.space.contains(schedule) and schedule != self.space.default:
                found[schedule] = trial
        return found

    def teach(self, known: Mapping[Schedule, Trial]) -> None:
        """Hand earlier trials to the population and the cost model, in today's microseconds."""
        for trial in known.values():
            self._keep_if_best(trial)
        self.search.report(list(known), [self._todays_seconds(t) for t in known.values()])

    def take_default(self, outcome: Measured | Failure) -> None:
        """Trial 0: everything is compared with it, and it is what a user gets without tuning.

        Raises
        ------
        InfeasibleSchedule
            Where it failed.
        ServerUnavailable
            Where that was for want of a server.
        """
        schedule = self.space.default
        require_served([outcome])
        if isinstance(outcome, Failure):
            self.write(schedule, outcome, None)
            is_slow = "wait until the machine has less other work, or " * (outcome.kind == "hang")
            raise InfeasibleSchedule(
                f"default schedule {schedule.to_dict()} of {self.space.problem.name} failed "
                f"({outcome.kind}: {outcome.reason}); {is_slow}correct the kernel before tuning it."
            )
        self.default = self.best = self.write(schedule, outcome, outcome.us)
        self.search.report([schedule], [outcome.us * 1e-6])

    def take(
        self, outcomes: dict[Schedule, Measured | Failure], default: Measured | Failure | None
    ) -> None:
        """Write down one batch, and tell the search; `default` was timed in the same rounds.

        What was not tried for want of a server is no trial.

        Raises
        ------
        ServerUnavailable
            Where there is such a one, after all else is written down.
        """
        untried = [outcome for outcome in outcomes.values() if is_unserved(outcome)]
        outcomes = {s: outcome for s, outcome in outcomes.items() if not is_unserved(outcome)}
        us_default = default.us if isinstance(default, Measured) else None
        predicted = self._predicted(list(outcomes))
        trials = [
            self.write(s, outcome, us_default, predicted[s]) for s, outcome in outcomes.items()
        ]
        for trial in trials:
            self._keep_if_best(trial)
        self.search.report(list(outcomes), [self._todays_seconds(trial) for trial in trials])
        require_served(untried)

    def _predicted(self, schedules: Sequence[Schedule]) -> dict[Schedule, float | None]:
        """What the model, before it hears the outcome, expects of the default's time over each."""
        scores = self.search.predict(schedules)
        best = 1 / self.best.relative if self.best else None
        return {
            schedule: None if score is None or best is None else score * best
            for schedule, score in zip(schedules, scores, strict=True)
        }

    def write(
        self,
        schedule: Schedule,
        outcome: Measured | Failure,
        us_default: float | None,
        predicted: float | None = None,
    ) -> Trial:
        """Put one candidate's outcome on disk."""
        if isinstance(outcome, Measured) and us_default is None:
            outcome = Failure("timing", "the default schedule could not be timed beside it")
        measured = isinstance(outcome, Measured)
        trial = self.log.append(
            key=self.key,
            problem=self.space.problem.name,
            decisions=schedule.to_dict(),
            us=outcome.us if isinstance(outcome, Measured) else None,
            us_default=us_default if measured else None,
            runs_us=outcome.runs_us if isinstance(outcome, Measured) else (),
            error=outcome.kind if isinstance(outcome, Failure) else None,
            reason=outcome.reason if isinstance(outcome, Failure) else None,
            date=utc_now(),
            predicted=predicted,
        )
        self.done += 1
        self.failed += not measured
        return trial

    def best_us(self) -> float | None:
        """Microseconds of the best, on the clock of trial 0."""
        seconds = self._todays_seconds(self.best) if self.best else None
        return seconds * 1e6 if seconds else None

    def result(self, seconds: float, stopped: Stop) -> JobResult:
        """What the job found."""
        assert self.default is not None
        assert self.best is not None
        return JobResult(
            problem=self.space.problem,
            family=self.space.family,
            folder=self.log.folder,
            default=self.default,
            best=self.best,
            trials=self.done,
            failed=self.failed,
            seconds=seconds,
            stopped=stopped,
            message=self._message(stopped),
        )

    def _todays_seconds(self, trial: Trial) -> float | None:
        """Seconds on the clock of trial 0, so that batches of a drifting machine compare."""
        if trial.us is None or self.default is None or self.default.us is None:
            return None
        return trial.relative * self.default.us * 1e-6

    def _keep_if_best(self, trial: Trial) -> None:
        if trial.us is None:
            return
        if self.best is None or trial.relative < self.best.relative:
            self.best = trial

    def _message(self, stopped: Stop) -> str:
        why = {
            "trials": "the trials are used up",
            "seconds": "the time is up",
            "exhausted": f"no feasible point of the {self.space.size} is left",
            "interrupted": "it was interrupted",
        }[stopped]
        rejections = self.search.rejections
        if stopped == "exhausted" and rejections:
            reason, count = rejections.most_common(1)[0]
            why += f" ({count} proposals were refused: {reason.rstrip('.')})"
        stopped_because = f"Stopped after {self.done} trials because {why};"
        if self.best is None or self.best == self.default:
            return f"{stopped_because} the default schedule stays the best."
        return (
            f"{stopped_because} the best schedule is {1 / self.best.relative:.2f} times as fast as "
            "the default."
        )
