"""Which parts of the yardstick are needed: each is left out in turn, and right programs judged.

Run as `python tests/yardstick_parts.py [PROBLEMS [SEED]]`; docs/yardstick.md has the table. The
problems are those of test_random.py and louder ones, the right programs

- cpu: this package's CPU family, compiled with its default schedules;
- blocks: FlashAttention-2 in torch's float32 with blocks of 64 (flash.py);
- plain: matmul, softmax and autograd in float32 on the problem itself;
- half: blocks with P and dS rounded to bfloat16 where that is the storage type, held to arithmetic
  in it, as tensor cores are.

A part is left out by a change of the yardstick's own source text, which must be found there once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
import types
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import calls
import flash
import test_random
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from yardstick import Case, Tensors

from fa2tvm import yardstick

# What is left out: (text of fa2tvm/yardstick.py, text without the part), ...
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "rounding of the result": (
        ("n: x.abs() for", "n: torch.zeros_like(x) for"),
        ("(seen * (1 + sums))[..., 0] +", ""),
    ),
    "rounding of P": (("e = 1 +", "e ="),),
    "S, whole": (("e = 1 + scale * _sum_error(q, k.mT)", "e = 1"),),
    "S, partial sums": (
        ("_sum_error(q, k.mT)", "q.norm(dim=-1, keepdim=True) * k.mT.norm(dim=-2, keepdim=True)"),
    ),
    "P below 2^-126": (("+ visible * (torch.finfo(torch.float32).tiny / eps)", ""),),
    "scale in O": (
        ('line["O"] += (tilt @ v - out * tilt.sum(dim=-1, keepdim=True)).abs()', "pass"),
    ),
    "scale in LSE": (("+ tilt.sum(dim=-1).abs()", ""),),
    "scale in dQ": (('line["dQ"] += scale * ((tilt * (dp - delta)) @ k).abs()', "pass"),),
    "D, O's error": (('line["O"] + spread.sqrt() + coarser', "coarser"),),
    "D, storage of O": (("+ coarser * out.abs()", ""),),
    "D, partial sums": (("d_error += math.sqrt(v.shape[-1] / 3) * delta.abs()", "pass"),),
    "D in dQ": (('line["dQ"] += scale * d_error * (p @ k).abs()', "pass"),),
    "D in dK": (("(ds_error + p * d_error)", "ds_error"),),
    "LSE in P": (("p_error = p_error + p * size", "pass"),),
    "LSE in dQ": (("1 + sums + size", "1 + sums"),),
    "dP, whole": (("+ p * _sum_error(do, v.mT)", ""),),
    "dP, partial sums": (
        ("_sum_error(do, v.mT)", "do.norm(dim=-1, keepdim=True) * v.mT.norm(dim=-2, keepdim=True)"),
    ),
    "half an ulp of storage": (("else _half_ulp(oracle, ours.dtype)", "else 0.0"),),
    "floor of exp2 and log2": (("else _GPU_FLOOR", "else 0.0"),),
    "partial sums over keys and queries": (("share * (float32.eps", "0 * share * (float32.eps"),),
    "rows that are alike": (('name == "O" and self.alike', "False"),),
    "plain's Algorithm 2": (('[plain, case.algorithm_2(dtype, plain["O"])]', "[plain]"),),
    "plain on the problem itself": (("in (self, self._crowd())", "in (self._crowd(),)"),),
    "plain's large products": (("padded(a) @ padded(b)", "a @ b"),),
    "copies, many rows": (("-(-ENOUGH_ROWS // rows) if rows else 1", "1"),),
    "copies, worst scale": (("(float(below) + float(above)) / 2", "float(below)"),),
}
# Several at once, as far as one does the work of another.
TOGETHER = {
    "scale": ("scale in O", "scale in LSE", "scale in dQ"),
    "LSE": ("LSE in P", "LSE in dQ"),
    "scale, LSE": ("scale", "LSE"),
    "D": ("D in dQ", "D in dK"),
    "all partial sums": ("S, partial sums", "D, partial sums", "dP, partial sums"),
    "scale, LSE, S": ("scale, LSE", "S, whole"),
    "scale, LSE, S, dP": ("scale, LSE, S", "dP, whole"),
    "scale, LSE, S, D": ("scale, LSE, S", "D"),
    "scale, LSE, S, dP, D": ("scale, LSE, S, dP", "D"),
}
for _name, _parts in TOGETHER.items():
    PARTS[_name] = sum((PARTS[part] for part in _parts), ())
# Those that change what plain PyTorch says.
PLAINS = (
    "plain's Algorithm 2",
    "plain on the problem itself",
    "plain's large products",
    "copies, many rows",
    "copies, worst scale",
)
MAX_LOGITS = 1 << 16
CANDIDATES = ("cpu", "blocks", "plain", "half")


def without(part: str | None) -> types.ModuleType:
    """The yardstick's module without a part; whole for None."""
    text = Path(yardstick.__file__).read_text(encoding="utf-8")
    for old, new in PARTS[part] if part else ():
        assert text.count(old) == 1, f"the yardstick does not say {old!r} once"
        text = text.replace(old, new)
    module = types.ModuleType(f"yardstick_{list(PARTS).index(part) if part else 'whole'}")
    sys.modules[module.__name__] = module
    exec(compile(text, module.__name__, "exec"), module.__dict__)
    return module


