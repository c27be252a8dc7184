"""The package's yardstick as an assertion."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fa2tvm import yardstick
from fa2tvm.yardstick import Tensors

__all__ = ("Case", "Tensors")


class Case(yardstick.Case):
    """One call's inputs; see `fa2tvm.yardstick`."""

    def check(self, ours: Mapping[str, torch.Tensor]) -> None:
        """Hold each of our results to the yardstick."""
        reason = self.why_wrong(ours)
        assert reason is None, reason
