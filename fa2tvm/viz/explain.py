"""More on a schedule than itself: the runners-up of its search, and what its machine code holds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fa2tvm.errors import CorruptRecord
from fa2tvm.lookup import Found, home, shipped_root
from fa2tvm.tune.database import Trial
from fa2tvm.viz import tune_model
from fa2tvm.viz.tune_report import Log, read_log

Fact = tuple[str, str]
# Kinds of instructions by the beginning of their AT&T names; the first that fits counts.
_KINDS = (
    ("multiply-add", r"vfn?m(add|sub)"),
    ("other vector arithmetic", r"v(add|sub|mul|div|max|min|rndscale|scalef|padd|psub|psll|psra)"),
    ("broadcast", r"v(p?broadcast)"),
    ("shuffle and convert", r"v(perm|shuf|unpck|insert|extract|cvt|pack|pmov|blend|pblend)"),
    ("vector move", r"vp?mov"),
    ("other vector", r"v"),
    ("branch and call", r"(j|call|ret)"),
)
_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9]*)(?:\s+(.*?))?\s*(?:#.*)?$")
_VECTOR_REGISTER = re.compile(r"%[xyz]mm(\d+)")


def tuned_facts(found: Found, runners_up: int = 3) -> list[Fact]:
    """A tuned schedule's measurement and prediction, and the next best trials of its search.

    A prediction is the search's own where the log holds it, else `tune_model.replay`'s. Of another
    trial only the decisions that differ are named.
    """
    record = found.record
    if record is None:
        return []
    facts = [
        ("tuned for", f"{record.problem.name} on {record.device['slug']}"),
        ("measured", f"{record.ratio:.2f} x the default, {record.date[:10]}"),
    ]
    log, number = _log_of(found), record.log.rpartition("#")[2]
    if log is None:
        return [*facts, ("evidence", f"tuning_logs/{record.log}, which is not here")]
    known = (log.problem, log.device, log.family, log.measured)
    pairs = {} if log.stale else tune_model.predictions(*known)[0]
    mine = next((t for t in log.measured if str(t.trial) == number), None)
    if mine is not None:
        facts.append(("in the search", _outcome(mine, pairs)))
    facts.append(("evidence", f"tuning_logs/{record.log}"))
    ranked = sorted((t for t in log.measured if t != mine), key=lambda trial: trial.relative)
    for place, trial in enumerate(ranked[:runners_up], 1):
        others = " ".join(
            f"{name}={value}"
            for name, value in trial.decisions.items()
            if value != record.decisions.get(name)
        )
        facts.append((f"runner-up {place}", f"{_outcome(trial, pairs)}: {others or 'the same'}"))
    return facts


def _outcome(trial: Trial, pairs: dict[int, tuple[float, float]]) -> str:
    """What a trial measured, beside its prediction."""
    guess = f", predicted {pairs[trial.trial][0]:.2f}" if trial.trial in pairs else ""
    return f"{1 / trial.relative:.2f} x the default{guess} (trial {trial.trial})"


def _log_of(found: Found) -> Log | None:
    """The log that a record points at; None where there is no record or its log is not here."""
    if found.record is None:
        return None
    folder = found.record.log.partition("#")[0].removesuffix("/trials.jsonl")
    for root in (shipped_root(), home()):
        path: Path = root / "tuning_logs" / folder
        if path.is_dir():
            try:
                return read_log(path)
            except CorruptRecord:
                continue
    return None


def code_facts(assembly: str) -> list[Fact]:
    """Instruction mix, vector registers and spills of x86 assembly in AT&T syntax.

    Counts are of the code as it stands, not of what runs: an instruction in a loop counts once. A
    spill is a vector move to the stack, a reload one from it.
    """
    kinds: Counter[str] = Counter()
    registers: set[int] = set()
    spills = reloads = 0
    for line in assembly.splitlines():
        found = _INSTRUCTION.match(line)
        if not found:
            continue
        name, operands = found[1], found[2] or ""
        kinds[next((kind for kind, start in _KINDS if re.match(start, name)), "scalar")] += 1
        registers.update(map(int, _VECTOR_REGISTER.findall(operands)))
        if name.startswith("vmov") and re.search(r"\(%r[sb]p", operands):
            to_stack = operands.rstrip().endswith(")")
            spills, reloads = spills + to_stack, reloads + (not to_stack)
    return [
        ("instructions", mix(kinds)),
        ("vector registers", f"{len(registers)} in use"),
        ("stack", f"{spills} vector spills, {reloads} reloads"),
    ]


def mix(kinds: Counter[str]) -> str:
    """How many instructions, and the share of each kind, the most frequent first."""
    total = sum(kinds.values())
    shares = ", ".join(f"{kind} {100 * n / total:.0f} %" for kind, n in kinds.most_common())
    return f"{total}: {shares}" if total else "none"
