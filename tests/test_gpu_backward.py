"""The backward contract on an NVIDIA GPU, through the public API and autograd."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from calls import random_case
from gpu_pack import backward_variants
from yardstick import Case, Tensors

import fa2tvm
from fa2tvm import cuda_runtime
from fa2tvm.errors import UnsupportedProblem
from fa2tvm.lookup import family_for
from fa2tvm.problem import Variant

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned", "pack")]

# (batch, heads, key heads, queries, keys)
SIZES = (
    (1, 1, 1, 1, 1),
    (2, 3, 3, 1, 77),
    (1, 2, 1, 63, 65),
    (2, 4, 2, 129, 127),
    (1, 6, 2, 257, 300),
    (1, 2, 2, 300, 130),
    (8, 4, 4, 70, 1),
)
VARIANTS = backward_variants()
FORWARD = Variant("forward", "bfloat16", 64, 64, True)
NAMES = ("dQ", "dK", "dV")


@pytest.fixture(autouse=True)
def _needs_a_backward() -> None:
    backward = dataclasses.replace(FORWARD, pass_="backward")
    try:
        family_for(cuda_runtime.device(0), backward)
    except UnsupportedProblem as refusal:
        pytest.skip(str(refusal))


def case_of(
    variant: Variant,
    sizes: tuple[int, int, int, int, int],
    generator: torch.Generator,
    **how: Any,
) -> Case:
    batch, heads, heads_kv, seq_q, seq_kv = sizes
    return random_case(
        generator,
        getattr(torch, variant.dtype),
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seq_q=seq_q,
        seq_kv=seq_kv,
        d=variant.head_dim_qk,
        dv=variant.head_dim_v,
        dlse=True,
        causal=variant.causal,
        arithmetic=None,
        **how,
    )


def seen(case: Case) -> Case:
    """A row that sees nothing has LSE = -inf: a loss must not multiply that by its gradient."""
    return dataclasses.replace(case, dLSE=case.dLSE.where(case.oracle["LSE"] > -torch.inf, 0))


def attend(case: Case) -> Tensors:
    """All that the case asks for, computed by the GPU, on the CPU."""
    leaves = [x.cuda().requires_grad_() for x in (case.q, case.k, case.v)]
    out, lse = fa2tvm.attention(
        *leaves,
        causal=case.causal,
        softmax_scale=case.softmax_scale,
        alignment=case.alignment,
        return_lse=True,
    )
    gradients = torch.autograd.grad((out, lse), leaves, (case.dO.cuda(), case.dLSE.cuda()))
    results = {"O": out.detach(), "LSE": lse.detach(), **dict(zip(NAMES, gradients, strict=True))}
    return {name: x.cpu() for name, x in results.items()}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_contract(variant: Variant, generator: torch.Generator) -> None:
    """Every head dim, mask, alignment, group and tail, in both dtypes, with a gradient of LSE."""
    for sizes in SIZES:
        for alignment in ("bottom_right", "top_left")[: 1 + variant.causal]:
            case = seen(case_of(variant, sizes, generator, alignment=alignment))
            try:
                case.check(attend(case))
            except AssertionError as error:
                raise AssertionError(f"{sizes} {alignment}: {error}") from error


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.125])
def test_any_scale(scale: float, generator: torch.Generator) -> None:
    case = case_of(FORWARD, (1, 4, 2, 130, 190), generator, softmax_scale=scale)
    case.check(attend(case))


@pytest.mark.parametrize("needed", [n for r in (1, 2) for n in itertools.combinations(range(3), r)])
def test_only_what_is_needed(needed: tuple[int, ...], generator: torch.Generator) -> None:
    """BUGS B15: each gradient is as when all are asked for; dQ, summed in any order, about so."""
    case = case_of(FORWARD, (1, 4, 2, 33, 300), generator)
    tensors = [x.cuda() for x in (case.q, case.k, case.v)]
    for n in needed:
        tensors[n].requires_grad_()
    out = fa2tvm.attention(*tensors, causal=True)
    plain = dataclasses.replace(case, dLSE=torch.zeros_like(case.dLSE))
    everything = attend(plain)
    gradients = torch.autograd.grad(out, [tensors[n] for n in needed], case.dO.cuda())
    for n, gradient in zip(needed, gradients, strict=True):
        if NAMES[n] == "dQ":
            plain.check({"dQ": gradient.cpu()})
        else:
            assert gradient.cpu().equal(everything[NAMES[n]])


def test_gradients_of_any_layout(generator: torch.Generator) -> None:
    """BUGS B04: dO transposed, expanded from a scalar, sliced from a wider tensor."""
    case = case_of(FORWARD, (2, 4, 2, 70, 90), generator)
    q, k, v = (x.cuda().requires_grad_() for x in (case.q, case.k, case.v))
    out = fa2tvm.attention(q, k, v, causal=True)
    wide = torch.randn(2, 70, 4, 80, generator=generator).to("cuda", torch.bfloat16)
    turned = torch.randn(2, 4, 70, 64, generator=generator).to("cuda", torch.bfloat16)
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    for dout in (
        wide[..., 8:72],
        wide[..., 1:65],
        turned.transpose(1, 2),
        one.expand(2, 70, 4, 64),
    ):
        got = torch.autograd.grad(out, (k, v), dout, retain_graph=True)
        expected = torch.autograd.grad(out, (k, v), dout.contiguous(), retain_graph=True)
        assert all(x.equal(y) for x, y in zip(got, expected, strict=True))


def test_blind_rows(generator: torch.Generator) -> None:
    """BUGS A05: rows that see nothing have no gradient and give none, whatever dO holds there."""
    case = seen(case_of(FORWARD, (1, 2, 1, 300, 120), generator))
    loud = dataclasses.replace(case, dO=case.dO.clone())
    loud.dO[:, :180] = 1e4
    quiet, noisy = attend(case), attend(loud)
    assert (quiet["dQ"][:, :180] == 0).all()
    assert (noisy["dQ"][:, :180] == 0).all()
    assert noisy["dK"].equal(quiet["dK"])
    assert noisy["dV"].equal(quiet["dV"])


@pytest.mark.parametrize("sizes", [(0, 2, 2, 5, 5), (2, 2, 2, 0, 5), (2, 2, 2, 5, 0)], ids=str)
def test_empty(sizes: tuple[int, int, int, int, int], generator: torch.Generator) -> None:
    """BUGS B09: gradients are zeros, not None."""
    case = seen(case_of(FORWARD, sizes, generator))
    results = attend(case)
    for name, like in zip(NAMES, (case.q, case.k, case.v), strict=True):
        assert results[name].shape == like.shape
        assert (results[name] == 0).all()


def test_dk_and_dv_are_repeatable(generator: torch.Generator) -> None:
    """BUGS B10, B11: bit by bit over runs; what is summed in any order is dQ alone."""
    q, k, v = (
        torch.randn(2, 1000, h, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for h in (8, 2, 2)
    )
    out = fa2tvm.attention(q, k, v, causal=True)
    runs = [torch.autograd.grad(out, (k, v), out, retain_graph=True) for _ in range(20)]
    for dk, dv in runs[1:]:
        assert dk.equal(runs[0][0])
        assert dv.equal(runs[0][1])


def test_deterministic_by_pytorchs_switch(generator: torch.Generator) -> None:
    """BUGS B11: then dQ too is the same bits in every run, eager and through the operator."""
    case = seen(case_of(FORWARD, (2, 8, 2, 900, 900), generator))
    leaves = [x.cuda().requires_grad_() for x in (case.q, case.k, case.v)]
    dout = case.dO.cuda()
    torch.use_deterministic_algorithms(True)
    try:
        out = fa2tvm.flash_attn_func(*leaves, causal=True, deterministic=True)
        runs = [torch.autograd.grad(out, leaves, dout, retain_graph=True) for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)
    for gradients in runs[1:]:
        assert all(x.equal(y) for x, y in zip(gradients, runs[0], strict=True))
    with pytest.raises(UnsupportedProblem, match="use_deterministic_algorithms"):
        fa2tvm.flash_attn_func(*leaves, causal=True, deterministic=True)


def test_on_a_side_stream_and_in_a_graph(generator: torch.Generator) -> None:
    """BUGS G01: the backward runs on its forward's stream; a training step is captured whole."""
    q, k, v = (
        torch.randn(1, 400, 8, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
        for _ in "qkv"
    )
    expected = torch.autograd.grad(fa2tvm.attention(q, k, v, causal=True).sum(), (k, v))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            got = torch.autograd.grad(fa2tvm.attention(q, k, v, causal=True).sum(), (k, v))
    stream.synchronize()
    assert all(x.equal(y) for x, y in zip(got, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(fa2tvm.attention(q, k, v, causal=True).sum(), (k, v))
    for _ in range(5):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert all(x.equal(y) for x, y in zip(captured, expected, strict=True))


def test_compiled(generator: torch.Generator) -> None:
    """BUGS H01: forward and backward under torch.compile, with dynamic lengths."""
    step = torch.compile(
        lambda q, k, v: fa2tvm.attention(q, k, v, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for seq in (64, 65, 500):
        case = case_of(FORWARD, (1, 4, 2, seq, seq), generator)
        leaves = [x.cuda().requires_grad_() for x in (case.q, case.k, case.v)]
        dout = case.dO.cuda()
        got = torch.autograd.grad(step(*leaves), leaves[1:], dout)
        expected = torch.autograd.grad(fa2tvm.attention(*leaves, causal=True), leaves[1:], dout)
        assert all(x.equal(y) for x, y in zip(got, expected, strict=True))
