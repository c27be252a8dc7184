"""Parsers of what is stored: whatever the bytes are, the answer is a value or one of our errors.

`pytest tests/test_fuzz.py --fuzz 30000` is the long form: so many inputs for each of the parsers.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_pack import FORWARD, entry
from test_records import a_problem, a_record
from test_store import a_trial

from fa2tvm import compile as compiler
from fa2tvm import manifest
from fa2tvm.device import baseline
from fa2tvm.errors import CorruptRecord, Fa2tvmError, InfeasibleSchedule, StaleModule
from fa2tvm.lookup import lookup
from fa2tvm.pack import export_pack, load_pack
from fa2tvm.records import Record
from fa2tvm.tune.database import Trial

HERE = baseline("x86-64-v3")
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, -1, 1 << 31, 1 << 63, 10**400, "", ".", "..", "../x", "forward", "cpu"])
    | st.floats()
    | st.text(max_size=20)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def spoiled(draw: st.DrawFn, row: dict[str, Any]) -> bytes:
    """JSON of a good row after some changes of its values, keys or bytes."""
    row = json.loads(json.dumps(row))
    for _ in range(draw(st.integers(0, 3))):
        spot = row
        while True:
            name = draw(st.sampled_from(sorted(spot))) if spot else "new"
            if not isinstance(spot.get(name), dict) or draw(st.booleans()):
                break
            spot = spot[name]
        what = draw(st.sampled_from(("change", "change", "remove", "add")))
        if what == "remove":
            spot.pop(name, None)
        else:
            spot[name if what == "change" else draw(st.text(max_size=8))] = draw(VALUES)
    data = bytearray(json.dumps(row).encode())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        piece = draw(st.binary(max_size=4))
        data[at : at + draw(st.integers(0, 40))] = piece
    return bytes(data)


def inputs_like(row: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Mostly spoiled rows; some JSON of anything, some noise."""
    anything = VALUES.map(lambda value: json.dumps(value).encode())
    return st.one_of(spoiled(row), spoiled(row), spoiled(row), anything, st.binary(max_size=60))


@pytest.fixture
def fuzz(request: pytest.FixtureRequest) -> Callable[[st.SearchStrategy[bytes], Any], None]:
    """Run a check on many inputs."""
    n = request.config.getoption("--fuzz")

    def run(inputs: st.SearchStrategy[bytes], check: Callable[[bytes], None]) -> None:
        quick = settings(
            max_examples=n,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        quick(given(inputs)(lambda data: check(data)))()

    return run


def outcome(call: Callable[[], Any], refusal: type[Fa2tvmError]) -> Any:
    """What a call gives, or the sentence of the one error that it may raise."""
    try:
        return call()
    except refusal as error:
        return str(error)


def test_records(fuzz: Any) -> None:
    """And what a record that parses says is looked up, or passed over, without an error."""
    problem = a_problem()

    def check(data: bytes) -> None:
        record = outcome(lambda: Record.from_line(data, "here:1"), CorruptRecord)
        if isinstance(record, str):
            assert record.startswith("here:1 is no tuned record")
            return
        again = Record.from_line(record.to_line(), "here:2")
        assert again.place == record.place
        found = lookup(problem, HERE, stored=(("user overlay", Path("x"), (record,)),))
        assert found.schedule.feasible(problem.variant, HERE)
        outcome(record.schedule, InfeasibleSchedule)

    fuzz(inputs_like(json.loads(a_record(problem).to_line())), check)


def test_trials(fuzz: Any) -> None:
    row = json.loads(Trial(trial=3, **a_trial(3)).to_line())

    def check(data: bytes) -> None:
        trial = outcome(lambda: Trial.from_line(data, "here:1"), CorruptRecord)
        if isinstance(trial, str):
            assert trial.startswith("here:1 is no trial")
            return
        assert Trial.from_line(trial.to_line(), "here:2").trial == trial.trial

    fuzz(inputs_like(row), check)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_pack([entry(FORWARD)], tmp_path_factory.mktemp("fuzz") / "pack")


def test_manifests(fuzz: Any, pack: Path, tmp_path: Path) -> None:
    """Also those whose checksums are right: whoever wrote them can compute a checksum."""
    module = next(path for path in pack.iterdir() if path.is_dir())
    folder = Path(shutil.copytree(module, tmp_path / "module"))
    row = json.loads((module / manifest.MANIFEST).read_text())

    def check(data: bytes) -> None:
        (folder / manifest.MANIFEST).write_bytes(data)
        loaded = outcome(lambda: compiler.load(folder), StaleModule)
        if isinstance(loaded, str):
            assert str(folder) in loaded
        else:
            assert loaded.variant.pass_ == "forward"

    fuzz(inputs_like(row), check)


def test_packs(fuzz: Any, pack: Path, tmp_path: Path) -> None:
    """The list of a pack names nothing outside of it, whatever it says."""
    folder = Path(shutil.copytree(pack, tmp_path / "pack"))
    module = next(path.name for path in pack.iterdir() if path.is_dir())
    shutil.copytree(folder / module, tmp_path / module)
    row = json.loads((pack / "pack.json").read_text())
    flat = {"format": 1, "modules": {}, **row["modules"][0]}

    def check(data: bytes) -> None:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and found.get("modules") == {}:
            names = ("module", "length_class", "manifest_sha256")
            found["modules"] = [{name: found[name] for name in names if name in found}]
            data = json.dumps(found).encode()
        (folder / "pack.json").write_bytes(data)
        loaded = outcome(lambda: load_pack(folder), StaleModule)
        if isinstance(loaded, str):
            assert str(folder) in loaded
        else:
            assert all(one.variant == FORWARD for one in loaded)

    fuzz(inputs_like(row) | inputs_like(flat), check)


def test_any_bytes_are_no_library(fuzz: Any, pack: Path) -> None:
    """What is no shared library is refused by the loader in one sentence.

    Hypothesis knows b"\\x7fELF" from other tests. What begins so and has its checksum is code, and
    the loader trusts code: made-up headers crash it. test_trust.py has those that were cut.
    """
    module = next(path for path in pack.iterdir() if path.is_dir())
    row = json.loads((module / manifest.MANIFEST).read_text())

    def check(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / manifest.LIBRARY
            library.write_bytes(data)
            row["sha256"] = manifest.sha256_of(library)
            (Path(folder) / manifest.MANIFEST).write_text(json.dumps(row))
            with pytest.raises(Fa2tvmError, match="holds no forward pass") as refused:
                compiler.load(folder)
            assert "\n" not in str(refused.value)

    fuzz(st.binary(max_size=200).filter(lambda data: not data.startswith(b"\x7fELF")), check)
