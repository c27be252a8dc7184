"""What a tiny forward and backward costs at least where the autograd function is Python's.

    python benchmarks/call_floor.py

On a GPU, CPU microseconds of all threads, in alternating rounds: F.scaled_dot_product_attention,
whose autograd function is C++; fa2tvm.attention; a torch.autograd.Function that allocates its
results and does nothing else; and that one with the launches of fa2tvm.attention in it, without a
look at its arguments. The last two are floors of any implementation in Python.
"""

from __future__ import annotations

import json
import statistics

import torch
import torch.nn.functional as F

import fa2tvm
from fa2tvm.bench.calls import interleave
from fa2tvm.bench.machine import provenance
from fa2tvm.modules import prepared

SHAPE = (1, 16, 1, 64)


class Bare(torch.autograd.Function):
    """Allocates O, then dQ, dK and dV."""

    @staticmethod
    def forward(ctx, *inputs):
        """O, of any values."""
        del ctx
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx, dout):
        """Gradients of any values."""
        del ctx
        return torch.empty_like(dout), torch.empty_like(dout), torch.empty_like(dout)


class Launched(torch.autograd.Function):
    """Allocates what fa2tvm.attention does and launches its kernels on it."""

    calls: tuple = ()

    @staticmethod
    def forward(ctx, q, k, v):
        """Launch the forward's kernel."""
        function, out_like, lse_like, _, scale, offset, counter = Launched.calls[0]
        out, lse = torch.empty_like(out_like), torch.empty_like(lse_like)
        extra = () if counter is None else (counter,)
        function(q, k, v, out, lse, *extra, scale, offset)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        """Launch the backward's three kernels."""
        function, like, workspace_like, scale, numbers = Launched.calls[1]
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in like]
        function(
            q, k, v, out, lse, dout, lse, *grads, torch.empty_like(workspace_like), scale, *numbers
        )
        return tuple(grads)


def main() -> int:
    """Measure and print a line of JSON for each."""
    how = {"dtype": torch.bfloat16, "device": "cuda"}
    leaves = [torch.randn(*SHAPE, **how).requires_grad_() for _ in "qkv"]
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in leaves]
    dout = torch.randn(*SHAPE, **how)

    def both(attention, inputs, grad):
        def loop(calls: int) -> None:
            for _ in range(calls):
                torch.autograd.grad(attention(*inputs), inputs, grad)

        return loop

    both(fa2tvm.attention, leaves, dout)(1)
    # The keys of forwards have an element less than those of backwards.
    forward, backward = (prepared[key] for key in sorted(prepared, key=len))
    counter = forward[-1]
    if not (counter is None or isinstance(counter, torch.Tensor)):
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    Launched.calls = ((*forward[:-1], counter), backward)
    loops = {
        "sdpa": both(F.scaled_dot_product_attention, turned, dout.transpose(1, 2)),
        "fa2tvm": both(fa2tvm.attention, leaves, dout),
        "bare function": both(Bare.apply, leaves, dout),
        "bare function, launched": both(Launched.apply, leaves, dout),
    }
    run = provenance("cuda")
    found = {
        n: statistics.median(cpu)
        for n, (cpu, _) in interleave(loops, torch.cuda.synchronize).items()
    }
    for name, us in found.items():
        share = us / found["sdpa"]
        print(
            json.dumps(
                {"what": "call_floor", "peer": name, "cpu_us": us, "of_sdpa": share, "run": run}
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
