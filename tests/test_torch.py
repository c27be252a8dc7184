"""The operators as PyTorch sees them: autograd, strides, torch.compile, autocast, transforms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
import torch._dynamo.testing
from calls import assert_same_bits
from torch import Tensor

import fa2tvm
from fa2tvm import launch
from fa2tvm.errors import UnsupportedProblem

D = 64
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def inputs(
    generator: torch.Generator,
    seq_q: int = 33,
    seq_kv: int | None = None,
    *,
    batch: int = 2,
    heads: int = 4,
    heads_kv: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves q, k, v that require grad."""
    seq_kv = seq_q if seq_kv is None else seq_kv
    sizes = ((batch, seq_q, heads, D), (batch, seq_kv, heads_kv, D), (batch, seq_kv, heads_kv, D))
    q, k, v = (torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes)
    return q, k, v


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """O and the gradients of a call."""
    out = fa2tvm.attention(q, k, v, **options)
    dout = torch.ones(()).expand(out.shape).to(out.dtype) if dout is None else dout
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("O", "dQ", "dK", "dV"), (out.detach(), *grads), strict=True))


def test_gradients_of_scalar_losses(generator: torch.Generator) -> None:
    """BUGS B04: out.sum().backward() gives dO with strides (0, 0, 0, 0)."""
    q, k, v = inputs(generator)
    out = fa2tvm.attention(q, k, v)
    expanded = torch.autograd.grad(out.sum(), (q, k, v))
    whole = gradients(q, k, v, torch.ones_like(out))
    assert all(a.equal(b) for a, b in zip(expanded, list(whole.values())[1:], strict=True))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "offset", "expanded rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dout_of_any_strides(layout: str, dtype: torch.dtype, generator: torch.Generator) -> None:
    """BUGS B04: a non-contiguous dO is read where it lies."""
    q, k, v = inputs(generator, 32, 32, heads_kv=1, dtype=dtype)
    shape = (2, 32, 4, D)
    wide = torch.randn(2, 33, 5, 2 * D + 1, generator=generator).to(dtype)
    dout = {
        "transposed": lambda: wide[:, :4, :, :D].expand(2, 4, 5, D)[:, :, :1].expand(2, 4, 32, D),
        "sliced": lambda: wide[:, :32, :4, ::2][..., :D],
        "offset": lambda: wide[:, 1:, 1:, 1 : 1 + D],
        "expanded rows": lambda: wide[:, :1, :4, :D].expand(shape),
    }[layout]()
    dout = dout.transpose(1, 2) if layout == "transposed" else dout
    assert dout.shape == shape
    assert not dout.is_contiguous()
    assert_same_bits(gradients(q, k, v, dout), gradients(q, k, v, dout.contiguous()))