def problems(count: int, seed_: int) -> list[test_random.Draw]:
    """Draws of test_random.py without the largest, every second with logits in the hundreds."""
    found: list[test_random.Draw] = []

    @seed(seed_)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(test_random.draws)
    def collect(draw: test_random.Draw) -> None:
        heads = draw.heads_kv * draw.group
        rows = draw.batch * min(draw.seq_q * heads, draw.seq_kv * draw.heads_kv)
        copies = -(-yardstick.ENOUGH_ROWS // rows) if rows else 1
        if copies * draw.batch * heads * draw.seq_q * draw.seq_kv <= MAX_LOGITS:
            if len(found) % 2:
                sign = 1.0 if draw.data_seed % 2 else -1.0
                draw = dataclasses.replace(draw, softmax_scale=sign, amplitude_offset=(3.0, 0.0))
            found.append(draw)

    collect()
    return found


def plain(case: Case) -> Tensors:
    """The control: matmul, softmax and autograd, stored."""
    results = case.plain(torch.float32)
    return {n: x.to(torch.float32 if n == "LSE" else case.q.dtype) for n, x in results.items()}


def answers(case: Case) -> dict[str, tuple[Case, Tensors]]:
    """What the right programs say, each with the case that it is held to."""
    found = {
        "cpu": (case, calls.run(case)),
        "blocks": (case, flash.attention(case)),
        "plain": (case, plain(case)),
    }
    if case.q.dtype == torch.bfloat16:
        half = dataclasses.replace(case, arithmetic=None)
        half.__dict__["oracle"] = case.oracle
        found["half"] = (half, flash.attention(half, "P_in_storage"))
    return found


class Judge:
    """A case, and what of its verdict does not depend on the part that is left out."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.whole = self._copy(yardstick, case, oracle=case.oracle)
        crowd = self.whole._crowd()
        plain = functools.cache(crowd.plain)
        of_keys = functools.cache(lambda dtype: crowd.algorithm_2(dtype, plain(dtype)["O"]))
        self.known = {
            "oracle": crowd.oracle,
            "plain": plain,
            "algorithm_2": lambda dtype, _: of_keys(dtype),
        }

    @staticmethod
    def _copy(module: types.ModuleType, case: Any, **known: Any) -> Any:
        copy = module.Case(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})
        copy.__dict__.update(known)
        return copy

    def without(self, part: str | None, module: types.ModuleType) -> Any:
        """The same case in a module's class."""
        judged = self._copy(module, self.case, oracle=self.case.oracle)
        if part not in PLAINS:
            crowd = self._copy(module, judged._crowd(), **self.known)
            judged.__dict__["_crowd"] = lambda: crowd
        return judged


def uneven(seed_: int, softmax_scale: float | None) -> Case:
    """Rows of Q, V and dO that differ in size as exp(1.5 N(0, 1)): errors of every size."""
    generator = torch.Generator().manual_seed(seed_)

    def rows(heads: int, width: int, spread: float = 1.5) -> torch.Tensor:
        x = torch.randn(1, 128, heads, width, generator=generator)
        return x * (spread * torch.randn(1, 128, 1, 1, generator=generator)).exp()

    how: dict[str, Any] = {"causal": True, "softmax_scale": softmax_scale}
    dlse = torch.randn(1, 2, 128, generator=generator)
    return Case(rows(2, 32), rows(1, 32, 0), rows(1, 24), rows(2, 24), dlse, **how)


def hidden(modules: Mapping[str | None, types.ModuleType]) -> dict[str | None, set[str]]:
    """For each part, the small bugs of flash.py that only the whole yardstick sees."""
    found: dict[str | None, set[str]] = {part: set() for part in modules}
    for case in (uneven(1, None), uneven(2, 1.0)):
        judge = Judge(case)
        results = {bug: flash.attention(case, bug) for bug in flash.BELOW_HALF}
        seen: set[str] = set()
        for part, module in modules.items():
            judged = judge.without(part, module)
            caught = {bug for bug, x in results.items() if judged.why_wrong(x)}
            seen = seen if part else caught
            found[part] |= seen - caught
    return found


def main(count: int = 100, seed_: int = 0) -> None:
    """Print the table: the problems on which a right program is called wrong, and unseen bugs."""
    torch.set_num_threads(1)
    modules = {part: without(part) for part in (None, *PARTS)}
    wrong: Counter[tuple[str | None, str]] = Counter()
    judged: Counter[str] = Counter()
    outputs: dict[tuple[str | None, str], Counter[str]] = {}
    for draw in problems(count, seed_):
        case = draw.case()
        said = answers(case)
        judged.update(said.keys())
        judges = {id(held): Judge(held) for held, _ in said.values()}
        for part, module in modules.items():
            cases = {key: judge.without(part, module) for key, judge in judges.items()}
            for candidate, (held, results) in said.items():
                reason = cases[id(held)].why_wrong(results)
                if reason:
                    wrong[part, candidate] += 1
                    where = outputs.setdefault((part, candidate), Counter())
                    where[re.split(r"[^A-Za-z]", reason)[0]] += 1
    unseen = hidden(modules)
    table = [["left out", *(f"{c} ({judged[c]})" for c in CANDIDATES), "hides"]]
    for part in modules:
        counts = [str(wrong[part, c]) for c in CANDIDATES]
        table.append([part or "nothing", *counts, ", ".join(sorted(unseen[part]))])
    lines = [f"| {' | '.join(row)} |" for row in table]
    lines += [f"{key}: {dict(counter)}" for key, counter in outputs.items()]
    print("\n".join(lines))  # noqa: T201


if __name__ == "__main__":
    main(*(int(x) for x in sys.argv[1:]))
