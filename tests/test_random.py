"""Random problems by hypothesis: sizes, strides, scales, masks and data, both passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from calls import DTYPES, backward, dtype_name, forward
from compiled import build_all
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from yardstick import Case

from fa2tvm.problem import Variant
from fa2tvm.workloads import tagged

EXAMPLES = 300
# Compiled in, unlike all else: the ones that the contract test compiles anyhow.
HEAD_DIMS = sorted({(w.head_dim_qk, w.head_dim_v, w.causal) for w in tagged("ci")})


def contiguous(x: torch.Tensor) -> torch.Tensor:
    return x


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def inside_nan(x: torch.Tensor) -> torch.Tensor:
    """A slice at an odd offset of a larger tensor, which holds NaN all around it."""
    batch, seq, heads, d = x.shape
    wide = torch.full((batch + 1, 2 * seq + 3, heads + 1, d + 5), torch.nan, dtype=x.dtype)
    view = wide[1:, 1 : 1 + 2 * seq : 2, 1:, 3 : 3 + d]
    return view.copy_(x)


def reversed_heads_of_one_buffer(x: torch.Tensor) -> torch.Tensor:
    """Head dim last, but the heads lie as the outermost dimension."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def strided_head_dim(x: torch.Tensor) -> torch.Tensor:
    """An innermost stride of 2: the one layout that is copied."""
    return torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0]


LAYOUTS = (
    contiguous,
    heads_first,
    sequence_first,
    inside_nan,
    reversed_heads_of_one_buffer,
    strided_head_dim,
)
lengths = st.one_of(
    st.integers(1, 40),
    st.sampled_from((0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257)),
    st.integers(41, 300),
)


@dataclass(frozen=True)
class Draw:
    """A random problem, printed in full where it fails."""

    head_dims: tuple[int, int, bool]
    dtype: torch.dtype
    batch: int
    heads_kv: int
    group: int
    seq_q: int
    seq_kv: int
    alignment: Any
    softmax_scale: float | None
    amplitude_offset: tuple[float, float]
    dlse: bool
    layouts: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    data_seed: int

    def case(self) -> Case:
        generator = torch.Generator().manual_seed(self.data_seed)
        d, dv, causal = self.head_dims
        heads = self.heads_kv * self.group

        def randn(layout: int, seq: int, heads: int, width: int) -> torch.Tensor:
            x = torch.randn((self.batch, seq, heads, width), generator=generator)
            amplitude, offset = self.amplitude_offset
            x = (x * amplitude + offset).to(self.dtype)
            return self.layouts[layout](x)

        return Case(
            q=randn(0, self.seq_q, heads, d),
            k=randn(1, self.seq_kv, self.heads_kv, d),
            v=randn(2, self.seq_kv, self.heads_kv, dv),
            dO=randn(3, self.seq_q, heads, dv),
            dLSE=torch.randn((self.batch, heads, self.seq_q), generator=generator)
            if self.dlse
            else None,
            softmax_scale=self.softmax_scale,
            causal=causal,
            alignment=self.alignment,
            arithmetic=torch.float32,
        )


draws = st.builds(
    Draw,
    head_dims=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(DTYPES),
    batch=st.sampled_from((1, 1, 2, 0)),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seq_q=lengths,
    seq_kv=lengths,
    alignment=st.sampled_from(("bottom_right", "top_left")),
    softmax_scale=st.one_of(
        st.none(), st.sampled_from((0.0, 1.0, -0.3)), st.floats(-1, 1, allow_nan=False, width=32)
    ),
    amplitude_offset=st.sampled_from(((1.0, 0.0), (0.01, 0.0), (3.0, 0.0), (1.0, 1.0))),
    dlse=st.booleans(),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 4),
    data_seed=st.integers(0, 2**31),
)


@pytest.fixture(scope="module", autouse=True)
def _compiled(fa2tvm_home: object) -> None:  # noqa: ARG001 - it must be there first
    build_all(
        Variant(pass_, dtype_name(dtype), d, dv, causal)
        for d, dv, causal in HEAD_DIMS
        for dtype in DTYPES
        for pass_ in ("forward", "backward")
    )


@pytest.mark.usefixtures("poisoned")
def test_random_problems(request: pytest.FixtureRequest) -> None:
    """At least 300 problems against float64, other ones in each run."""
    count = 0

    @seed(request.config.getoption("--seed"))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        # A failing problem is printed in full; to shrink it takes minutes.
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(draws)
    def check(draw: Draw) -> None:
        nonlocal count
        count += 1
        case = draw.case()
        results = forward(case)
        case.check(results | backward(case, results))

    check()
    assert count >= EXAMPLES
