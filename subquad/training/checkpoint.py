"""Crash-safe checkpoint folders: written under a temporary name, synced to disk, listed in a manifest, then renamed.

A checkpoint is a folder `checkpoint-<step>` with a `manifest.json`: format version, step, settings, and the size and
SHA-256 of every file. A folder without a valid manifest is never resumed from.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad import disk
from subquad.checksums import FORMAT, MANIFEST
from subquad.config import differences
from subquad.data.corpus import FILES
from subquad.parsing import check_keys, read_json
from subquad.training.errors import CheckpointError, FormatVersionError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
REQUIRED = ("model", "optimizer", "scheduler", "rng_state", "trainer_state")
"""Prefixes of the files that every checkpoint holds; a LoRA checkpoint has `adapter_model` instead of `model`."""
_ASIDE, _TRASH = ".saving-", ".trash-"


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint after `step` steps."""
    return f"checkpoint-{step}"


def aside(root: Path, step: int) -> Path:
    """Return the temporary folder in which the checkpoint of `step` is written before `publish` renames it."""
    return root / f"{_ASIDE}{name_of(step)}"


def listing(root: Path) -> list[tuple[int, Path]]:
    """Return the step and folder of each published checkpoint in `root`, complete or not, oldest first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def publish(folder: Path, target: Path, *, step: int, settings: Mapping[str, Any]) -> None:
    """Write the manifest of `folder`, sync it to disk and rename it to `target`, which then survives a power cut.

    Raises `CheckpointError` and publishes nothing if a required file is missing.
    """
    share(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    for part in REQUIRED:
        if not any(name.removeprefix("adapter_").startswith(part) for name in names):
            raise CheckpointError(f"{folder} has no {part} file; a checkpoint needs {', '.join(REQUIRED)}")
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "settings": dict(settings),
        "files": {
            name: {"bytes": path.stat().st_size, "sha256": disk.sha256_of(path)}
            for name, path in zip(names, files, strict=True)
        },
    }
    disk.write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        disk.sync(path)
    replace_folder(folder, target)


def share(folder: Path) -> None:
    """Give the files in `folder` the permissions of a new file: safetensors makes them readable by the owner only."""
    probe = folder / ".mode"
    probe.touch()  # its mode is 0o666 & ~umask; reading the umask itself would mean changing it
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing an existing folder."""
    # The old folder is deleted only after the new one has its name: until then `sweep` can restore it after a crash.
    trash = target.with_name(f"{_TRASH}{target.name}")
    if target.exists():
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(target, trash)
    os.replace(source, target)
    disk.sync(target.parent)
    shutil.rmtree(trash, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`. Raises `CheckpointError`; `FormatVersionError` for another format version."""
    try:
        manifest = read_json(folder / MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is incomplete or not a subquad checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of format {FORMAT!r}")
    if manifest.get("version") != FORMAT_VERSION:
        raise FormatVersionError(
            f"{folder} has checkpoint format version {manifest.get('version')}; "
            f"this release reads version {FORMAT_VERSION}"
        )
    try:
        where = str(folder / MANIFEST)
        check_keys(manifest, {"step": int, "settings": dict, "files": dict}, where)
        if "batch" in (settings := manifest["settings"]):
            check_keys(settings["batch"], {"length": int, "size": int, "accumulation": int}, where)
        optional = {"processes": int, FILES: dict}
        check_keys(settings, {name: kind for name, kind in optional.items() if name in settings}, where)
        for name, entry in manifest["files"].items():
            check_keys(entry, {"bytes": int, "sha256": str}, f"{where}, {name}")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder` after checking every file's size and checksum; else raise `CheckpointError`."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks the file {name}")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}")
        if disk.sha256_of(path) != entry["sha256"]:
            raise CheckpointError(f"{path} does not match its checksum")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if more := sorted(there - manifest["files"].keys() - {MANIFEST}):
        raise CheckpointError(f"{folder} has files that its manifest does not list: {', '.join(more)}")
    return manifest


def newest_complete(root: Path) -> Path | None:
    """Return the newest complete checkpoint in `root`, or None if no checkpoint was ever published.

    Logs each damaged checkpoint that it skips. Raises `FormatVersionError` if a newer checkpoint has another format
    version, and `CheckpointError` if there are checkpoints but none is complete.
    """
    skipped: list[str] = []
    for _, folder in reversed(listing(root)):
        try:
            verify(folder)
        except FormatVersionError:
            raise
        except CheckpointError as error:
            logger.warning("skipped %s: %s", folder.name, error)
            skipped.append(str(error))
        else:
            return folder
    if skipped:
        raise CheckpointError(f"no checkpoint in {root} is complete: {'; '.join(skipped)}")
    return None


def rotate(root: Path, *, keep: int, best_step: int | None) -> None:
    """Delete all but the `keep` newest complete checkpoints and the best one; damaged ones don't count."""
    kept = 0
    for step, folder in reversed(listing(root)):
        if kept < keep:
            kept += _looks_complete(folder)
        elif step != best_step:
            trash = folder.with_name(f"{_TRASH}{folder.name}")
            os.replace(folder, trash)
            shutil.rmtree(trash)


def sweep(root: Path) -> None:
    """Clean up after an interrupted save or rotation."""
    for path in root.glob(f"{_ASIDE}*") if root.is_dir() else ():
        logger.warning("deleted %s: the save was interrupted", path.name)
        shutil.rmtree(path)
    for path in root.glob(f"{_TRASH}*") if root.is_dir() else ():
        target = root / path.name.removeprefix(_TRASH)
        if not target.exists() and _looks_complete(path):  # crashed between the two renames of `replace_folder`
            os.replace(path, target)
        else:
            shutil.rmtree(path)


def check_settings(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the run's `settings` differ from those in the checkpoint's `manifest`.

    Processes, batch.size and batch.accumulation may differ if a step sees as many windows: then it sees the same ones.
    """
    made, now = dict(manifest["settings"]), dict(settings)
    changed = _changed_text(made, now) + _changed_batch(made, now) + differences(made, now)
    if changed:
        raise CheckpointError(
            f"the checkpoint of step {manifest['step']} was made with other settings: {'; '.join(changed)}; "
            "restore them or choose another run.folder"
        )


def _changed_text(made: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Remove the text's files from both settings; return what happened to which, and then remove the digests too.

    Without files on both sides (a dataset) or among the same files (another part is
    held out) the digests stay and show the change.
    """
    before, after = (settings.pop(FILES, None) for settings in (made, now))
    if before is None or after is None or before == after or made.get("data") == now.get("data"):
        return []
    for settings in (made, now):
        for name in ("data", "tokenizer"):  # a tokenizer that was trained on the text changes with it
            settings.pop(name, None)
    both = before.keys() & after.keys()
    kinds = {
        "removed": before.keys() - both,
        "added": after.keys() - both,
        "changed": {name for name in both if before[name] != after[name]},
    }
    return [f"text {kind}: {_some(sorted(names))}" for kind, names in kinds.items() if names]


def _some(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _changed_batch(made: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Remove `batch` and `processes` from both settings; return error texts, with valid values, for differences."""
    before, after = (({**settings.pop("batch", {})}, int(settings.pop("processes", 1))) for settings in (made, now))
    if before[0].get("length") != after[0].get("length"):
        return [f"batch.length was {before[0].get('length')}, is {after[0].get('length')}"]
    products = [processes * batch.get("size", 1) * batch.get("accumulation", 1) for batch, processes in (before, after)]
    if products[0] == products[1]:
        return []
    (was, were), (batch, processes) = before, after
    text = (
        f"a step had {products[0]} windows (processes {were} x batch.size {was['size']} x batch.accumulation "
        f"{was['accumulation']}), has {products[1]} ({processes} x {batch['size']} x {batch['accumulation']})"
    )
    each, rest = divmod(products[0], processes)
    if rest:
        fit = [str(count) for count in range(1, products[0] + 1) if products[0] % count == 0]
        counts = " or ".join(", ".join(fit).rsplit(", ", 1))
        return [f"{text}; {processes} processes can't share {products[0]} windows equally: start {counts}"]
    size = max(part for part in range(1, each + 1) if each % part == 0 and part <= batch["size"])
    return [f"{text}; for {processes} processes set batch.size={size} and batch.accumulation={each // size}"]


def _looks_complete(folder: Path) -> bool:
    """Return whether the manifest is readable and all files have their sizes; checksums are left to `verify`."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)