def with_size_one_strides(x: Tensor, stride: int) -> Tensor:
    strides = [stride if size == 1 else s for size, s in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


@pytest.mark.parametrize("stride", [1, 7, 0])
@pytest.mark.parametrize("sizes", [(1, 9, 4), (2, 1, 4), (2, 9, 1)], ids=["B", "S", "H"])
def test_strides_of_sizes_of_one(
    sizes: tuple[int, int, int], stride: int, generator: torch.Generator
) -> None:
    """BUGS F03: the stride of a dimension of size 1 says nothing."""
    batch, seq, heads = sizes
    clean = inputs(generator, seq, batch=batch, heads=heads, heads_kv=heads)
    odd = [with_size_one_strides(x.detach(), stride).requires_grad_() for x in clean]
    assert_same_bits(gradients(*odd), gradients(*clean))


def test_head_dim_of_one_with_an_odd_stride(generator: torch.Generator) -> None:
    """BUGS F03: also where it is the innermost dimension."""
    q = torch.randn(1, 5, 2, 3, generator=generator)
    odd = q[..., 1:2]
    assert odd.stride(-1) == 1
    odd = odd.as_strided(odd.shape, (*odd.stride()[:-1], 3), odd.storage_offset())
    plain = odd.clone(memory_format=torch.contiguous_format)
    assert fa2tvm.attention(odd, odd, odd).equal(fa2tvm.attention(plain, plain, plain))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads before seq": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second row": lambda x: torch.repeat_interleave(x, 2, 1)[:, ::2],
    "one of three in a fused buffer": lambda x: torch.stack([x, x, x], 2)[:, :, 1],
    "element offset": lambda x: torch.cat([x.flatten(-2), x[..., 0, :1]], -1)[..., 1:].unflatten(
        -1, x.shape[-2:]
    ),
    "innermost not 1": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_strides(layout: str, generator: torch.Generator) -> None:
    """BUGS F04: a kernel built for other strides would read garbage silently."""
    leaves = inputs(generator)
    views = [LAYOUTS[layout](x.detach()).requires_grad_() for x in leaves]
    clones = [x.detach().clone(memory_format=torch.contiguous_format) for x in views]
    if layout != "element offset":
        assert all(a.equal(b) for a, b in zip(views, leaves, strict=True))
    assert not any(x.is_contiguous() for x in views)
    assert_same_bits(gradients(*views), gradients(*(x.requires_grad_() for x in clones)))


def test_expanded_inputs_sum_their_gradients(generator: torch.Generator) -> None:
    """BUGS F04: K and V expanded over the batch (stride 0)."""
    q, k, v = inputs(generator, batch=3)
    k1, v1 = (x.detach()[:1].clone().requires_grad_() for x in (k, v))
    dout = torch.randn(q.shape, generator=generator)
    shared = torch.autograd.grad(
        fa2tvm.attention(q, k1.expand(k.shape), v1.expand(v.shape)), (q, k1, v1), dout
    )
    k3, v3 = (x.detach().repeat(3, 1, 1, 1).requires_grad_() for x in (k1, v1))
    copied = gradients(q, k3, v3, dout)
    assert shared[0].equal(copied["dQ"])
    assert shared[1].equal(copied["dK"].sum(0, keepdim=True))
    assert shared[2].equal(copied["dV"].sum(0, keepdim=True))


def test_only_v_is_not_contiguous(generator: torch.Generator) -> None:
    """BUGS F05: a projection's output, viewed and transposed."""
    q, k, v = inputs(generator, 62, batch=1, heads=16, heads_kv=16, dtype=torch.bfloat16)
    view = v.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    assert view.equal(v)
    assert_same_bits(gradients(q, k, view), gradients(q, k, v))


def test_gradient_strides_are_those_of_the_fake(generator: torch.Generator) -> None:
    """BUGS F07: gradients allocated like the wrong tensor break compilation."""
    q, k, v = inputs(generator, 513, batch=1)
    v = v.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out, lse = torch.ops.fa2tvm.attention_forward(q, k, v, None, False, "top_left")
    arguments = (q, k, v, out, lse, torch.ones_like(out), None, None, False, "top_left")
    real = torch.ops.fa2tvm.attention_backward(*arguments, [True, True, True])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
        fake = torch.ops.fa2tvm.attention_backward(*fakes, [True, True, True])
    assert [x.stride() for x in real] == [x.stride() for x in fake]
    compiled = torch.compile(fa2tvm.attention, backend="aot_eager", fullgraph=True)
    compiled(q, k, v).sum().backward()
    expected = gradients(q, k, v)
    assert [x.grad.equal(expected[n]) for x, n in ((q, "dQ"), (k, "dK"), (v, "dV"))] == [True] * 3


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_keys_are_a_slice_of_a_longer_cache(compiled: bool, generator: torch.Generator) -> None:
    """BUGS F09: gradients outside the slice are zero, inside those of a copy."""
    q, k, v = inputs(generator, 70, 96, batch=1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa2tvm.attention(q, k[:, :64], v[:, :64])

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    call(q, k, v).sum().backward()
    k_copy, v_copy = (x.detach()[:, :64].clone().requires_grad_() for x in (k, v))
    expected = gradients(q, k_copy, v_copy)
    for x, name in ((k, "dK"), (v, "dV")):
        assert x.grad[:, 64:].eq(0).all()
        assert x.grad[:, :64].equal(expected[name])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_parameters_without_grad(mode: Callable[[], Any], generator: torch.Generator) -> None:
    """BUGS F10: DLPack refuses tensors that require grad."""
    q, k, v = inputs(generator)
    expected = fa2tvm.attention(q, k, v).detach()
    with mode():
        assert fa2tvm.attention(torch.nn.Parameter(q), torch.nn.Parameter(k), v).equal(expected)


def test_lazily_negated_inputs(generator: torch.Generator) -> None:
    """TVM_NOTES: views with the negative bit are read un-negated through DLPack."""
    q, k, v = (x.detach() for x in inputs(generator))
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negated.is_neg()
    assert negated.equal(q)
    with torch.no_grad():
        assert fa2tvm.attention(negated, k, v).equal(fa2tvm.attention(q, k, v))
    leaf = q.clone().requires_grad_()
    dout = torch.complex(torch.zeros_like(q), -torch.ones_like(q)).conj().imag
    out = fa2tvm.attention(leaf, k, v)
    assert torch.autograd.grad(out, leaf, dout, retain_graph=True)[0].equal(
        torch.autograd.grad(out, leaf, torch.ones_like(out))[0]
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("zero", ["batch", "seq_q", "seq_kv"])
def test_empty_tensors(zero: str, compiled: bool) -> None:
    """BUGS B09: shapes are kept and gradients are zeros, not None."""
    sizes = {"batch": 2, "seq_q": 3, "seq_kv": 5} | {zero: 0}
    q = torch.randn(sizes["batch"], sizes["seq_q"], 2, D, requires_grad=True)
    k = torch.randn(sizes["batch"], sizes["seq_kv"], 2, D, requires_grad=True)
    v = torch.randn(sizes["batch"], sizes["seq_kv"], 2, D, requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fa2tvm.attention(q, k, v, return_lse=True)

    call = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    out, lse = call(q, k, v)
    assert out.shape == q.shape
    assert lse.shape == (q.shape[0], 2, q.shape[1])
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert x.grad.eq(0).all()
    with torch.no_grad():
        assert call(q.detach(), k.detach(), v.detach())[1].shape == lse.shape


def test_what_is_kept_for_the_backward(generator: torch.Generator) -> None:
    """BUGS B13: a graph where gradients are wanted; without, nothing but the result."""
    q, k, v = inputs(generator)
    assert fa2tvm.attention(q, k, v).grad_fn is not None
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, lse = fa2tvm.attention(q * 1, k * 1, v * 1, return_lse=True)
        assert out.grad_fn is None
        assert lse.grad_fn is None
    alive = []
    with torch.no_grad():
        for _ in range(2):
            temporary = q * 1
            alive.append(weakref.ref(temporary))
            out = fa2tvm.attention(temporary, k, v)
            del temporary
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_second_derivative_is_refused(generator: torch.Generator) -> None:
    """BUGS B14: not implemented, and never silently zero."""
    q, k, v = inputs(generator, 4)
    (dq,) = torch.autograd.grad(fa2tvm.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()
    attend = torch.func.grad(lambda x: fa2tvm.attention(x, k.detach(), v.detach()).sum())
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.grad(lambda x: attend(x).sum())(q.detach())


SUBSETS = [names for names in product((False, True), repeat=3) if any(names)]


@pytest.mark.parametrize("needs", SUBSETS, ids=str)
def test_gradients_of_a_subset(
    needs: tuple[bool, ...], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUGS B15: only what is needed is computed, and it equals the run that needs all."""
    asked: list[tuple[bool, ...]] = []
    backward = launch.backward

    def spy(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[-1])
        return backward(*arguments, **options)

    q, k, v = inputs(generator)
    dout = torch.randn(q.shape, generator=generator)
    everything = list(gradients(q, k, v, dout).values())[1:]
    monkeypatch.setattr(launch, "backward", spy)
    leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs, strict=True)]
    fa2tvm.attention(*leaves).backward(dout)
    assert asked == [needs]
    for x, need, expected in zip(leaves, needs, everything, strict=True):
        assert x.grad.equal(expected) if need else x.grad is None


def test_unneeded_gradients_are_not_touched(generator: torch.Generator) -> None:
    """BUGS B15: inputs stand in for the gradients that are left out, and stay as they are."""
    q, k, v = inputs(generator)
    before = [x.detach().clone() for x in (q, k, v)]
    for needs in SUBSETS:
        leaves = [x.detach().requires_grad_(need) for x, need in zip((q, k, v), needs, strict=True)]
        fa2tvm.attention(*leaves).sum().backward()
        assert all(x.equal(y) for x, y in zip((q, k, v), before, strict=True))


def test_in_place_edits_are_noticed(generator: torch.Generator) -> None:
    """BUGS B16: saved tensors obey the version counter."""
    for edited in range(3):
        q, k, v = inputs(generator)
        views = [x * 1 for x in (q, k, v)]
        out = fa2tvm.attention(*views)
        views[edited].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    q, k, v = inputs(generator)
    out = fa2tvm.attention(q, k, v)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_backward_twice_and_memory(generator: torch.Generator) -> None:
    """BUGS B16: retain_graph repeats the gradients; a forward without backward leaks nothing."""
    q, k, v = inputs(generator)
    out = fa2tvm.attention(q, k, v)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))
    alive = []
    for _ in range(200):
        out = fa2tvm.attention(q * 1, k, v)
        alive.append(weakref.ref(out))
    del out
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_gradient_through_lse_alone(generator: torch.Generator) -> None:
    """d LSE_i / d s_ij = P_ij, with no gradient on O."""
    q, k, v = inputs(generator)
    _, lse = fa2tvm.attention(q, k, v, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    q64, k64 = (x.detach().double().requires_grad_() for x in (q, k))
    s = torch.einsum("bihd,bjhd->bhij", q64, k64.repeat_interleave(2, 2)) / D**0.5
    expected = torch.autograd.grad(s.logsumexp(-1).sum(), (q64, k64))
    torch.testing.assert_close(dq.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dk.double(), expected[1], atol=1e-5, rtol=1e-5)
    assert dv is None or dv.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(dtype: torch.dtype, generator: torch.Generator) -> None:
    """BUGS H01: schema, fakes, autograd registration and AOT dispatch agree with the kernels."""
    q, k, v = inputs(generator, 17, 40, dtype=dtype)
    sample = (q, k, v, 0.3, True, "bottom_right")
    torch.library.opcheck(torch.ops.fa2tvm.attention_forward, sample)
    detached = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.fa2tvm.attention_forward, (*detached, None, False, "top_left"))
    out, lse = torch.ops.fa2tvm.attention_forward(*detached, None, False, "top_left")
    rest = (torch.ones_like(out), None, None, False, "top_left")
    for needs in ([True, True, True], [False, True, False]):
        torch.library.opcheck(
            torch.ops.fa2tvm.attention_backward, (*detached, out, lse, *rest, needs)
        )


def test_compile_with_dynamic_lengths(generator: torch.Generator) -> None:
    """BUGS H01: no graph break, and at most two compilations for three lengths."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return fa2tvm.attention(q, k, v, causal=True, return_lse=True)

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for seq in (64, 65, 1024):
        leaves = inputs(generator, seq, batch=1)
        dout = torch.randn(1, seq, 4, D, generator=generator)
        dlse = torch.randn(1, 4, seq, generator=generator)
        eager, traced = (
            (*results, *torch.autograd.grad(results, leaves, (dout, dlse)))
            for results in (call(*leaves), compiled(*leaves))
        )
        assert all(a.equal(b) for a, b in zip(eager, traced, strict=True))
    assert counter.frame_count <= 2


def test_compile_traces_every_public_function(generator: torch.Generator) -> None:
    """BUGS H01: the other two signatures are made of the same operator."""
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in inputs(generator, heads_kv=4))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return (
            fa2tvm.flash_attn_func(q, k, v, causal=True),
            fa2tvm.scaled_dot_product_attention(*heads_first, is_causal=True),
        )

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for eager, traced in zip(call(q, k, v), compiled(q, k, v), strict=True):
        assert eager.equal(traced)


def test_mixed_dtypes_under_autocast(generator: torch.Generator) -> None:
    """BUGS H02: norms leave q and k in float32 and v in bfloat16."""
    q, k, v = inputs(generator)
    v = v.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fa2tvm.attention(q, k, v)
        with torch.no_grad():
            assert fa2tvm.attention(q.detach(), k.detach(), v.detach()).equal(out)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert [x.grad.dtype for x in (q, k, v)] == [torch.float32, torch.float32, torch.bfloat16]
    low = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = gradients(*low)
    assert out.equal(expected["O"])
    for x, name in ((q, "dQ"), (k, "dK"), (v, "dV")):
        assert x.grad.equal(expected[name].to(x.dtype))
    with pytest.raises(UnsupportedProblem, match=r"float32, torch.float32, torch.bfloat16"):
        fa2tvm.attention(q, k, v)


def test_compile_under_autocast(generator: torch.Generator) -> None:
    """BUGS H02: also where the graph is traced."""
    torch._dynamo.reset()
    q, k, v = inputs(generator)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fa2tvm.attention(q, k, v.bfloat16())

    out = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert out.dtype == torch.bfloat16
    assert out.equal(call(q, k, v))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_functional_transforms(generator: torch.Generator) -> None:
    """BUGS H05: torch.func.grad and vjp work; what does not exist says so."""
    q, k, v = inputs(generator)
    expected = gradients(q, k, v)
    q, k, v = (x.detach() for x in (q, k, v))
    grads = torch.func.grad(lambda *x: fa2tvm.attention(*x).sum(), argnums=(0, 1, 2))(q, k, v)
    for grad, name in zip(grads, ("dQ", "dK", "dV"), strict=True):
        assert grad.equal(expected[name])
    out, vjp = torch.func.vjp(lambda x: fa2tvm.attention(x, k, v), q)
    assert vjp(torch.ones_like(out))[0].equal(expected["dQ"])
    with pytest.raises(RuntimeError, match=r"jvp|forward.mode"):
        torch.func.jvp(lambda x: fa2tvm.attention(x, k, v), (q,), (q,))


@pytest.mark.filterwarnings("error")
def test_vmap_is_more_batches(generator: torch.Generator) -> None:
    """BUGS H05: vmap gives what a loop gives: over some inputs, any dim, and with gradients."""
    q, k, v = (x.detach() for x in inputs(generator))
    many = torch.stack([q, q + 1, q - 1], dim=2)
    mapped = torch.vmap(lambda x: fa2tvm.attention(x, k, v, return_lse=True), in_dims=2)(many)
    looped = [fa2tvm.attention(x, k, v, return_lse=True) for x in many.unbind(2)]
    for ours, loop in zip(mapped, zip(*looped, strict=True), strict=True):
        assert ours.equal(torch.stack(loop))
    keys = torch.stack([k, k * 2, -k])
    grad = torch.func.grad(lambda x, y: fa2tvm.attention(x, y, v).sum(), argnums=(0, 1))
    dq, dk = torch.vmap(grad, in_dims=(2, 0))(many, keys)
    for i in range(3):
        expected = grad(many[:, :, i], keys[i])
        torch.testing.assert_close((dq[i], dk[i]), expected, atol=1e-6, rtol=1e-6)


class Logged(torch.Tensor):
    """A subclass that sees what is called on it."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_and_modes_see_the_operator(generator: torch.Generator) -> None:
    """The direct path is for plain tensors in plain calls only."""
    q, k, v = (x.detach() for x in inputs(generator))
    with torch.no_grad():
        expected = fa2tvm.attention(q, k, v)
        out = fa2tvm.attention(q.as_subclass(Logged), k, v)
    assert isinstance(out, Logged)
    assert any("fa2tvm" in call for call in Logged.calls)
    assert out.as_subclass(Tensor).equal(expected)

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            Logged.calls.append(str(func))
            return func(*args, **(kwargs or {}))

    Logged.calls.clear()
    with torch.no_grad(), Seen():
        assert fa2tvm.attention(q, k, v).equal(expected)
    assert any("fa2tvm.attention_forward" in call for call in Logged.calls)
    traced = torch.jit.trace(lambda x: fa2tvm.attention(x, k, v), (q,), check_trace=False)
    assert traced(q + 1).equal(fa2tvm.attention(q + 1, k, v))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int32, torch.complex64, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    """BUGS H04: one line that lists what is supported."""
    x = torch.zeros(1, 4, 2, D).to(dtype)
    with pytest.raises(UnsupportedProblem, match="float32, float16, bfloat16") as refused:
        fa2tvm.attention(x, x, x)
    assert str(dtype) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_meta_and_fake_tensors() -> None:
    """Shapes, dtypes and strides without data."""
    q = torch.empty(2, 3, 4, D, device="meta", dtype=torch.bfloat16)
    out, lse = fa2tvm.attention(q, q, q, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 3), torch.float32)


def test_checkpointing(generator: torch.Generator) -> None:
    """Recomputation gives the same gradients."""
    q, k, v = inputs(generator)
    out = torch.utils.checkpoint.checkpoint(fa2tvm.attention, q, k, v, use_reentrant=False)
    again = torch.autograd.grad(out.sum(), (q, k, v))
    expected = gradients(q, k, v)
    for grad, name in zip(again, ("dQ", "dK", "dV"), strict=True):
        assert grad.equal(expected[name])
