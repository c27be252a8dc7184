"""The tuning report: what a search saw, what it learned, and what won, from its log alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa2tvm.device import Device
from fa2tvm.errors import CorruptRecord, InfeasibleSchedule
from fa2tvm.problem import Problem
from fa2tvm.records import problem_from_dict
from fa2tvm.schedule import schedule_from_dict
from fa2tvm.tune.cost_model import WARMUP_TRIALS
from fa2tvm.tune.database import JOB, TRIALS, Trial, TrialLog
from fa2tvm.tune.space import Space
from fa2tvm.viz import tune_model
from fa2tvm.viz.figures import COLORS, INK, Picture, draw
from fa2tvm.viz.report_page import (
    Link,
    Section,
    TableRow,
    paragraph,
    table,
    write_report,
)

_MOST_DECISIONS = 12


@dataclass(frozen=True)
class Log:
    """One job's folder: the newest run's kernel and versions, and the trials that belong to it."""

    folder: Path
    problem: Problem
    family: str
    device: Device
    runs: list[dict[str, Any]]
    trials: list[Trial]
    retired: int

    @property
    def measured(self) -> list[Trial]:
        """Trials with a time."""
        return [trial for trial in self.trials if trial.us is not None]

    @property
    def best(self) -> Trial:
        """The fastest trial beside its default."""
        return min(self.measured, key=lambda trial: trial.relative)

    @property
    def default(self) -> Trial:
        """Trial of the default schedule."""
        return self.measured[0]

    @property
    def stale(self) -> str | None:
        """Why its decisions are not those of this version's kernels; None where they are."""
        try:
            for trial in self.trials:
                schedule_from_dict(self.family, self.problem.variant.pass_, trial.decisions)
        except InfeasibleSchedule as error:
            return str(error)
        return None


