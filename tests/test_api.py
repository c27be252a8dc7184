"""The public functions: signatures, layouts, what is refused, the direct path, importing."""

from __future__ import annotations

import doctest
import inspect
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import assert_same_bits
from python_process import run_python
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fa2tvm
from fa2tvm import api, cuda_direct, direct, modules, torch_op
from fa2tvm.device import baseline
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import CpuForward

D = 64


def randn(generator: torch.Generator, *size: int) -> Tensor:
    return torch.randn(size, generator=generator)


def math_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's attention in float64 by its MATH backend, which is right (BUGS, oracle hazard)."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
    return out.to(q.dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_signatures() -> None:
    ours = inspect.signature(fa2tvm.scaled_dot_product_attention)
    names = (F.scaled_dot_product_attention.__doc__ or "").split("(", 1)[1].split(")", 1)[0]
    theirs = [part.split(":")[0].split("=")[0].strip() for part in names.split(",")]
    assert list(ours.parameters) == [name for name in theirs if name not in ("*", "")]
    # flash_attn 2.8, flash_attn_interface.py.
    flash = inspect.signature(fa2tvm.flash_attn_func)
    assert {name: p.default for name, p in flash.parameters.items()} == {
        "q": inspect.Parameter.empty,
        "k": inspect.Parameter.empty,
        "v": inspect.Parameter.empty,
        "dropout_p": 0.0,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "alibi_slopes": None,
        "deterministic": False,
        "return_attn_probs": False,
    }


def test_examples_in_docstrings() -> None:
    results = doctest.testmod(api)
    assert results.attempted >= 9
    assert results.failed == 0


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(33, D), (3, 33, D), (2, 4, 33, D), (2, 3, 4, 33, D), (2, 2, 3, 2, 9, D)], ids=len
)
def test_sdpa_of_any_dimensions(
    sizes: tuple[int, ...], is_causal: bool, generator: torch.Generator
) -> None:
    q, k, v = (randn(generator, *sizes) for _ in range(3))
    out = fa2tvm.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2)
    assert out.shape == q.shape
    close(out, math_sdpa(q, k, v, is_causal=is_causal, scale=0.2))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(1, 8), (5, 2), (64, 65), (33, 50)])
def test_alignment_of_the_causal_mask(seq_q: int, seq_kv: int, generator: torch.Generator) -> None:
    """BUGS C01: torch's is_causal is top-left, flash_attn's causal bottom-right."""
    q, k, v = (randn(generator, 2, s, 4, D) for s in (seq_q, seq_kv, seq_kv))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    ours = fa2tvm.scaled_dot_product_attention(*heads_first, is_causal=True)
    close(ours, math_sdpa(*heads_first, is_causal=True))
    bottom = torch.ones(seq_q, seq_kv, dtype=torch.bool).tril(seq_kv - seq_q)
    expected = math_sdpa(*heads_first, attn_mask=bottom).transpose(1, 2).nan_to_num(0.0)
    close(fa2tvm.flash_attn_func(q, k, v, causal=True), expected)
    close(fa2tvm.attention(q, k, v, causal=True), expected)


def test_gqa_has_to_be_asked_for_as_in_torch(generator: torch.Generator) -> None:
    q, k = randn(generator, 2, 6, 9, D), randn(generator, 2, 2, 9, D)
    close(
        fa2tvm.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        math_sdpa(q, k, k, enable_gqa=True),
    )
    with pytest.raises(UnsupportedProblem, match=r"6 heads and key has 2.*enable_gqa=True"):
        fa2tvm.scaled_dot_product_attention(q, k, k)


def test_flash_attn_returns(generator: torch.Generator) -> None:
    q, k = randn(generator, 2, 9, 4, D), randn(generator, 2, 9, 2, D)
    out = fa2tvm.flash_attn_func(q, k, k, softmax_scale=0.5, deterministic=True)
    again, lse, probabilities = fa2tvm.flash_attn_func(
        q, k, k, softmax_scale=0.5, return_attn_probs=True
    )
    assert out.equal(again)
    assert lse.shape == (2, 4, 9)
    assert lse.dtype == torch.float32
    assert probabilities is None
    assert fa2tvm.flash_attn_func(q, k, k, 0.0, 0.5, False, (-1, -1)).equal(out)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout_p", 0.1),
        ("window_size", (3, 0)),
        ("softcap", 15.0),
        ("alibi_slopes", torch.ones(2)),
    ],
)
def test_unsupported_flash_attn_arguments_are_named(name: str, value: Any) -> None:
    """BUGS A13, B17, C03, C04: refused by name, never ignored."""
    q = torch.zeros(1, 4, 2, D)
    with pytest.raises(UnsupportedProblem, match=f"^{name} is"):
        fa2tvm.flash_attn_func(q, q, q, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("attn_mask", torch.zeros(4, 4)), ("dropout_p", 0.1)],
)
def test_unsupported_sdpa_arguments_are_named(name: str, value: Any) -> None:
    """BUGS E06, A09, H03: a mask is never dropped silently."""
    q = torch.zeros(1, 2, 4, D)
    with pytest.raises(UnsupportedProblem, match=f"^{name} is"):
        fa2tvm.scaled_dot_product_attention(q, q, q, **{name: value})


