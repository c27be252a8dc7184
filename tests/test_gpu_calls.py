"""Calls on an NVIDIA GPU: streams, CUDA graphs, threads, devices, torch.compile, autocast."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from python_process import run_python

import fa2tvm
from fa2tvm import cuda_launch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("pack")]

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tensors(
    *, batch: int = 2, seq: int = 700, heads: int = 24, d: int = 64, device: str = "cuda"
) -> Tensors:
    """Enough tiles that each thread block draws several from the counter."""
    q = torch.randn(batch, seq, heads, d, device=device, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, seq, heads // 4, d, device=device, dtype=torch.bfloat16).unbind()
    return q, k, v


@torch.no_grad()
def attend(x: Tensors) -> torch.Tensor:
    return fa2tvm.attention(*x, causal=True)


def test_side_stream_is_obeyed() -> None:
    """BUGS G01: inputs that are still being written on a side stream are waited for."""
    x = tensors()
    expected = attend(x)
    late = tuple(torch.zeros_like(y) for y in x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        with torch.cuda.stream(stream):
            for y in late:
                y.zero_()
            torch.cuda._sleep(10_000_000)
            for y, source in zip(late, x, strict=True):
                y.copy_(source)
            got = attend(late).clone()
        stream.synchronize()
        assert got.equal(expected)


def test_streams_that_overlap() -> None:
    """Launches of one module on several streams at once; each stream has a counter."""
    inputs = [tensors(batch=1) for _ in range(4)]
    expected = [attend(x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(25):
        for x, stream, got in zip(inputs, streams, results, strict=True):
            with torch.cuda.stream(stream):
                got.append(attend(x))
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert all(out.equal(want) for out in got)


def test_every_stream_has_its_counter_and_leaves_it_zero() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = tensors()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            attend(x)
            counter = cuda_launch.counter(x[0].device.index)
            assert cuda_launch.counter(x[0].device.index) is counter
            found.append(counter)
        stream.synchronize()
        assert int(counter) == 0
    assert len({c.data_ptr() for c in found}) == len(streams)


def test_graph_capture_and_replay() -> None:
    """Two calls in one graph, replayed over new inputs, between eager calls."""
    x, y = tensors(), tensors()
    attend(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = attend(x)
        second = attend((first, x[1], x[2]))
    for _ in range(10):
        for inside, fresh in zip(x, tensors(), strict=True):
            inside.copy_(fresh)
        first.fill_(torch.nan)
        second.fill_(torch.nan)
        graph.replay()
        eager = attend(x)
        assert first.equal(eager)
        assert second.equal(attend((eager, x[1], x[2])))
        attend(y)


def test_graphs_replayed_side_by_side() -> None:
    """Two graphs of the same module on two streams, and eager calls on a third."""
    inputs = [tensors(batch=1) for _ in range(2)]
    expected = [attend(x) for x in inputs]
    graphs, results = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([attend(x) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = attend(inputs[0])
    torch.cuda.synchronize()
    assert eager.equal(expected[0])
    for got, want in zip(results, expected, strict=True):
        assert all(out.equal(want) for out in got)


def test_first_call_may_be_captured() -> None:
    """A shape never seen before, in a capture: nothing synchronises or waits for the GPU there."""
    x = tensors(batch=1, seq=333)
    fa2tvm.forget()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        out = attend(x)
    graph.replay()
    torch.cuda.synchronize()
    assert out.equal(attend(x))


CAPTURED_FIRST = """
import torch, fa2tvm
pack = {pack!r}
if pack:
    fa2tvm.use_pack(pack, trust=True)
q = torch.randn(1, 500, 8, 64, device="cuda", dtype=torch.bfloat16)
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph):
    out = fa2tvm.attention(q, q, q, causal=True)
graph.replay()
torch.cuda.synchronize()
with torch.no_grad():
    assert out.equal(fa2tvm.attention(q, q, q, causal=True))
"""


def test_first_call_of_a_process_may_be_captured(request: pytest.FixtureRequest) -> None:
    """The module reaches the GPU in the capture itself."""
    given = request.config.getoption("--pack")
    run_python(CAPTURED_FIRST.format(pack=os.fspath(given) if given else ""))


@pytest.mark.slow
@torch.no_grad()
def test_reduce_overhead() -> None:
    """torch.compile's own graphs, whose memory pool bears nothing that outlives a call."""
    step = torch.compile(
        lambda q, k, v: fa2tvm.attention(q, k, v, causal=True) + 1, mode="reduce-overhead"
    )
    for _ in range(4):
        x = tensors()
        assert step(*x).equal(attend(x) + 1)


