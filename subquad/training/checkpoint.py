"""Checkpoints that are whole or not there: written aside, synced to disk, listed in a manifest, then renamed.

A checkpoint is a folder `checkpoint-<step>` with a `manifest.json`: format version, step, settings, and the size and
SHA-256 of every file. A folder without a valid manifest is never resumed from. Plain Python: no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from subquad.config import differences
from subquad.parsing import check_keys, read_json
from subquad.training.errors import CheckpointError, FormatVersionError

logger = logging.getLogger(__name__)

FORMAT = "subquad-checkpoint"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REQUIRED = ("model", "optimizer", "scheduler", "rng_state", "trainer_state")
"""Every checkpoint holds at least one file or folder whose name begins so; that of LoRA has an adapter_model."""
_ASIDE, _TRASH = ".saving-", ".trash-"


def name_of(step: int) -> str:
    """The folder's name of the checkpoint after `step` steps."""
    return f"checkpoint-{step}"


def aside(root: Path, step: int) -> Path:
    """The folder in which the checkpoint of `step` is written before it is published."""
    return root / f"{_ASIDE}{name_of(step)}"


def listing(root: Path) -> list[tuple[int, Path]]:
    """Steps and folders of all published checkpoints, complete or not, the oldest first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def publish(folder: Path, target: Path, *, step: int, settings: Mapping[str, Any]) -> None:
    """Seal `folder` with a manifest and rename it to `target`, which then is complete, also after a power cut.

    Raises `CheckpointError` where one of the required parts is missing: nothing is published then.
    """
    share(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    for part in REQUIRED:
        if not any(name.removeprefix("adapter_").startswith(part) for name in names):
            raise CheckpointError(f"{folder} holds no {part} file; a checkpoint needs {', '.join(REQUIRED)}")
    manifest = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "step": step,
        "settings": dict(settings),
        "files": {
            name: {"bytes": path.stat().st_size, "sha256": _sync_and_hash(path)}
            for name, path in zip(names, files, strict=True)
        },
    }
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        _sync_folder(path)
    replace_folder(folder, target)


def share(folder: Path) -> None:
    """Give the files in `folder` the permissions of any new file: safetensors lets nobody but the owner read."""
    probe = folder / ".mode"
    probe.touch()  # 0o666 less the umask, which can't be asked for without changing it
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def replace_folder(source: Path, target: Path) -> None:
    """Rename `source` to `target`; a folder that stands there is moved out of the way first."""
    trash = target.with_name(f"{_TRASH}{target.name}")
    if target.exists():
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(target, trash)
    os.replace(source, target)
    _sync_folder(target.parent)
    shutil.rmtree(trash, ignore_errors=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, whole."""
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    _sync_folder(path.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; `CheckpointError` where there is none that can be read.

    Another format version is a `FormatVersionError`, which names it.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is incomplete or not a checkpoint of subquad") from error
    except ValueError as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest of the format {FORMAT!r}")
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
        if "processes" in settings:
            check_keys(settings, {"processes": int}, where)
        for name, entry in manifest["files"].items():
            check_keys(entry, {"bytes": int, "sha256": str}, f"{where}, {name}")
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is there and unchanged; else `CheckpointError` with the reason."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks its file {name}")
        if path.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, its manifest says {entry['bytes']}")
        if _hash(path) != entry["sha256"]:
            raise CheckpointError(f"{path} does not match its checksum")
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    if more := sorted(there - manifest["files"].keys() - {MANIFEST}):
        raise CheckpointError(f"{folder} holds files that its manifest does not list: {', '.join(more)}")
    return manifest


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint that is complete, or None where no checkpoint was ever published.

    Logs what it skips and why. Raises `FormatVersionError` where a newer one has another format version, and
    `CheckpointError` where there are checkpoints but none is complete.
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
    """Delete all but the `keep` newest complete checkpoints and the best; damaged ones don't count as kept."""
    kept = 0
    for step, folder in reversed(listing(root)):
        if kept < keep:
            kept += _looks_complete(folder)
        elif step != best_step:
            trash = folder.with_name(f"{_TRASH}{folder.name}")
            os.replace(folder, trash)
            shutil.rmtree(trash)


def sweep(root: Path) -> None:
    """Delete what an interrupted save or rotation left behind."""
    for path in root.glob(f"{_ASIDE}*") if root.is_dir() else ():
        logger.warning("deleted %s: its save was interrupted", path.name)
        shutil.rmtree(path)
    for path in root.glob(f"{_TRASH}*") if root.is_dir() else ():
        target = root / path.name.removeprefix(_TRASH)
        if not target.exists() and _looks_complete(path):  # its successor never came
            os.replace(path, target)
        else:
            shutil.rmtree(path)


def check_settings(manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` where the run that goes on differs from the one that made the checkpoint.

    The number of processes, their batch size and the accumulation may differ where their product is the same: each step
    then sees the same windows.
    """
    made, now = dict(manifest["settings"]), dict(settings)
    changed = _changed_batch(made, now) + differences(made, now)
    if changed:
        raise CheckpointError(
            f"the checkpoint of step {manifest['step']} was made by other settings: {'; '.join(changed)}; "
            "restore them or choose another run.folder"
        )


def _changed_batch(made: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Take `batch` and `processes` out of both settings; what is wrong with them, and what would be right."""
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
        return [f"{text}, which {processes} processes can't make: start {counts}"]
    size = max(part for part in range(1, each + 1) if each % part == 0 and part <= batch["size"])
    return [f"{text}: with {processes} processes give batch.size={size} and batch.accumulation={each // size}"]


def _looks_complete(folder: Path) -> bool:
    """Whether the manifest can be read and every file has its size (checksums are for resuming)."""
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError:
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == files[name]["bytes"] for name in files)


def _sync_and_hash(path: Path) -> str:
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    if os.name == "nt":
        return  # Windows can't sync a folder; its renames are journaled
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
