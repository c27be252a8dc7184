"""BUGS section H on numerics: a small causal language model with our attention inside."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fa2tvm

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return fa2tvm.attention(q, k, v, causal=True)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(q.shape[3])
    s = s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("bhij,bjhc->bihc", s.softmax(dim=-1), v)


class Model(nn.Module):
    """Two layers, four heads, 64 tokens to choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.qkv = nn.ModuleList(nn.Linear(64, 192) for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor, attend: Attention) -> torch.Tensor:
        x = self.embed(tokens)
        for qkv, mix in zip(self.qkv, self.mix, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, 16)).unbind(dim=2)
            x = x + mix(attend(q, k, v).flatten(2))
        return self.head(x)


@pytest.fixture
def model(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


@pytest.fixture
def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(64, (2, 150), generator=generator)


def test_the_last_token_changes_no_earlier_logits(model: Model, tokens: torch.Tensor) -> None:
    """H03 (HF !45811 #46132, xformers #103): causality is not dropped on the way."""
    with torch.no_grad():
        before = model(tokens, ours)
        tokens[:, -1] = (tokens[:, -1] + 1) % 64
        after = model(tokens, ours)
    assert after[:, :-1].equal(before[:, :-1])
    assert not after[:, -1].equal(before[:, -1])


def test_training_steps_agree(model: Model, tokens: torch.Tensor) -> None:
    """The loss and every gradient are those of plain attention, and a step lowers the loss."""
    losses, gradients = [], []
    for attend in (ours, plain):
        model.zero_grad()
        logits = model(tokens[:, :-1], attend)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*losses)
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1], ours)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    assert loss < losses[0]


def test_a_cache_gives_what_the_whole_gives(model: Model, tokens: torch.Tensor) -> None:
    """C01, H03: one token at a time over cached keys equals the causal run (bottom-right)."""
    caches: list[list[torch.Tensor]] = []
    layer = 0

    def cached(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal layer
        if len(caches) <= layer:
            caches.append([k, v])
        else:
            caches[layer] = [torch.cat(x, dim=1) for x in zip(caches[layer], (k, v), strict=True)]
        layer += 1
        return fa2tvm.attention(q, *caches[layer - 1], causal=True)

    with torch.no_grad():
        whole = model(tokens[:, :40], ours)
        for i in range(40):
            layer = 0
            step = model(tokens[:, i : i + 1], cached)
            torch.testing.assert_close(step[:, 0], whole[:, i], rtol=1e-4, atol=1e-5)
