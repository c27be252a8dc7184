"""Every registered schedule class: defaults fit, choices are typed, limits are said."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from fa2tvm.device import baseline, detect
from fa2tvm.errors import InfeasibleSchedule, UnsupportedProblem
from fa2tvm.problem import Problem, Shape, Variant
from fa2tvm.schedule import SCHEDULES, Schedule, schedule_class, schedule_from_dict

DEVICES = [baseline("x86-64-v3"), baseline("x86-64-v4"), detect()]
HEAD_DIMS = [(1, 1), (3, 5), (16, 80), (64, 64), (128, 128), (192, 128), (512, 512), (7, 512)]
CPU_CLASSES = [cls for (family, _), cls in SCHEDULES.items() if family == "cpu"]


def variants(cls: type[Schedule]) -> list[Variant]:
    return [
        Variant(cls.pass_, dtype, d, dv, causal)
        for dtype in ("float32", "float16", "bfloat16")
        for d, dv in HEAD_DIMS
        for causal in (False, True)
    ]


def test_each_pass_has_a_class_in_its_place() -> None:
    for (family, pass_), cls in SCHEDULES.items():
        assert (cls.family, cls.pass_) == (family, pass_)
        assert schedule_class(family, pass_) is cls
        assert dataclasses.is_dataclass(cls)
    assert {pass_ for family, pass_ in SCHEDULES if family == "cpu"} == {"forward", "backward"}


@pytest.mark.parametrize("cls", SCHEDULES.values(), ids=lambda c: c.__name__)
def test_every_decision_has_a_default_of_a_plain_type(cls: type[Schedule]) -> None:
    for field in dataclasses.fields(cls):
        assert type(getattr(cls, field.name)) in (int, bool, str), field.name


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.slug)
@pytest.mark.parametrize("cls", CPU_CLASSES, ids=lambda c: c.__name__)
def test_default_fits_every_variant(cls: type[Schedule], device: object) -> None:
    for variant in variants(cls):
        schedule = cls.default(variant, device)
        assert schedule.reasons(variant, device) == [], variant.name
        assert schedule.feasible(variant, device)
        footprint = schedule.footprint(variant, device)
        assert footprint.scratch_bytes > 0
        assert footprint.accumulator_registers > 0


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.slug)
@pytest.mark.parametrize("cls", CPU_CLASSES, ids=lambda c: c.__name__)
def test_choices_name_each_decision_and_some_points_fit(
    cls: type[Schedule], device: object, seed: int
) -> None:
    problem = Problem(Variant(cls.pass_, "float32", 64, 64), Shape(1, 8, 8, 2048, 2048))
    choices = cls.choices(problem, device)
    assert set(choices) <= {f.name for f in dataclasses.fields(cls)}
    default = cls.default(problem.variant, device).to_dict()
    for name, values in choices.items():
        assert len(set(values)) == len(values) > 0, name
        assert all(type(x) is type(default[name]) for x in values), name
    points = list(itertools.islice(itertools.product(*choices.values()), 200_000))
    random.Random(seed).shuffle(points)
    fit = [
        schedule_from_dict(cls.family, cls.pass_, {**default, **dict(zip(choices, p, strict=True))})
        for p in points[:500]
    ]
    share = sum(s.feasible(problem.variant, device) for s in fit) / len(fit)
    # Too few, and MetaSchedule cannot sample its first population.
    assert share > 0.1, f"only {share:.0%} of the space fits"


@pytest.mark.parametrize("cls", SCHEDULES.values(), ids=lambda c: c.__name__)
def test_decisions_survive_json(cls: type[Schedule]) -> None:
    schedule = cls()
    again = schedule_from_dict(cls.family, cls.pass_, json.loads(json.dumps(schedule.to_dict())))
    assert again == schedule
    assert hash(again) == hash(schedule)


@pytest.mark.parametrize("cls", SCHEDULES.values(), ids=lambda c: c.__name__)
def test_bad_decisions_are_refused(cls: type[Schedule]) -> None:
    good = cls().to_dict()
    name = next(iter(good))
    with pytest.raises(InfeasibleSchedule, match=name):
        schedule_from_dict(cls.family, cls.pass_, {k: v for k, v in good.items() if k != name})
    with pytest.raises(InfeasibleSchedule, match="block_z"):
        schedule_from_dict(cls.family, cls.pass_, {**good, "block_z": 1})
    with pytest.raises(InfeasibleSchedule, match="must be of type"):
        schedule_from_dict(cls.family, cls.pass_, {**good, name: None})
    with pytest.raises(InfeasibleSchedule, match="must be of type"):
        schedule_from_dict(cls.family, cls.pass_, {**good, name: 64.0})


def test_an_unknown_family_is_explained() -> None:
    with pytest.raises(InfeasibleSchedule, match="family is 'sm70' for the forward pass"):
        schedule_class("sm70", "forward")


@pytest.mark.parametrize("cls", CPU_CLASSES, ids=lambda c: c.__name__)
def test_what_does_not_fit_is_explained(cls: type[Schedule]) -> None:
    variant, device = Variant(cls.pass_, "float32", 64, 64), baseline()
    good = cls.default(variant, device).to_dict()
    numbers = [n for n, x in good.items() if type(x) is int]
    broken = [
        s
        for n in numbers
        for s in [schedule_from_dict(cls.family, cls.pass_, {**good, n: 4099})]
        if not s.feasible(variant, device)
    ]
    assert broken, "no decision has a limit"
    for schedule in broken:
        with pytest.raises(InfeasibleSchedule, match=f"does not fit {variant.name}"):
            schedule.require_feasible(variant, device)


def test_devices() -> None:
    assert baseline("x86-64-v3").lanes == 8
    assert baseline("x86-64-v4").lanes == 16
    assert detect().cores >= 1
    with pytest.raises(UnsupportedProblem, match="level is 'x86-64-v9'"):
        baseline("x86-64-v9")
