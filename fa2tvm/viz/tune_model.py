"""What the cost model knew: its predictions from the log, or replayed where a log lacks them.

A replay uses trees of the same depth on the same named columns as `tune.cost_model`, trained on
earlier trials only: the prediction that the search could have had of a trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fa2tvm.device import Device
from fa2tvm.problem import Problem
from fa2tvm.reference import Array
from fa2tvm.schedule import schedule_from_dict
from fa2tvm.tune.cost_model import WARMUP_TRIALS
from fa2tvm.tune.database import Trial
from fa2tvm.tune.features import columns
from fa2tvm.tune.nouns import BATCH
from fa2tvm.tune.space import Space

_DEPTH, _ROUNDS = 6, 60


def _features(
    problem: Problem, device: Device, family: str, trials: Sequence[Trial]
) -> tuple[list[str], Array, Array]:
    """Names of the columns, a row for each trial, and each trial's ratio."""
    space = Space.of(problem, device, family)
    rows = []
    for trial in trials:
        schedule = schedule_from_dict(family, problem.variant.pass_, trial.decisions)
        rows.append(columns(problem, schedule, device, space.choices))
    names = list(rows[0])
    ratios = np.array([1 / trial.relative for trial in trials])
    return names, np.array([list(row.values()) for row in rows]), ratios


def _train(features: Array, ratios: Array, names: list[str]) -> Any:
    import xgboost

    matrix = xgboost.DMatrix(features, ratios, feature_names=names)
    settings = {"max_depth": _DEPTH, "nthread": 1, "seed": 0, "eta": 0.2, "verbosity": 0}
    return xgboost.train(settings, matrix, num_boost_round=_ROUNDS)


def predictions(
    problem: Problem, device: Device, family: str, trials: Sequence[Trial]
) -> tuple[dict[int, tuple[float, float]], str]:
    """(predicted, measured) ratio by the trial's number, and how the predictions came about."""
    logged = {t.trial: (t.predicted, 1 / t.relative) for t in trials if t.predicted is not None}
    if len(logged) > 1:
        return logged, "with the search's own prediction, written down before it was measured"
    pairs = replay(problem, device, family, trials)
    late = trials[WARMUP_TRIALS:]
    found = {trial.trial: pair for trial, pair in zip(late, pairs, strict=False)}
    return found, "predicted afterwards by the same trees, trained on earlier trials only"


def replay(
    problem: Problem, device: Device, family: str, trials: Sequence[Trial]
) -> list[tuple[float, float]]:
    """(predicted, measured) ratio of each trial after the first `WARMUP_TRIALS`."""
    if len(trials) <= WARMUP_TRIALS:
        return []
    import xgboost

    names, features, ratios = _features(problem, device, family, trials)
    pairs: list[tuple[float, float]] = []
    for start in range(WARMUP_TRIALS, len(trials), BATCH):
        model = _train(features[:start], ratios[:start], names)
        batch = slice(start, start + BATCH)
        predicted = model.predict(xgboost.DMatrix(features[batch], feature_names=names))
        pairs += zip(map(float, predicted), map(float, ratios[batch]), strict=True)
    return pairs


def importance(
    problem: Problem, device: Device, family: str, trials: Sequence[Trial]
) -> list[tuple[str, float]]:
    """Each feature's share of the gain of all splits, the largest first; none for few trials."""
    if len(trials) <= WARMUP_TRIALS:
        return []
    names, features, ratios = _features(problem, device, family, trials)
    gains = _train(features, ratios, names).get_score(importance_type="total_gain")
    total = sum(gains.values())
    if not total:
        return []
    return sorted(((name, gain / total) for name, gain in gains.items()), key=lambda x: -x[1])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: 1 where the model orders the trials as the clock does; NaN of one trial."""
    if len(pairs) < 2:
        return float("nan")
    predicted, measured = (np.argsort(np.argsort(side)) for side in zip(*pairs, strict=True))
    return float(np.corrcoef(predicted, measured)[0, 1])