def read_log(folder: Path) -> Log:
    """A job's folder.

    Raises
    ------
    CorruptRecord
        Where it is no log, or holds no time.
    """
    try:
        job = json.loads((folder / JOB).read_text())
        device = Device(**{**job["device"], "features": tuple(job["device"]["features"])})
        problem, family, runs = problem_from_dict(job["problem"]), job["family"], job["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptRecord(f"{folder} is no tuning log ({error}); give a job's folder.") from error
    every = TrialLog(folder).load()
    # Trials of another kernel or compiler say nothing about this one.
    trials = [trial for trial in every if trial.key == every[-1].key]
    if not any(trial.us is not None for trial in trials):
        raise CorruptRecord(f"{folder} holds no time, so there is nothing to report; tune again.")
    return Log(folder, problem, family, device, runs, trials, len(every) - len(trials))


def find_logs(path: Path) -> list[Path]:
    """The folders of jobs at or below a path.

    Raises
    ------
    CorruptRecord
        Where there is none.
    """
    found = sorted(trials.parent for trials in path.rglob(TRIALS))
    if not found:
        raise CorruptRecord(f"{path} holds no tuning log; run `fa2tvm tune` first.")
    return found


def write(folders: Sequence[Path], path: Path) -> list[Path]:
    """The report of some jobs as a page, and its pictures as PNG in a folder named after it.

    Returns what was written, the page first.
    """
    logs = [read_log(folder) for folder in folders]
    sections = [Section("Overview", (_progresses(logs), _overview(logs)))]
    for number, log in enumerate(logs, 1):
        sections += _sections(log, number)
    lead = (
        "Every candidate was built in a worker process and checked against float64 before it was "
        "timed, interleaved with the default schedule. Ratios are the default's time over its own."
    )
    return write_report(path, "What the tuner found", lead, sections)


def _progresses(logs: Sequence[Log]) -> Picture:
    """All jobs beside each other: a line each, a dot for each candidate, a tick at the best."""

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        for place, log in enumerate(logs):
            ratios = [1 / trial.relative for trial in log.measured]
            axis.plot(ratios, [place] * len(ratios), "o", color=COLORS[0], markersize=3, alpha=0.5)
            best = max(ratios)
            axis.plot([best, best], [place - 0.36, place + 0.36], color=COLORS[1], linewidth=2)
            right = axis.get_yaxis_transform()
            axis.text(1.01, place, f"{best:.2f}", transform=right, va="center", fontsize=7)
        axis.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        names = [f"{log.problem.name}, {log.device.slug} {log.family}" for log in logs]
        axis.set_yticks(range(len(logs)), names, fontsize=6)
        axis.set_ylim(len(logs) - 0.4, -0.6)
        axis.set_xlim(left=0)
        axis.set_xlabel("default's time / its own (right of 1: faster than the default)")
        axis.grid(axis="x")

    alt = (
        "Every candidate of every job. A dot is one candidate, an orange line and the figure at "
        "the right are the best of its job."
    )
    return draw("overview", alt, (7.5, 0.15 * len(logs) + 0.8), paint)


def _overview(logs: Sequence[Log]) -> str:
    rows: list[TableRow] = [
        [
            Link(log.problem.name, f"job-{number}"),
            log.device.slug,
            log.family,
            str(len(log.trials)),
            str(len(log.trials) - len(log.measured)),
            f"{1 / log.best.relative:.2f}",
        ]
        for number, log in enumerate(logs, 1)
    ]
    header = ["problem", "device", "family", "trials", "failed", "default / best"]
    return table(header, rows, "Every job")


def _sections(log: Log, number: int) -> list[Section]:
    prefix = f"{number}_"
    head = [
        Section(log.problem.name, (_facts(log),), anchor=f"job-{number}"),
        Section("Best so far", (_progress(log, prefix),), 3),
        Section("The winner beside the default", (_winner(log),), 3),
    ]
    tail = [Section("Failures", (_failures(log),), 3)]
    if log.stale:
        why = f"What follows from the kernels is left out: {log.stale}"
        return [*head, Section("Which decisions matter", (paragraph(why), _choices(log)), 3), *tail]
    return [
        *head,
        Section("Predicted against measured", tuple(_model(log, prefix)), 3),
        Section("Which decisions matter", tuple(_decisions(log, prefix)), 3),
        *tail,
    ]


def _facts(log: Log) -> str:
    run, n = log.runs[-1], len(log.trials)
    seen = len({json.dumps(trial.decisions, sort_keys=True) for trial in log.trials})
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    cores = "multiprocessors" if log.device.kind == "cuda" else "cores"
    where = f"{log.device.slug} ({log.device.arch}, {log.device.cores} {cores})"
    commit = (run["commit"] or "unknown")[:18]
    tried = f"{seen} points of the space were tried in {n} trials."
    if not log.stale:
        size = Space.of(log.problem, log.device, log.family).size
        share = f"{seen} of them were tried ({100 * seen / size:.2g} %)"
        tried = f"The space has {size} points; {share} in {n} trials."
    facts = [
        f"{where}, family {log.family}, kernel {run['program']}, commit {commit}, {run['date']}.",
        f"{versions}, seed {run['seed']}.",
        tried,
    ]
    if log.retired:
        facts.append(f"{log.retired} older trials of another kernel or compiler are left out.")
    return "".join(map(paragraph, facts))


def _progress(log: Log, prefix: str) -> Picture:
    measured = log.measured
    ratios = [1 / trial.relative for trial in measured]
    best = [max(ratios[: k + 1]) for k in range(len(ratios))]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        numbers = [trial.trial for trial in measured]
        axis.step(numbers, best, where="post", color=COLORS[0], label="best so far")
        axis.plot(numbers, ratios, "o", color=COLORS[4], markersize=4, label="one candidate")
        failed = [trial.trial for trial in log.trials if trial.us is None]
        if failed:
            axis.plot(failed, [0] * len(failed), "x", color=COLORS[1], label="failed")
        axis.axhline(1, color=INK, linewidth=0.8, linestyle=":")
        axis.set_xlabel("trial")
        axis.set_ylabel("default's time / its own")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        axis.legend(loc="lower right", ncols=3)

    alt = (
        f"Ratio over trials: the best candidate is {best[-1]:.2f} times as fast as the default "
        "(dotted line at 1)."
    )
    return draw(f"{prefix}progress", alt, (8, 3), paint)


def _winner(log: Log) -> str:
    rows: list[TableRow] = []
    default, best = log.default, log.best
    for name, value in default.decisions.items():
        changed = "font-weight:600" if best.decisions[name] != value else ""
        rows.append([name, str(value), (str(best.decisions[name]), changed)])
    # On the clock of trial 0, because a machine drifts between batches.
    times = [trial.relative * (default.us or 0) for trial in (default, best)]
    rows += [
        *([] if log.stale else _footprints(log)),
        ["default's time / its own", "1.00", f"{1 / best.relative:.2f}"],
        ["time, µs", *(f"{us:.1f}" for us in times)],
        ["GFLOP/s", *(f"{log.problem.flops() / us / 1e3:,.1f}" for us in times)],
    ]
    header = ["", "default", f"winner (trial {best.trial})"]
    return table(header, rows, "The winner beside the default")


def _footprints(log: Log) -> list[TableRow]:
    """What a task of the default and of the winner occupies."""
    variant = log.problem.variant
    found = []
    for trial in (log.default, log.best):
        schedule = schedule_from_dict(log.family, variant.pass_, trial.decisions)
        found.append(schedule.footprint(variant, log.device))
    return [
        ["scratch or shared memory, KiB", *(f"{f.scratch_bytes / 1024:.1f}" for f in found)],
        ["accumulator registers", *(str(f.accumulator_registers) for f in found)],
        ["threads", *(str(f.threads) for f in found)],
    ]


def _model(log: Log, prefix: str) -> list[str | Picture]:
    pairs, how = tune_model.predictions(log.problem, log.device, log.family, log.measured)
    if not pairs:
        need = WARMUP_TRIALS
        return [
            paragraph(f"Fewer than {need} measured trials: the model had nothing to learn from.")
        ]
    points = list(pairs.values())
    rank = tune_model.rank_correlation(points)

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.plot(*zip(*points, strict=True), "o", color=COLORS[0], markersize=4, alpha=0.8)
        every = [x for point in points for x in point]
        axis.plot([min(every), max(every)], [min(every), max(every)], ":", color=INK, linewidth=0.8)
        axis.set_xlabel("predicted ratio")
        axis.set_ylabel("measured ratio")
        axis.grid()

    alt = (
        f"{len(points)} trials, each {how}; rank correlation {rank:.2f}. "
        "The dotted line is a perfect prediction."
    )
    return [draw(f"{prefix}model", alt, (5.5, 3.6), paint)]


def _decisions(log: Log, prefix: str) -> list[str | Picture]:
    importance = tune_model.importance(log.problem, log.device, log.family, log.measured)
    parts: list[str | Picture] = [_choices(log)]
    if not importance:
        return parts
    top = importance[:_MOST_DECISIONS]

    def paint(figure: Any) -> None:
        axis = figure.subplots()
        axis.barh([name for name, _ in top], [100 * share for _, share in top], color=COLORS[0])
        axis.invert_yaxis()
        axis.set_xlabel("% of the gain of all splits of the model's trees")

    alt = "Share of each feature in what the cost model explains. Constant features have none."
    return [draw(f"{prefix}importance", alt, (7, 0.3 * len(top) + 0.9), paint), *parts]


def _choices(log: Log) -> str:
    """The best ratio seen with each choice of each decision."""
    found: dict[tuple[str, str], list[float]] = {}
    for trial in log.measured:
        for name, value in trial.decisions.items():
            found.setdefault((name, str(value)), []).append(1 / trial.relative)
    varied = Counter(name for name, _ in found)
    rows: list[TableRow] = [
        [
            f"{name} = {value}",
            str(len(ratios)),
            f"{max(ratios):.2f}",
            f"{sorted(ratios)[len(ratios) // 2]:.2f}",
        ]
        for (name, value), ratios in sorted(found.items(), key=lambda item: _numeric(item[0]))
        if varied[name] > 1
    ]
    return table(["choice", "trials", "best ratio", "median ratio"], rows, "Choices")


def _numeric(choice: tuple[str, str]) -> tuple[str, float, str]:
    name, value = choice
    return name, float(value) if value.isdigit() else 0.0, value


def _failures(log: Log) -> str:
    failed = [trial for trial in log.trials if trial.error is not None]
    if not failed:
        return paragraph("None.")
    counts = Counter(trial.error for trial in failed)
    examples = {trial.error: trial for trial in reversed(failed)}
    rows: list[TableRow] = [
        [str(kind), str(n), str(examples[kind].trial), str(examples[kind].reason)]
        for kind, n in counts.most_common()
    ]
    return table(["kind", "trials", "first trial", "its reason"], rows, "Failures")