def test_an_lse_that_was_asked_for_stays() -> None:
    """Calls whose LSE nobody reads share memory for it; the others do not."""
    x = tensors(batch=1, seq=50, heads=4)
    with torch.no_grad():
        out, lse = fa2tvm.attention(*x, causal=True, return_lse=True)
        before = lse.clone()
        y = tensors(batch=1, seq=50, heads=4)
        for _ in range(3):
            fa2tvm.attention(*y, causal=True)
        other = fa2tvm.attention(*x, causal=True)
    assert lse.equal(before)
    assert other.equal(out)


def test_what_changes_beside_the_shapes_is_refused() -> None:
    """A call of the same shapes whose k or v has another dtype, or lies elsewhere."""
    q, k, v = tensors()
    expected = attend((q, k, v))
    for other in (
        (q, k.float(), v),
        (q, k, v.half()),
        (q.half(), k, v),
        (q, k.cpu(), v),
        (q, k, v.cpu()),
        (q.cpu(), k, v),
    ):
        with pytest.raises(fa2tvm.UnsupportedProblem, match=r"(convert|move) them"):
            attend(other)
    assert attend((q, k, v)).equal(expected)


def test_threads_with_streams_of_their_own() -> None:
    """BUGS G04: eight threads, mixed shapes, from cold."""
    inputs = [tensors(batch=1, seq=100 + 150 * n) for n in range(8)]
    expected = [attend(x) for x in inputs]
    fa2tvm.forget()
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [attend(inputs[number]) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        if not all(out.equal(expected[number]) for out in results):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_parameters_under_no_grad() -> None:
    """BUGS F10: tensors that require grad are fine where no gradient is recorded."""
    x = tensors()
    expected = attend(x)
    parameters = tuple(torch.nn.Parameter(y) for y in x)
    assert attend(parameters).equal(expected)
    with torch.inference_mode():
        assert fa2tvm.attention(*parameters, causal=True).equal(expected)


def test_autocast() -> None:
    """BUGS H02: q and k in float32 beside v in bfloat16 are computed in bfloat16."""
    q, k, v = tensors()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        got = fa2tvm.attention(q.float(), k.float(), v, causal=True)
    assert got.dtype == torch.bfloat16
    assert got.equal(attend((q, k, v)))
    with pytest.raises(fa2tvm.UnsupportedProblem, match="float32"):
        fa2tvm.attention(q.float(), k, v)


@torch.no_grad()
def test_compiled() -> None:
    """BUGS H01: torch.compile sees one operator, with dynamic sizes, and adds no graph break."""
    step = torch.compile(
        lambda q, k, v: fa2tvm.attention(q, k, v, causal=True) * 2,
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for seq in (64, 65, 700):
        x = tensors(seq=seq)
        assert step(*x).equal(attend(x) * 2)


@torch.no_grad()
def test_other_conventions() -> None:
    q, k, v = tensors()
    expected = attend((q, k, v))
    assert fa2tvm.flash_attn_func(q, k, v, causal=True).equal(expected)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    out = fa2tvm.scaled_dot_product_attention(*transposed, is_causal=True, enable_gqa=True)
    assert out.transpose(1, 2).equal(expected)


def test_second_gpu() -> None:
    """BUGS G03: tensors on another GPU than the current one, which stays the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    x = tensors()
    expected = attend(x)
    there = tuple(y.to("cuda:1") for y in x)
    got = attend(there)
    assert got.device.index == 1
    assert torch.cuda.current_device() == 0
    assert got.cpu().equal(expected.cpu())
    assert attend(x).equal(expected)
    with pytest.raises(fa2tvm.UnsupportedProblem, match="one device"):
        fa2tvm.attention(x[0], there[1], x[2])


def test_module_says_what_it_is() -> None:
    """The manifest names architecture, runtime, registers, spills and shared memory."""
    from fa2tvm import cuda_runtime
    from fa2tvm.problem import Problem, Shape, Variant

    problem = Problem(Variant("forward", "bfloat16", 64, 64, True), Shape(1, 4, 4, 512, 512))
    manifest = fa2tvm.module_for(problem, cuda_runtime.device(0)).manifest
    code = manifest["code"]
    assert code["arch"] == manifest["target"]["arch"]
    assert code["runtime"].startswith("libcudart.so.")
    assert code["spill_bytes"] == 0
    assert 0 < code["registers"] <= 255
    assert 0 < code["shared_bytes"] <= cuda_runtime.device(0).shared_bytes