WRONG: dict[str, tuple[Any, Any, Any, str]] = {
    "type": ([1.0], torch.zeros(1, 4, 2, D), torch.zeros(1, 4, 2, D), "q is of type list"),
    "dims": (torch.zeros(4, 2, D), torch.zeros(4, 2, D), torch.zeros(4, 2, D), "3 dimensions"),
    "batch": (torch.zeros(2, 4, 2, D), torch.zeros(1, 4, 2, D), torch.zeros(1, 4, 2, D), "batch"),
    "lengths": (*[torch.zeros(1, 4, 2, D)] * 2, torch.zeros(1, 5, 2, D), "equal lengths"),
    "heads": (torch.zeros(1, 4, 3, D), *[torch.zeros(1, 4, 2, D)] * 2, "3 heads and k has 2"),
    "no key heads": (torch.zeros(1, 4, 3, D), *[torch.zeros(1, 4, 0, D)] * 2, "k has 0"),
    "head_dim": (torch.zeros(1, 4, 2, 8), *[torch.zeros(1, 4, 2, D)] * 2, "same head_dim"),
    "head_dim 513": (*[torch.zeros(1, 4, 2, 513)] * 3, "513, but only 1 to 512"),
    "head_dim 0": (*[torch.zeros(1, 4, 2, 0)] * 3, "0, but only 1 to 512"),
    "dtypes": (*[torch.zeros(1, 4, 2, D)] * 2, torch.zeros(1, 4, 2, D).half(), "torch.float16"),
    "sparse": (*[torch.zeros(1, 4, 2, D).to_sparse()] * 3, "only dense"),
    "devices": (torch.zeros(1, 4, 2, D), *[torch.zeros(1, 4, 2, D, device="meta")] * 2, "meta"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_one_sentence(name: str, grad: bool) -> None:
    """BUGS D01, H04: argument, value, limit; the same on the direct path and on the operator's."""
    *tensors, message = WRONG[name]
    if grad and name != "type":
        tensors[0] = tensors[0].detach().requires_grad_()
    with pytest.raises(UnsupportedProblem, match=message) as refused:
        fa2tvm.attention(*tensors)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith(".")


def test_wrong_alignment_is_one_sentence() -> None:
    q = torch.zeros(1, 4, 2, D)
    for leaf in (q, q.clone().requires_grad_()):
        with pytest.raises(UnsupportedProblem, match="alignment is 'middle'"):
            fa2tvm.attention(leaf, q, q, causal=True, alignment="middle")  # type: ignore[arg-type]


@contextmanager
def through_the_operator() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "attention", lambda *_: None)
        yield


@pytest.mark.parametrize("softmax_scale", [None, 0.0, -1.5, 2, torch.tensor(0.5)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_direct_path_is_the_operator_bit_by_bit(
    causal: bool, softmax_scale: Any, generator: torch.Generator
) -> None:
    q, k, v = (randn(generator, 2, s, 2, D) for s in (33, 50, 50))
    how = {"causal": causal, "softmax_scale": softmax_scale, "return_lse": True}
    results = []
    for path in (through_the_operator, torch.enable_grad):
        with path():
            plain = fa2tvm.attention(q, k, v, **how)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            graph = fa2tvm.attention(*leaves, **how)
            assert all(a.equal(b) for a, b in zip(plain, graph, strict=True))
            grads = torch.autograd.grad(graph, leaves, (q, graph[1].detach()))
            names = ("O", "LSE", "dQ", "dK", "dV")
            results.append(dict(zip(names, (*plain, *grads), strict=True)))
    assert_same_bits(*results)


def test_direct_path_is_taken_only_where_nobody_looks(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    through: list[str] = []
    attention = torch_op.attention
    monkeypatch.setattr(
        torch_op, "attention", lambda *a: through.append("operator") or attention(*a)
    )
    q = randn(generator, 1, 5, 2, D)

    def looked(x: Tensor = q) -> bool:
        through.clear()
        fa2tvm.attention(x, x, x)
        return bool(through)

    assert not looked()
    assert not looked(q.requires_grad_())
    q = q.detach()
    assert looked(torch.nn.Parameter(q))
    assert looked(q.transpose(2, 3).contiguous().transpose(2, 3))
    assert looked(torch.complex(q, -q).conj().imag)
    assert looked(q[:, :0])
    with torch.autocast("cpu"):
        assert looked()
    with torch.overrides.BaseTorchFunctionMode():
        assert looked()
    with FlopCounterMode(display=False):
        assert looked()
    torch.vmap(lambda x: fa2tvm.attention(x, x, x))(torch.stack([q, q]))
    assert through
    assert not looked(torch.randn(1, 5, 2, D)[:, :, :, :])


def test_remembered_calls_are_bounded(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_direct, "MAX_PREPARED", 4)
    monkeypatch.setattr(modules, "MAX_ANSWERS", 4)
    modules.forget()  # what other tests left
    for seq in range(1, 12):
        q = randn(generator, 1, seq, 1, D)
        close(fa2tvm.attention(q, q, q)[0, 0], math_sdpa(*[q.transpose(1, 2)] * 3)[0, 0, :1])
        assert len(modules.prepared) <= 4
        assert len(modules._answers) <= 4


def test_default_dtype_does_not_matter(generator: torch.Generator) -> None:
    q = randn(generator, 1, 5, 2, D)
    expected = fa2tvm.attention(q, q, q, return_lse=True)
    torch.set_default_dtype(torch.float64)
    try:
        results = fa2tvm.attention(q, q, q, return_lse=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert [x.dtype for x in results] == [torch.float32] * 2
    assert all(a.equal(b) for a, b in zip(results, expected, strict=True))


def test_explicit_schedules(generator: torch.Generator) -> None:
    """A schedule holds in its block only, for its pass only, in every thread."""
    problem = Problem(Variant("forward", "float32", D, D), Shape(1, 2, 2, 9, 9))
    before = fa2tvm.module_for(problem)
    narrow = CpuForward.default(problem.variant, baseline("x86-64-v3"))
    q = randn(generator, 1, 9, 2, D)
    expected = fa2tvm.attention(q, q, q)
    with fa2tvm.use_schedule(narrow):
        assert fa2tvm.module_for(problem).schedule == narrow
        close(fa2tvm.attention(q, q, q), expected)
        with fa2tvm.use_schedule(before.schedule):
            assert fa2tvm.module_for(problem).schedule == before.schedule
        assert fa2tvm.module_for(problem).schedule == narrow
    assert fa2tvm.module_for(problem) is before
    infeasible = CpuForward.default(problem.variant, baseline()).__class__(panel=1)
    with fa2tvm.use_schedule(infeasible), pytest.raises(InfeasibleSchedule):
        fa2tvm.attention(q, q, q)
    assert fa2tvm.attention(q, q, q).equal(expected)


def test_modules_for_other_devices() -> None:
    problem = Problem(Variant("forward", "float32", D, D), Shape(1, 2, 2, 9, 9))
    module = fa2tvm.module_for(problem, baseline("x86-64-v3"))
    assert module.manifest["target"] == {"kind": "llvm", "mcpu": "x86-64-v3"}
    assert fa2tvm.module_for(problem, baseline("x86-64-v3")) is module


def test_names() -> None:
    assert set(fa2tvm.__all__) <= set(dir(fa2tvm))
    for name in fa2tvm.__all__:
        assert getattr(fa2tvm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fa2tvm.nothing


IMPORT = """
import sys, time
import torch
children = open("/proc/self/task/%d/children" % __import__("os").getpid()).read()
threads = len(__import__("os").listdir("/proc/self/task"))
loaded = set(sys.modules)
start = time.process_time()
import fa2tvm
fa2tvm.attention
took = time.process_time() - start
new = set(sys.modules) - loaded
assert not any(name.split(".")[0] in ("tvm", "tvm_ffi", "matplotlib", "xgboost") for name in new)
assert len(__import__("os").listdir("/proc/self/task")) == threads
assert open("/proc/self/task/%d/children" % __import__("os").getpid()).read() == children
assert not torch.cuda.is_initialized()
print(took)
"""


def test_importing_is_light(tmp_path: Path) -> None:
    """BUGS G06, J14: under 0.3 s beyond torch, no tvm, no CUDA, no thread, no process, no tools."""
    env = {"PATH": os.fspath(tmp_path), "FA2TVM_HOME": os.fspath(tmp_path / "home")}
    took = min(float(run_python(IMPORT, env=env)) for _ in range(2))
    assert took < 0.3
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "order",
    ["torch, fa2tvm", "fa2tvm, torch", "tvm, torch, fa2tvm", "fa2tvm, torch, tvm", "numpy, fa2tvm"],
)
def test_import_orders(order: str) -> None:
    """BUGS J07 (TVM #18316): TVM and torch in one process, in any order, up to a clean exit."""
    run_python(
        f"import {order}\n"
        "import torch\n"
        "q = torch.randn(1, 300, 2, 64, requires_grad=True)\n"
        "fa2tvm.attention(q, q, q).sum().backward()\n"
        "assert q.grad.isfinite().all()\n"
    )


def test_a_tiny_call_is_cheap(generator: torch.Generator) -> None:
    """No more CPU time than torch's attention; three times as much would be a lost direct path."""
    q = randn(generator, 1, 16, 1, D)
    heads_first = q.transpose(1, 2).contiguous()

    def cpu_us(call: Any) -> float:
        for _ in range(100):
            call()
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            for _ in range(400):
                call()
            best = min(best, time.process_time() - start)
        return best / 400 * 1e6

    with torch.no_grad():
        ours = cpu_us(lambda: fa2tvm.attention(q, q, q))
        theirs = cpu_us(lambda: F.scaled_dot_product_attention(*[heads_first] * 3))
    assert ours <= 3 * theirs, f"{ours:.1f} us against {theirs:.1f} us"
    assert "tvm" not in sys.modules or ours < 1000
