"""Issue 7: wrong calls are refused with one sentence before anything is launched.

A few thousand random wrong calls at every public function; only errors of fa2tvm, TypeError and
ValueError may come back. Kernels are replaced by one that checks what reaches it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fa2tvm
from fa2tvm import launch, modules, pack
from fa2tvm.compile import Module
from fa2tvm.device import baseline, detect
from fa2tvm.errors import CompileFailed, Fa2tvmError, UnsupportedProblem
from fa2tvm.schedule import CpuBackward, CpuForward

D = 16


def stub(variant: fa2tvm.Variant, schedule: Any, _device: Any) -> Module:
    """A module whose forward pass insists on the ABI and writes zeros."""

    def function_on(q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any) -> None:
        batch, seq_q, heads, d = q.shape
        _, seq_kv, heads_kv, dv = v.shape
        assert k.shape == (batch, seq_kv, heads_kv, d)
        assert out.shape == (batch, seq_q, heads, dv)
        assert out.is_contiguous()
        assert lse.shape == (batch, heads, seq_q)
        assert (d, dv) == (variant.head_dim_qk, variant.head_dim_v)
        assert {q.dtype, k.dtype, v.dtype, out.dtype} == {getattr(torch, variant.dtype)}
        assert lse.dtype == torch.float32
        assert all(x.device.type == "cpu" and not x.is_neg() for x in (q, k, v, out, lse))
        assert all(x.stride(-1) == 1 for x in (q, k, v) if x.shape[-1] > 1)
        scale, causal_offset, threads = rest
        assert isinstance(scale, float)
        assert isinstance(causal_offset, int)
        assert threads >= 1
        out.zero_()
        lse.zero_()

    manifest: dict[str, Any] = {"features": []}
    return Module(manifest, variant, schedule, function_on, function_on)


@pytest.fixture(autouse=True)
def _no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(modules, "_load", stub)
    monkeypatch.setattr(modules, "_loaded", {})
    modules.forget()
    yield
    modules.forget()


class Subclass(torch.Tensor):
    """A tensor with a name of its own."""


ANYTHING: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 7,
    lambda: 1 << 70,
    lambda: 10**400,
    lambda: 2.5,
    lambda: -0.0,
    lambda: math.nan,
    lambda: math.inf,
    lambda: 1j,
    lambda: "",
    lambda: "top_left",
    lambda: "float32",
    lambda: "\0\ud800",
    lambda: b"forward",
    lambda: [],
    lambda: [1, 2],
    lambda: (-1, -1),
    lambda: {},
    lambda: {"a": []},
    lambda: object(),
    lambda: int,
    lambda: len,
    lambda: Path("nothing"),
    lambda: np.zeros((1, 4, 2, D), np.float32),
    lambda: np.float32(0.5),
    lambda: torch.float32,
    lambda: torch.zeros(()),
    lambda: torch.zeros(2),
    lambda: torch.device("meta"),
    lambda: fa2tvm.Shape(1, 2, 2, 4, 4),
    lambda: fa2tvm.Variant("forward", "float32", D, D),
    lambda: CpuForward(),
]
TENSORS: list[Callable[[], Any]] = [
    lambda: torch.zeros(1, 4, 2, D),
    lambda: torch.zeros(1, 4, 2, D, device="meta"),
    lambda: torch.zeros(1, 4, 2, D, dtype=torch.float64),
    lambda: torch.zeros(1, 4, 2, D, dtype=torch.bfloat16),
    lambda: torch.zeros(1, 4, 2, D, dtype=torch.int64),
    lambda: torch.zeros(1, 4, 2, D, dtype=torch.bool),
    lambda: torch.zeros(1, 4, 2, D, dtype=torch.complex64),
    lambda: torch.zeros(1, 4, 2, D).to(torch.float8_e4m3fn),
    lambda: torch.zeros(1, 4, 2, D).to_sparse(),
    lambda: torch.quantize_per_tensor(torch.zeros(1, 4, 2, D), 0.1, 0, torch.qint8),
    lambda: torch.zeros(1, 4, 2, D).as_subclass(Subclass),
    lambda: torch.nn.Parameter(torch.zeros(1, 4, 2, D)),
    lambda: torch.zeros(1, 4, 2, 513),
    lambda: torch.zeros(1, 4, 2, 0),
    lambda: torch.zeros(1, 4, 0, D),
    lambda: torch.zeros(1, 0, 2, D),
    lambda: torch.zeros(0, 4, 2, D),
    lambda: torch.zeros(1, 4, 3, D),
    lambda: torch.zeros(1, 5, 2, D),
    lambda: torch.zeros(2, 4, 2, D),
    lambda: torch.zeros(4, 2, D),
    lambda: torch.zeros(1, 1, 4, 2, D),
    lambda: torch.zeros(D),
    lambda: torch.zeros(()),
    lambda: torch.zeros(1, 4, 2, 1),
    lambda: torch.zeros(1, 4, D, 2).transpose(2, 3),
    lambda: torch.complex(torch.zeros(1, 4, 2, D), torch.ones(1, 4, 2, D)).conj().imag,
    lambda: torch.zeros(1, 1, 1, 1).expand(1, 4, 2, D),
    lambda: torch.nested.nested_tensor([torch.zeros(4, 2, D)]),
]
GOOD_TENSOR = TENSORS[0]


class Chooser:
    """A source of arguments that are wrong more often than not."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __call__(self, good: Callable[[], Any], wrong: list[Callable[[], Any]]) -> Any:
        if self.rng.random() < 0.6:
            return good()
        return self.rng.choice(wrong if self.rng.random() < 0.7 else ANYTHING)()

    def some(self, options: dict[str, list[Any]]) -> dict[str, Any]:
        """Some of the options, each with one of its values or anything."""
        chosen = {}
        for name, values in options.items():
            if self.rng.random() < 0.4:
                chosen[name] = self.rng.choice([lambda v=v: v for v in values] + ANYTHING)()
        return chosen


