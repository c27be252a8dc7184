"""Which candidates look fast: MetaSchedule's XGBoost model on the columns of features.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from fa2tvm.tune.features import columns
from fa2tvm.tune.space import Space, import_meta_schedule

# Measured trials below which the ranking is a guess: XGBoost on fewer points follows noise.
WARMUP_TRIALS = 12


def make_cost_model(space: Space, seed: int) -> Any:
    """XGBModel over the named columns; seeded noise before `WARMUP_TRIALS` results."""
    ms = import_meta_schedule()
    from tvm.ir.utils import derived_object
    from tvm.runtime import tensor

    @derived_object
    class NamedColumns(ms.feature_extractor.PyFeatureExtractor):  # type: ignore[misc, name-defined]
        def extract_from(self, _context: Any, candidates: Any) -> list[Any]:
            """One [1, columns] float32 tensor per candidate."""
            rows = []
            for candidate in candidates:
                schedule = space.read(candidate.sch)
                row = columns(space.problem, schedule, space.device, space.choices)
                rows.append(tensor(np.array([list(row.values())], dtype=np.float32)))
            return rows

    xgb = ms.cost_model.XGBModel(
        extractor=NamedColumns(),
        config=ms.cost_model.xgb_model.XGBConfig(seed=seed, max_depth=6),
        num_warmup_samples=WARMUP_TRIALS,
        num_tuning_cores=1,
    )
    rng = np.random.default_rng(seed)

    @derived_object
    class SeededModel(ms.cost_model.PyCostModel):  # type: ignore[misc, name-defined]
        """XGBModel draws from numpy's global generator before it is warm; this one does not."""

        def __init__(self) -> None:
            super().__init__()
            self.measured = 0

        def load(self, path: str) -> None:
            xgb.load(path)

        def save(self, path: str) -> None:
            xgb.save(path)

        def update(self, context: Any, candidates: Any, results: Any) -> None:
            self.measured += len(candidates)
            xgb.update(context, candidates, results)

        def predict(self, context: Any, candidates: Any) -> np.ndarray[Any, Any]:
            if self.measured < WARMUP_TRIALS:
                return rng.uniform(size=len(candidates))
            scores: np.ndarray[Any, Any] = xgb.predict(context, candidates)
            return scores

    return SeededModel()
