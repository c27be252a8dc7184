"""The named problems, tagged by what they are for; the only list."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import Alignment, DType, PassName, Problem, Shape, Variant

# What each tag is for.
TAGS = {
    "ci": "small and awkward: the contract test",
    "tune": "real problems that are worth tuning",
    "cpu": "the speed table of the CPU",
    "tiny": "one call's overhead",
    "scaling": "cost against length",
    "decode": "one new query against a long cache",
    "bench": "the sweep of the paper (arXiv:2307.08691, section 4.1), for GPUs",
    "gpu": "the speed table of a GPU: that sweep and head dim 256",
    "gqa": "32 query heads on 8 key heads, for GPUs",
}
_EXAMPLE = "d64_causal_b1_h8_q2048_k2048"


@dataclass(frozen=True)
class Workload:
    """A named problem without its pass and dtype."""

    name: str
    shape: Shape
    head_dim_qk: int
    head_dim_v: int
    causal: bool
    alignment: Alignment = "bottom_right"
    tags: frozenset[str] = frozenset()

    def problem(self, pass_: PassName, dtype: DType) -> Problem:
        """The problem of one pass and storage type."""
        variant = Variant(pass_, dtype, self.head_dim_qk, self.head_dim_v, self.causal)
        return Problem(variant, self.shape, self.alignment)


def parse(text: str, tags: frozenset[str] = frozenset()) -> Workload:
    """A workload from its sizes, written as in `Problem.name` in any order.

    Parameters
    ----------
    text
        Parts joined by `_`: `d64` (head dim of Q and K), `dv32` (of V; as d by default), `b2`
        (batch), `h8` or `h8k2` (query heads, key heads), `q512`, `k512` (lengths; k as q by
        default), `causal`, `topleft`. Batch and heads are 1 by default.

    Raises
    ------
    UnsupportedProblem
        For a part that is none of these, or a missing `d` or `q`.
    """
    sizes: dict[str, int] = {}
    flags: set[str] = set()
    for part in text.split("_"):
        heads = re.fullmatch(r"h(\d+)k(\d+)", part)
        size = re.fullmatch(r"(dv|[dbhqk])(\d+)", part)
        if heads:
            sizes["h"], sizes["hk"] = int(heads[1]), int(heads[2])
        elif size:
            sizes[size[1]] = int(size[2])
        elif part in ("causal", "topleft"):
            flags.add(part)
        else:
            raise UnsupportedProblem(
                f"part {part!r} of problem {text!r} is unknown; "
                f"give a name of `fa2tvm.workloads` or sizes like {_EXAMPLE!r}."
            )
    for key in ("d", "q"):
        if key not in sizes:
            raise UnsupportedProblem(
                f"problem {text!r} does not say {key!r}; give sizes like {_EXAMPLE!r}."
            )
    heads_q = sizes.get("h", 1)
    shape = Shape(
        sizes.get("b", 1), heads_q, sizes.get("hk", heads_q), sizes["q"], sizes.get("k", sizes["q"])
    )
    return Workload(
        name=text,
        shape=shape,
        head_dim_qk=sizes["d"],
        head_dim_v=sizes.get("dv", sizes["d"]),
        causal="causal" in flags,
        alignment="top_left" if "topleft" in flags else "bottom_right",
        tags=tags,
    )


def _listed() -> dict[str, Workload]:
    rows: list[Workload] = []

    def add(tags: str, text: str, name: str = "") -> None:
        workload = parse(text, frozenset(tags.split()))
        rows.append(replace(workload, name=name or text))

    _add_ci(add)
    for d in (64, 128, 256):
        for causal in ("", "_causal"):
            for batch, seq in ((4, 512), (1, 2048), (1, 8192)) if d < 256 else ():
                add("cpu tune", f"d{d}{causal}_b{batch}_h8_q{seq}_k{seq}")
            for seq in (512, 1024, 2048, 4096, 8192, 16384):
                # The paper fixes 16k tokens and a hidden size of 2048.
                heads = 2048 // d
                tags = "bench gpu" if d < 256 else "gpu"
                add(tags, f"d{d}{causal}_b{16384 // seq}_h{heads}_q{seq}_k{seq}")
    add("gqa", "d128_causal_b2_h32k8_q8192_k8192")
    for seq in (512, 1024, 2048, 4096, 8192, 16384):
        add("scaling", f"d64_b1_h2_q{seq}_k{seq}")
    add("tiny", "d64_b1_h1_q16_k16")
    add("tiny", "d64_causal_b1_h1_q16_k16")
    add("decode", "d128_causal_b1_h32k8_q1_k4096", "llama3_8b_decode")
    add("decode", "d64_b8_h8_q1_k2048")
    add("tune", "d128_causal_b1_h32k8_q2048_k2048", "llama3_8b_prefill")
    add("tune", "d64_b8_h12_q197_k197", "vit_b16")
    add("tune", "d64_b4_h12_q512_k512", "bert_base")
    add("tune", "d64_causal_b1_h12_q1024_k1024", "gpt2_small")
    add("tune", "d192_dv128_causal_b1_h16_q1024_k1024", "mla_prefill")
    return {row.name: row for row in rows}


def _add_ci(add: Callable[[str, str], None]) -> None:
    """Few variants (each is compiled), many shapes."""
    for text in (
        "d64_b2_h2_q128_k128",
        "d64_b1_h3k1_q65_k130",  # multi-query, tails
        "d64_b1_h1_q1_k1",
        "d64_b0_h2_q16_k16",
        "d64_b2_h2_q0_k16",
        "d64_b2_h2_q16_k0",
        "d64_causal_b1_h4k2_q127_k129",  # grouped, tails
        "d64_causal_b1_h2_q130_k257",
        "d64_causal_b1_h2_q130_k257_topleft",
        "d64_causal_b1_h2_q257_k130",  # 127 rows see nothing
        "d64_causal_b1_h2_q257_k130_topleft",
        "d64_causal_b2_h6k2_q1_k100",
        "d64_causal_b2_h2_q17_k0",
        "d128_causal_b1_h2k1_q255_k255",
        "d64_b1_h2_q96_k33",
        "d3_dv5_b2_h2_q33_k70",
        "d3_dv5_causal_b2_h2_q70_k33_topleft",
        "d56_dv24_causal_b1_h3_q90_k61",  # 29 rows see nothing
        "d192_dv128_b1_h2k1_q40_k100",
        "d16_dv80_causal_b2_h2_q31_k63",
        "d1_b3_h1_q9_k20",
    ):
        add("ci", text)


WORKLOADS: dict[str, Workload] = _listed()


def named(name: str) -> Workload:
    """The workload of a name, or of sizes as `parse` reads them.

    Raises
    ------
    UnsupportedProblem
        Where it is neither.
    """
    return WORKLOADS[name] if name in WORKLOADS else parse(name)


def tagged(tag: str) -> list[Workload]:
    """The workloads with a tag, in the order of the list.

    Raises
    ------
    UnsupportedProblem
        For a tag that does not exist.
    """
    if tag not in TAGS:
        raise UnsupportedProblem(f"tag is {tag!r}, but only {', '.join(TAGS)} exist; choose one.")
    return [w for w in WORKLOADS.values() if tag in w.tags]
