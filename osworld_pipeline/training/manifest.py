"""manifest.json: where a checkpoint comes from, and the SHA-256 of every file in it, held against them on load."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.agent.adapters import BASE_FILE
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.errors import StoreError

MANIFEST_FILE = "manifest.json"
FORMAT = 1
NOT_LISTED = (MANIFEST_FILE, BASE_FILE)
"""Where the base of an adapter lies may be corrected; that it is the base its own digest says."""


def build_manifest(folder: Path, trainer_state: Mapping[str, Any]) -> dict[str, Any]:
    """Of the files that are in `folder` now. `trainer_state`: a TrainerState as a mapping; may be empty."""
    return {
        "format": FORMAT,
        "checkpoint_id": trainer_state.get("checkpoint_id"),
        "parent_id": trainer_state.get("parent_id"),
        "num_updates": trainer_state.get("num_updates"),
        "recipe": trainer_state.get("recipe"),
        "recipe_digest": digest_json(trainer_state.get("recipe")),
        "data_digest": trainer_state.get("data_digest"),
        "code_version": trainer_state.get("code_version") or None,
        "files": {
            str(path.relative_to(folder)): {"sha256": _digest(path), "num_bytes": path.stat().st_size}
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in NOT_LISTED
        },
    }


def verify_checkpoint(folder: Path, *, is_required: bool = False) -> None:
    """A folder without a manifest (a published model) passes, unless one is required.

    Raises:
        StoreError: a file is missing or not what was written; names it.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file() and not is_required:
        return
    try:
        files = json.loads(path.read_text())["files"]
        wanted = {name: (str(entry["sha256"]), int(entry["num_bytes"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} cannot be read ({error}): {_way_out(folder)}") from error
    for name, (sha256, num_bytes) in wanted.items():
        file = folder / name
        if not file.is_file():
            raise StoreError(f"{file} is missing: {_way_out(folder)}")
        if file.stat().st_size != num_bytes or _digest(file) != sha256:
            raise StoreError(f"{file} is damaged, its SHA-256 is not the manifest's: {_way_out(folder)}")


def _way_out(folder: Path) -> str:
    return f"remove {folder} and run the stage again"


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
