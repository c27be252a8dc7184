"""Packs: modules in one folder, compiled here and loaded on machines without the compiler."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fa2tvm import cache, manifest
from fa2tvm.compile import Module, build, load_verified
from fa2tvm.device import Device
from fa2tvm.errors import StaleModule, UnsupportedProblem, shown
from fa2tvm.files import storing
from fa2tvm.problem import LENGTH_CLASSES, Variant
from fa2tvm.schedule import Schedule
from fa2tvm.trust import require_private

_PACK = "pack.json"
# A pack that is replaced while it is loaded is loaded anew, so often.
_MOST_REPLACEMENTS = 8


@dataclass(frozen=True)
class PackEntry:
    """One module of a pack: what to compile, and the length class that it is for (None: all)."""

    variant: Variant
    schedule: Schedule
    device: Device
    length_class: str | None = None


def export_pack(entries: Iterable[PackEntry], dest: str | os.PathLike[str]) -> Path:
    """Compile entries into one folder that `load_pack` loads on machines without the compiler.

    Returns
    -------
    Path
        `dest`; a pack that was there is replaced in one rename.

    Raises
    ------
    UnsupportedProblem
        Where `dest` exists and is no pack, or there are no entries.
    CompileFailed, InfeasibleSchedule
        As `build` does.
    StoreUnavailable
        Where `dest` cannot be written.
    """
    entries = list(entries)
    for entry in entries:
        _require_entry(entry)
    target = Path(dest)
    is_free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    if not is_free and not (target / _PACK).exists():
        raise UnsupportedProblem(
            f"dest is {os.fspath(target)!r}, but it holds something that is no pack; "
            "choose another folder."
        )
    listed: list[dict[str, Any]] = []
    with storing(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with cache.staging(target.absolute().parent) as staged:
            for entry in entries:
                built = build(entry.variant, entry.schedule, entry.device)
                if not (staged / built.name).exists():
                    shutil.copytree(built, staged / built.name)
                listed.append(
                    {
                        "module": built.name,
                        "length_class": entry.length_class,
                        "manifest_sha256": manifest.sha256_of(built / manifest.MANIFEST),
                    }
                )
            if not listed:
                raise UnsupportedProblem("entries is empty, but a pack holds at least one module.")
            pack = {"format": manifest.FORMAT, "modules": listed}
            (staged / _PACK).write_text(json.dumps(pack, indent=1) + "\n", encoding="utf-8")
            cache.replace(staged, target)
    return target


def _require_entry(entry: PackEntry) -> None:
    if not isinstance(entry, PackEntry):
        raise UnsupportedProblem(f"an entry is {shown(entry)}, but it must be a PackEntry.")
    kinds = {"variant": Variant, "schedule": Schedule, "device": Device}
    for name, kind in kinds.items():
        if not isinstance(getattr(entry, name), kind):
            raise UnsupportedProblem(
                f"{name} of an entry is {shown(getattr(entry, name))}, but it must be a "
                f"{kind.__name__}; make one."
            )
    if entry.schedule.pass_ != entry.variant.pass_:
        raise UnsupportedProblem(
            f"schedule of an entry is for the {entry.schedule.pass_} pass, but variant is "
            f"{entry.variant.name}; give both for one pass."
        )
    if entry.length_class not in (None, *LENGTH_CLASSES):
        raise UnsupportedProblem(
            f"length_class of an entry is {shown(entry.length_class)}, but only "
            f"{', '.join(LENGTH_CLASSES)} and None exist; choose one."
        )


def load_pack(path: str | os.PathLike[str], *, trust: bool = False) -> list[Module]:
    """Load a pack's modules that this CPU can run, those that use most of its features first.

    Parameters
    ----------
    trust
        Load it although other users of this machine may write to it.

    Raises
    ------
    StaleModule
        Where anything is damaged, of another version, or may be changed by others, or where none
        of the modules of a variant fits this CPU.
    """
    folder = Path(path)
    for _ in range(_MOST_REPLACEMENTS):
        before = _identity(folder)
        try:
            return _load_modules(folder, trust)
        except StaleModule:
            # Another export may have put a new pack there after the old list was read.
            if _identity(folder) == before:
                raise
    return _load_modules(folder, trust)


def _identity(folder: Path) -> tuple[int, int, int] | None:
    try:
        found = folder.stat()
    except (OSError, ValueError):  # a name that no file system takes
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _load_modules(folder: Path, trust: bool) -> list[Module]:
    modules: list[Module] = []
    missing: dict[str, StaleModule] = {}
    rows = _pack_rows(folder, trust)
    if not trust:
        require_private(folder, folder / _PACK)
    for row in rows:
        place = folder / row["module"]
        found = manifest.verified(place, row["manifest_sha256"], trust=trust)
        try:
            manifest.require_features(place, found.manifest)
        except StaleModule as error:
            missing.setdefault(json.dumps(found.manifest["variant"]), error)
            continue
        loaded = load_verified(place, found, trust=trust)
        modules.append(replace(loaded, length_class=row["length_class"]))
    present = {json.dumps(module.manifest["variant"]) for module in modules}
    for variant, reason in missing.items():
        if variant not in present:
            raise reason
    return sorted(modules, key=lambda module: -len(module.manifest["features"]))


def _pack_rows(folder: Path, trust: bool) -> list[dict[str, Any]]:
    """The rows of pack.json, each naming a folder directly inside the pack."""
    _, pack = manifest.read_object(folder / _PACK, "pack", trust=trust)
    rows = pack.get("modules")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise StaleModule(f"{folder / _PACK} lists no modules; export it again.")
    for row in rows:
        for name in ("module", "manifest_sha256"):
            if not isinstance(row.get(name), str):
                raise StaleModule(
                    f"{folder / _PACK} has {name} {shown(row.get(name))}, but it must be a string; "
                    "export it again."
                )
        if row.get("length_class") not in (None, *LENGTH_CLASSES):
            raise StaleModule(
                f"{folder / _PACK} has length_class {shown(row.get('length_class'))}, but only "
                f"{', '.join(LENGTH_CLASSES)} and null exist; export it again."
            )
        name = row["module"]
        if not _lies_in(folder, name):
            raise StaleModule(
                f"{folder / _PACK} names {shown(name)}, but a module lies directly in its pack; "
                "export it again."
            )
    return [{"length_class": None, **row} for row in rows]


def _lies_in(folder: Path, name: str) -> bool:
    """Whether a name is that of something directly in a folder, and no link to elsewhere."""
    if Path(name).name != name or name in ("", ".", ".."):
        return False
    try:
        return not (folder / name).is_symlink()
    except (OSError, ValueError):  # a name that no file system takes
        return False
