"""The replay file that a recipe names (replay.import_file), as an additional source. It is imported if it is new or
changed, and removed if the recipe does not name it, so that the recipe alone determines the training data."""

import shutil
from pathlib import Path

from osworld_pipeline.datasets.importers import ImportOptions
from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
from osworld_pipeline.datasets.imports import find_imports
from osworld_pipeline.domain.digest import digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

NAME = "recipe_replay"
"""Name of the import."""
LICENCE = "unknown: named by the recipe"


def sync_replay_import(state: StateDir, import_file: str | None) -> bool:
    """Returns whether anything was imported.

    Raises:
        DatasetError: there is no such file, or another import is running.
        StoreError: the file system refused.
    """
    if import_file is None:
        shutil.rmtree(state.imports / NAME, ignore_errors=True)
        return False
    path = Path(import_file).expanduser().resolve()
    try:
        status = path.stat()
    except OSError as error:
        raise DatasetError(
            f"replay.import_file (OSWORLD_REPLAY_BUFFER) names {path}, which cannot be read: {error.strerror}"
        ) from error
    # Compares size and modification time: hashing a large file on each check would take minutes.
    revision = digest_json({"path": str(path), "bytes": status.st_size, "changed": status.st_mtime_ns})[:12]
    known, _ = find_imports(state.imports)
    if any(one.folder.name == NAME and one.manifest.revision == revision for one in known):
        return False
    import_slime_replay(state, path, ImportOptions(name=NAME, licence=LICENCE, revision=revision))
    return True