def judge(call: Callable[[], Any]) -> Any:
    """The result, or None where the call was refused as it may be."""
    try:
        return call()
    except Fa2tvmError as error:
        sentence = str(error)
    except (TypeError, ValueError):
        return None
    assert "\n" not in sentence
    assert 20 < len(sentence) < 600
    return None


SCALES = [None, 0.5, 0.0, -1.0, math.nan]
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "attention": {
        "causal": [True, False],
        "softmax_scale": SCALES,
        "alignment": ["bottom_right", "top_left"],
        "return_lse": [True, False],
    },
    "flash_attn_func": {
        "dropout_p": [0.0, 0.1],
        "softmax_scale": SCALES,
        "causal": [True, False],
        "window_size": [(-1, -1), (3, 0)],
        "softcap": [0.0, 30.0],
        "alibi_slopes": [None],
        "deterministic": [True, False],
        "return_attn_probs": [True, False],
    },
    "scaled_dot_product_attention": {
        "attn_mask": [None],
        "dropout_p": [0.0, 0.1],
        "is_causal": [True, False],
        "scale": SCALES,
        "enable_gqa": [True, False],
    },
}


@pytest.fixture
def n_calls(request: pytest.FixtureRequest) -> int:
    return 5 * int(request.config.getoption("--fuzz"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTIONS)
def test_wrong_calls_of_attention(name: str, n_calls: int, seed: int) -> None:
    choose = Chooser(seed)
    function = getattr(fa2tvm, name)
    answered = 0
    for _ in range(n_calls):
        q, k, v = (choose(GOOD_TENSOR, TENSORS) for _ in range(3))
        options = choose.some(OPTIONS[name])
        result = judge(lambda q=q, k=k, v=v, o=options: function(q, k, v, **o))
        if result is not None:
            out = result[0] if isinstance(result, tuple) else result
            assert out.shape == (*q.shape[:-1], v.shape[-1])
            assert out.dtype == q.dtype
            answered += 1
    assert 0 < answered < n_calls


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5])
def test_wrong_numbers_of_tensors(count: int) -> None:
    for name in OPTIONS:
        if name == "attention" or count < 3:
            with pytest.raises(TypeError):
                getattr(fa2tvm, name)(*[GOOD_TENSOR()] * count)


