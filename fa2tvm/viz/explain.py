"""More on a schedule than itself: the runners-up of its search, and what its machine code holds."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from fa2tvm.errors import CorruptRecord
from fa2tvm.lookup import Found, home, shipped_root
from fa2tvm.tune.cost_model import WARMUP_TRIALS
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


def runners_up(found: Found, count: int = 3) -> list[Fact]:
    """The next best trials of the search behind a tuned schedule, measured and predicted.

    A prediction is `tune_model.replay`'s: by the model from earlier trials only.
    """
    log = _log_of(found)
    if log is None:
        return []
    ranked = sorted(log.measured, key=lambda trial: trial.relative)
    pairs = tune_model.replay(log.problem, log.device, log.family, log.measured)
    late = log.measured[WARMUP_TRIALS:]
    predicted = {t.trial: pair[0] for t, pair in zip(late, pairs, strict=False)}
    facts = []
    for place, trial in enumerate(ranked[: count + 1]):
        guess = f", predicted {predicted[trial.trial]:.2f}" if trial.trial in predicted else ""
        decisions = " ".join(f"{name}={value}" for name, value in trial.decisions.items())
        name = "search's best" if place == 0 else f"runner-up {place}"
        facts.append(
            (name, f"{1 / trial.relative:.2f} x the default{guess}: {decisions} (#{trial.trial})")
        )
    return facts


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
    total = sum(kinds.values())
    mix = ", ".join(f"{kind} {100 * n / total:.0f} %" for kind, n in kinds.most_common())
    return [
        ("instructions", f"{total}: {mix}" if total else "none"),
        ("vector registers", f"{len(registers)} in use"),
        ("stack", f"{spills} vector spills, {reloads} reloads"),
    ]
