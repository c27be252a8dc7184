"""Variant, Shape, Problem and the list of workloads."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from fa2tvm.errors import UnsupportedProblem
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.workloads import TAGS, WORKLOADS, named, parse, tagged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pass_": "sideways"}, "pass_ is 'sideways'"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"dtype": "int8"}, "float32, float16 and bfloat16"),
        ({"head_dim_qk": 0}, "head_dim_qk is 0"),
        ({"head_dim_v": 513}, "head_dim_v is 513"),
    ],
)
def test_variant_limits(change: dict[str, Any], said: str) -> None:
    """BUGS D03, H04: a degenerate head dim and foreign dtypes are refused in one clear sentence."""
    good: dict[str, Any] = {
        "pass_": "forward",
        "dtype": "float16",
        "head_dim_qk": 64,
        "head_dim_v": 64,
    }
    Variant(**good)
    with pytest.raises(UnsupportedProblem, match=re.escape(said)) as e:
        Variant(**{**good, **change})
    assert str(e.value).count("\n") == 0
    assert isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    "sizes", [(-1, 1, 1, 1, 1), (1, 3, 2, 1, 1), (1, 2, 0, 1, 1), (1, 0, 2, 1, -5)]
)
def test_shape_limits(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedProblem):
        Shape(*sizes)


def test_alignment_is_checked() -> None:
    workload = named("d64_q4")
    with pytest.raises(UnsupportedProblem, match="alignment is 'left'"):
        Problem(workload.problem("forward", "float32").variant, workload.shape, "left")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WORKLOADS)
def test_problem_survives_json_and_its_name_parses(name: str) -> None:
    for pass_ in ("forward", "backward"):
        problem = named(name).problem(pass_, "bfloat16")
        assert Problem.from_dict(json.loads(json.dumps(problem.to_dict()))) == problem
        again = parse(problem.name.removeprefix(f"{pass_}_bfloat16_")).problem(pass_, "bfloat16")
        assert again == problem


@pytest.mark.parametrize("text", [w.name for w in tagged("ci")])
def test_visible_pairs_count_the_mask(text: str) -> None:
    problem = named(text).problem("forward", "float32")
    s = problem.shape
    i, j = np.arange(s.seq_q)[:, None], np.arange(s.seq_kv)[None, :]
    mask = j <= i + problem.causal_offset if problem.variant.causal else j >= 0 * i
    assert problem.visible_pairs() == mask.sum()


def test_work_of_the_papers_formula() -> None:
    """4 N^2 d H forward (halved by a causal mask), 2.5 times that backward."""
    forward = named("d64_b2_h8_q1024_k1024").problem("forward", "float16")
    assert forward.flops() == 4 * 1024**2 * 64 * 8 * 2
    backward = named("d64_b2_h8_q1024_k1024").problem("backward", "float16")
    assert backward.flops() == 2.5 * forward.flops()
    causal = named("d64_causal_b2_h8_q1024_k1024").problem("forward", "float16")
    assert causal.flops() / forward.flops() == pytest.approx(0.5, abs=1e-3)
    tensor = 2 * 1024 * 8 * 64 * 2
    assert forward.bytes() == 4 * tensor + 2 * 8 * 1024 * 4
    assert backward.bytes() == 9 * tensor + 2 * 8 * 1024 * 4


def test_length_classes() -> None:
    classes = {
        n: named(f"d64_q{n}").problem("forward", "float32").length_class
        for n in (0, 512, 513, 2048, 2049)
    }
    assert list(classes.values()) == ["short", "short", "medium", "medium", "long"]


def test_every_workload_has_a_known_tag() -> None:
    assert {tag for w in WORKLOADS.values() for tag in w.tags} == set(TAGS)
    for name, workload in WORKLOADS.items():
        assert workload.name == name
        assert workload.tags


def test_ci_workloads_are_awkward_enough() -> None:
    """What the contract test relies on."""
    ci = tagged("ci")
    assert any(w.shape.group == w.shape.heads_q > 1 for w in ci), "multi-query"
    assert any(1 < w.shape.group < w.shape.heads_q for w in ci), "grouped-query"
    assert any(w.head_dim_qk != w.head_dim_v for w in ci)
    assert any(w.head_dim_qk % 2 for w in ci)
    assert {w.alignment for w in ci if w.causal} == {"bottom_right", "top_left"}
    assert any(w.causal and w.shape.seq_q > w.shape.seq_kv > 0 for w in ci), "blind rows"
    for size in ("batch", "seq_q", "seq_kv"):
        assert any(getattr(w.shape, size) == 0 for w in ci), size
        assert any(getattr(w.shape, size) == 1 for w in ci), size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama", "'llama'"),
        ("d64_b1", "does not say 'q'"),
        ("q64", "does not say 'd'"),
        ("d64_q8_h8k", "'h8k'"),
        ("d64_q8_h8k3", "heads_q is 8"),
        ("d64_q8_causally", "'causally'"),
        ("", "part ''"),
    ],
)
def test_bad_names_are_explained(text: str, said: str) -> None:
    with pytest.raises(UnsupportedProblem, match=re.escape(said)):
        named(text)


def test_bad_tag_is_explained() -> None:
    with pytest.raises(UnsupportedProblem, match="tag is 'fast', but only ci, tune"):
        tagged("fast")