PASSES = ["forward", "backward"]
SIZES = [0, 1, 2, 8, 512]
MAKERS: dict[str, tuple[Callable[..., Any], list[list[Any]]]] = {
    "Variant": (fa2tvm.Variant, [PASSES, ["float32"], [8, 64], [8, 64], [True]]),
    "Shape": (fa2tvm.Shape, [SIZES] * 5),
    "Problem": (
        fa2tvm.Problem,
        [
            [fa2tvm.Variant("forward", "float32", D, D)],
            [fa2tvm.Shape(1, 2, 2, 4, 4)],
            ["top_left", "bottom_right"],
        ],
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_wrong_nouns(name: str, n_calls: int, seed: int) -> None:
    """What is made is usable: it has a name and a hash."""
    make, values = MAKERS[name]
    choose = Chooser(seed)
    for _ in range(n_calls):
        arguments = [choose(lambda v=v: choose.rng.choice(v), ANYTHING) for v in values]
        made = judge(lambda a=arguments: make(*a))
        if made is not None:
            assert hash(made) == hash(made)
            if isinstance(made, fa2tvm.Problem):
                assert made.name
                assert made.flops() >= 0


PROBLEM = fa2tvm.Problem(fa2tvm.Variant("forward", "float32", D, D), fa2tvm.Shape(1, 2, 2, 4, 4))
FORWARD = CpuForward.default(PROBLEM.variant, detect())


def test_wrong_calls_of_module_for(n_calls: int, seed: int) -> None:
    choose = Chooser(seed)
    for _ in range(n_calls):
        problem = choose(lambda: PROBLEM, ANYTHING)
        device = choose(lambda: choose.rng.choice([None, baseline()]), ANYTHING)
        found = judge(lambda p=problem, d=device: fa2tvm.module_for(p, d))
        assert found is None or isinstance(found, Module)


def test_wrong_calls_of_use_schedule(n_calls: int, seed: int) -> None:
    """A schedule that is refused, or does not fit, is gone after its block."""
    choose = Chooser(seed)
    wrong = [lambda: CpuForward(panel=3), lambda: CpuBackward(lanes=0), lambda: CpuForward]

    def call(schedule: Any) -> torch.Tensor:
        with fa2tvm.use_schedule(schedule):
            q = GOOD_TENSOR()
            return fa2tvm.attention(q, q, q)

    for _ in range(n_calls):
        judge(lambda: call(choose(lambda: FORWARD, wrong)))
        assert modules._explicit == {}


def test_wrong_calls_of_packs(
    n_calls: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the entries are: nothing is left at the destination."""
    choose = Chooser(seed)

    def build(variant: Any, schedule: Any, device: Any) -> Path:
        assert variant.pass_ == schedule.pass_
        assert device.arch
        raise CompileFailed("the entry is legal, but nothing is compiled in this test.")

    monkeypatch.setattr(pack, "build", build)
    good = (PROBLEM.variant, FORWARD, detect(), "short")
    for number in range(n_calls // 4):
        fields = [choose(lambda g=g: g, ANYTHING) for g in good]
        entries = choose(lambda f=fields: [fa2tvm.PackEntry(*f)], ANYTHING)
        dest = choose(lambda n=number: tmp_path / f"pack{n}", [lambda: 3, lambda: None])
        if isinstance(dest, (str, bytes)) or (isinstance(dest, Path) and not dest.is_absolute()):
            continue  # a place, though a strange one, below the working directory
        assert judge(lambda e=entries, d=dest: fa2tvm.export_pack(e, d)) is None
        assert not list(tmp_path.iterdir())
        assert judge(lambda: fa2tvm.use_pack(choose(lambda: tmp_path, ANYTHING))) is None


# Outputs that a caller brings, and memory that lies oddly.


def test_outputs_that_overlap_are_refused() -> None:
    """F11 and issue 7: a result that is written over an input, or over the other result."""
    module = stub(PROBLEM.variant, FORWARD, detect())
    room = torch.zeros(10_000)
    q = room[: 4 * 2 * D].view(1, 4, 2, D)
    lse = torch.empty(1, 2, 4)
    for start in (0, 1, 4 * 2 * D - 1):
        out = room[start : start + 4 * 2 * D].view(1, 4, 2, D)
        with pytest.raises(UnsupportedProblem, match=r"out overlaps q in memory"):
            launch.forward(module, q, q, q, 1.0, 0, out=out)
    out = room[4 * 2 * D : 8 * 2 * D].view(1, 4, 2, D)
    assert launch.forward(module, q, q, q, 1.0, 0, out=out)[0] is out
    with pytest.raises(UnsupportedProblem, match="out overlaps lse"):
        launch.forward(module, q, q, q, 1.0, 0, out=out, lse=room[200:208].view(1, 2, 4))
    with pytest.raises(UnsupportedProblem, match=r"out is .*; pass such a tensor or none"):
        launch.forward(module, q, q, q, 1.0, 0, out=out.half(), lse=lse)


def test_second_results_of_a_call_are_not_those_of_the_first() -> None:
    q = GOOD_TENSOR()
    first, second = (fa2tvm.attention(q, q, q, return_lse=True) for _ in range(2))
    pointers = {x.untyped_storage().data_ptr() for x in (*first, *second, q)}
    assert len(pointers) == 5
