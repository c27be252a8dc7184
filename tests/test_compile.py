"""The cache of compiled modules: keys, races, damage, odd places, and what load refuses."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import compiled
import pytest
import torch
from python_process import run_python
from test_store import as_nobody, open_to_nobody

from fa2tvm import cache, linker, manifest, records
from fa2tvm import compile as compiler
from fa2tvm import device as devices
from fa2tvm.device import baseline, detect, features_of
from fa2tvm.errors import CompileFailed, InfeasibleSchedule, StaleModule
from fa2tvm.problem import Variant
from fa2tvm.schedule import CpuForward

VARIANT = Variant("forward", "float32", 64, 64)


@pytest.fixture(scope="module")
def built() -> Path:
    return compiled.build(VARIANT)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A module folder to damage."""
    return Path(shutil.copytree(built, tmp_path / "module"))


@pytest.fixture
def home(tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh FA2TVM_HOME in which the compiler is replaced by a copy of `built`."""
    made = tmp_path / "home"
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(made))

    def quick(*arguments: Any) -> None:
        shutil.copy(built / "module.so", arguments[-1])

    monkeypatch.setattr(compiler, "_compile", quick)
    return made


def build() -> Path:
    return compiled.build(VARIANT)


def works(folder: Path) -> bool:
    module = compiler.load(folder)
    q = torch.randn(1, 5, 2, 64)
    out, lse = torch.empty_like(q), torch.empty(1, 2, 5)
    module.function(q, q, q, out, lse, 0.125, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3)
    return torch.allclose(out, expected.transpose(1, 2), atol=1e-5)


def test_a_module_is_compiled_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", None)
    assert build() == built
    assert {p.name for p in built.iterdir()} == {"module.so", "manifest.json"}
    assert works(built)


@pytest.mark.usefixtures("home")
def test_key_covers_all_that_shapes_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J01 (triton #1323), A13: one artefact never stands in for another."""
    device = detect()
    schedule = CpuForward.default(VARIANT, device)
    folders = [compiler.build(VARIANT, schedule, device)]
    folders.append(compiler.build(dataclasses.replace(VARIANT, causal=True), schedule, device))
    other = dataclasses.replace(schedule, block_kv=2 * schedule.block_kv)
    folders.append(compiler.build(VARIANT, other, device))
    narrow = baseline("x86-64-v3")
    folders.append(compiler.build(VARIANT, CpuForward.default(VARIANT, narrow), narrow))
    monkeypatch.setattr(manifest, "program_version", lambda *_: "another source")
    folders.append(compiler.build(VARIANT, schedule, device))
    newer = records.versions() | {"apache-tvm": "9.9.9"}
    monkeypatch.setattr(manifest, "versions", lambda: newer)
    folders.append(compiler.build(VARIANT, schedule, device))
    assert len(set(folders)) == len(folders)


@pytest.mark.usefixtures("home")
def test_a_new_torch_does_not_retire_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J08 (FA #723): nothing links against torch."""
    first = build()
    newer = records.versions() | {"torch": "9.9.9"}
    monkeypatch.setattr(manifest, "versions", lambda: newer)
    assert build() == first


def damage_flip(folder: Path) -> None:
    data = bytearray((folder / "module.so").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "module.so").write_bytes(data)


def damage_truncate(folder: Path) -> None:
    os.truncate(folder / "module.so", 1000)


def damage_old(folder: Path) -> None:
    (folder / "module.so").write_bytes(b"new content with an older time")
    os.utime(folder / "module.so", (0, 0))


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def damage_remove(folder: Path) -> None:
    (folder / "manifest.json").unlink()


DAMAGES = [damage_flip, damage_truncate, damage_old, damage_manifest, damage_remove]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
@pytest.mark.usefixtures("home")
def test_damage_is_found_and_mended(damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    """BUGS J06 (FI !4490): judged by content, not by time; built again, with a message."""
    folder = build()
    damage(folder)
    with pytest.raises(StaleModule, match=r"is damaged|is no complete module"):
        compiler.load(folder)
    with caplog.at_level(logging.WARNING, logger="fa2tvm"):
        assert build() == folder
    assert "built again" in caplog.text
    assert works(folder)
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


def test_checksum_error_names_both_values(copy: Path) -> None:
    damage_flip(copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    with pytest.raises(StaleModule, match=manifest["sha256"][:16]) as refused:
        compiler.load(copy)
    assert str(refused.value).count("...") >= 2
    assert "\n" not in str(refused.value)


RACE = """
import os, shutil, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import compiled
from fa2tvm import compile as compiler
from fa2tvm.problem import Variant

def compile_slowly(*arguments):
    arguments[-1].write_bytes(b"half")
    time.sleep(0.05)
    shutil.copy({library!r}, arguments[-1])

compiler._compile = compile_slowly
variant = Variant("forward", "float32", 64, 64)
start = time.time() + 0.5
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        time.sleep(max(0.0, start - time.time()))
        compiler.load(compiled.build(variant))
        os._exit(0)
    children.append(pid)
assert all([os.waitpid(pid, 0)[1] == 0 for pid in children])
print(*(p.name for p in Path(os.environ["FA2TVM_HOME"], "cache").iterdir()))
"""


def test_eight_processes_start_on_an_empty_cache(built: Path, tmp_path: Path) -> None:
    """BUGS J02 (triton #11512): a folder is made aside and published in one rename."""
    code = RACE.format(
        tests=os.fspath(Path(__file__).parent), library=os.fspath(built / "module.so")
    )
    names = run_python(code, env={"FA2TVM_HOME": os.fspath(tmp_path)}).split()
    assert names == [built.name]


def test_left_overs_of_a_killed_process_do_not_matter(home: Path) -> None:
    """BUGS J05 (FI #972): there is no lock to wait for."""
    (home / "cache" / ".making-killed").mkdir(parents=True)
    (home / "cache" / ".making-killed" / "module.so").write_bytes(b"half")
    assert works(build())


@pytest.mark.usefixtures("home")
def test_unwritable_home_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """BUGS J03 (triton #518): modules go to a temporary folder, with one warning."""
    cache._temporary.cache_clear()
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(blocked / "home"))
    with pytest.warns(RuntimeWarning, match="set FA2TVM_HOME"):
        folder = build()
    assert works(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build() == folder
    cache._temporary.cache_clear()
    shutil.rmtree(folder.parent)


def test_read_only_home_is_a_warning(home: Path) -> None:
    """BUGS J03 (FI #2093): as above, for a folder that is there and read-only."""
    cache._temporary.cache_clear()
    (home / "cache").mkdir(parents=True, mode=0o555)
    open_to_nobody(home)

    def another_folder() -> bool:
        with pytest.warns(RuntimeWarning, match="not writable"):
            folder = cache.root()
        folder.rmdir()
        return not folder.is_relative_to(home)

    assert as_nobody(another_folder)


@pytest.mark.usefixtures("home")
def test_home_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """BUGS J04 (triton #4002): an empty variable is as good as none."""
    monkeypatch.setenv("HOME", os.fspath(tmp_path / "user"))
    monkeypatch.setenv("FA2TVM_HOME", "")
    folder = build()
    assert folder.is_relative_to(tmp_path / "user")
    monkeypatch.delenv("FA2TVM_HOME")
    assert build() == folder


@pytest.mark.usefixtures("home")
def test_no_home_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """BUGS J03 (triton #518): HOME unset and no such user."""
    monkeypatch.delenv("FA2TVM_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", os.fspath(tmp_path))
    folder = build()
    assert works(folder)
    assert folder.parent.parent == tmp_path / f"fa2tvm-{os.geteuid()}"


def test_a_cache_of_another_user_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J03 (triton #518): whoever owns the folder could put code there."""
    cache._temporary.cache_clear()
    (home / "cache").mkdir(parents=True)
    owner = (home / "cache").stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    if owner == 0:
        os.chown(home / "cache", 1234, -1)
    with pytest.warns(RuntimeWarning, match="belongs to user"):
        folder = build()
    assert not folder.is_relative_to(home)
    cache._temporary.cache_clear()
    shutil.rmtree(folder.parent)


@pytest.mark.usefixtures("home")
def test_symlinked_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """BUGS J04 (triton #4002)."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path / "link"))
    assert works(build())


def test_odd_names_really_compile_and_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J12 (cupy #7581): spaces and non-ASCII, through compiler and linker."""
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path / "é 空" / "ü"))
    assert works(build())


def test_every_linker_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C compiler will do where there is no plain linker."""
    for name, extra in linker.LINKERS:
        program = shutil.which(name)
        if program is None or name in ("ld.bfd", "gcc"):  # other names of ld and cc
            continue
        monkeypatch.setattr(linker, "find", lambda p=program, e=extra: (p, e))
        monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path / name))
        assert works(build())


WITHOUT_LINKER = """
import os, shutil
import torch, fa2tvm
from fa2tvm import linker
assert linker.find() is None
q = torch.randn(2, 70, 4, 64, requires_grad=True)
k, v = torch.randn(2, 2, 50, 2, 64).unbind()
out = fa2tvm.attention(q, k, v)
out.sum().backward()
assert not os.path.exists(os.environ["FA2TVM_HOME"] + "/cache") or not os.listdir(
    os.environ["FA2TVM_HOME"] + "/cache"
)
q64 = q.detach().double().requires_grad_()
k64, v64 = (x.double().repeat_interleave(2, 2) for x in (k, v))
p = torch.einsum("bihd,bjhd->bhij", q64, k64).div(8).softmax(-1)
expected = torch.einsum("bhij,bjhd->bihd", p, v64)
expected.sum().backward()
torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
torch.testing.assert_close(q.grad.double(), q64.grad, atol=1e-5, rtol=1e-5)
big = torch.randn(2, 600, 4, 64)
with torch.no_grad():
    many = fa2tvm.attention(big, big, big)
    torch.set_num_threads(1)
    assert many.equal(fa2tvm.attention(big, big, big))
"""


def test_without_a_linker_programs_run_in_memory(tmp_path: Path) -> None:
    """Slim containers have no binutils: calls work all the same, and leave nothing behind."""
    run_python(
        WITHOUT_LINKER, env={"PATH": os.fspath(tmp_path), "FA2TVM_HOME": os.fspath(tmp_path)}
    )


def test_no_linker_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What must be a file says what it lacks."""
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path))
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    with pytest.raises(CompileFailed, match="install binutils"):
        build()


def test_no_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J11 (TVM #18366): what is compiled still runs, and the rest says what to do."""
    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path))
    monkeypatch.setitem(sys.modules, "tvm", None)
    with pytest.raises(CompileFailed, match="install apache-tvm or load a pack"):
        build()
    assert list((tmp_path / "cache").iterdir()) == []


def test_refused_program_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fa2tvm import kernels

    def broken(*_: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setenv("FA2TVM_HOME", os.fspath(tmp_path))
    monkeypatch.setattr(kernels, "build", broken)
    with pytest.raises(CompileFailed, match=r"TVM refused forward_float32_d64 .*\(first line\)"):
        build()


@pytest.mark.usefixtures("home")
def test_infeasible_schedule_is_refused_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", None)
    schedule = dataclasses.replace(CpuForward.default(VARIANT, detect()), panel=1)
    with pytest.raises(InfeasibleSchedule):
        compiler.build(VARIANT, schedule, detect())


def edit(folder: Path, **changes: Any) -> Path:
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_other_machines_are_refused_by_name(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUGS J01 (triton #1323): never launched on a CPU that lacks an instruction."""
    manifest = json.loads((copy / "manifest.json").read_text())
    lacking = manifest["features"][0]
    flags = devices.cpu_features()
    monkeypatch.setattr(devices, "cpu_features", lambda: flags - {lacking})
    with pytest.raises(StaleModule, match=rf"{manifest['target']['mcpu']} and may use {lacking}"):
        compiler.load(copy)
    monkeypatch.undo()
    with pytest.raises(StaleModule, match=r"sparc.*but this machine is"):
        compiler.load(edit(copy, machine="sparc"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, r"format 99, but this version of fa2tvm reads \d"),
        (
            {"versions": {"apache-tvm-ffi": "7.3.1"}},
            r"apache-tvm-ffi 7\.3\.1, but 0\.1\..* is inst",
        ),
        ({"schedule": {"unknown": 1}}, "describes no program of this version"),
        ({"variant": {"pass_": "sideways"}}, "describes no program of this version"),
        ({"family": "abacus"}, "describes no program of this version"),
    ],
)
def test_other_versions_are_refused_with_both_values(
    copy: Path, change: dict[str, Any], message: str
) -> None:
    """BUGS J11 (TVM #18366)."""
    with pytest.raises(StaleModule, match=message):
        compiler.load(edit(copy, **change))


@pytest.mark.parametrize("which", [".", "module.so"])
def test_folders_that_others_may_write_are_not_trusted(copy: Path, which: str) -> None:
    (copy / which).chmod(0o777)
    with pytest.raises(StaleModule, match=r"mode 777.*trust=True"):
        compiler.load(copy)
    assert compiler.load(copy, trust=True).variant == VARIANT


def test_a_module_links_against_nothing(built: Path) -> None:
    """BUGS J07 (TVM #18316), J08: no LLVM, no TVM, no torch, no libm to be found at load."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not installed")
    listing = [readelf, "--dynamic", "--dyn-syms", "--wide", os.fspath(built / "module.so")]
    text = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    assert "(NEEDED)" not in text
    symbols = [line.split() for line in text.splitlines() if " UND " in line]
    undefined = {words[7].split("@")[0] for words in symbols if len(words) > 7}
    undefined = {name for name in undefined if not name.startswith("TVMFFI")}
    assert undefined <= {"aligned_alloc", "free", "__tls_get_addr", "memset", "memcpy"}


def test_code_uses_no_feature_that_its_device_does_not_name() -> None:
    """What LLVM knows of a CPU is in our table, so that a manifest names all it may need."""
    from tvm.target import Target
    from tvm_ffi import get_global_func

    ours = {"bmi": "bmi1", "lzcnt": "abm", "avx512bf16": "avx512_bf16", "avxvnni": "avx_vnni"}
    ours |= {f"avx512{x}": f"avx512_{x}" for x in ("vnni", "bitalg", "vbmi2", "vpopcntdq", "fp16")}
    chosen_by_llvm = {
        "avx",
        "avx2",
        "bmi",
        "bmi2",
        "f16c",
        "fma",
        "lzcnt",
        "movbe",
        "sse4a",
        "gfni",
    }
    for name in [*devices._BEYOND_LEVEL, *devices.X86_64_LEVELS]:
        features = get_global_func("target.llvm_get_cpu_features")(
            Target({"kind": "llvm", "mcpu": name})
        )
        needed = {
            str(f)
            for f in features
            if str(f) in chosen_by_llvm or str(f).startswith(("avx512", "avxvnni"))
        }
        missing = {ours.get(f, f) for f in needed} - features_of(name)
        assert missing <= {"avx512vp2intersect"}, name


def test_hidden_features_lower_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual machine that names a Zen 4 but shows no AVX-512 gets code for AVX2."""
    zen4 = {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "17"}

    def seen(flags: frozenset[str]) -> devices.Device:
        info = zen4 | {"flags": " ".join(flags)}
        monkeypatch.setattr(devices, "_cpuinfo", lambda: info)
        return devices.detect.__wrapped__()

    whole = seen(features_of("znver4"))
    assert (whole.arch, whole.level, whole.lanes) == ("znver4", "x86-64-v4", 16)
    no_bf16 = seen(features_of("znver4") - {"avx512_bf16"})
    assert (no_bf16.arch, no_bf16.slug) == ("x86-64-v4", "cpu_x86_64_v4")
    plain = seen(features_of("znver3"))
    assert (plain.arch, plain.level, plain.lanes) == ("x86-64-v3", "x86-64-v3", 8)
    old = seen(frozenset({"sse2"}))
    assert (old.arch, old.features, old.lanes) == ("generic", (), 4)
