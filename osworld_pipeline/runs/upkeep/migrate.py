"""Brings a state of an older version into the formats of this one."""

from dataclasses import dataclass

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.object_store.note import is_cache
from osworld_pipeline.progress import OnProgress, begin
from osworld_pipeline.store.migration import PartsPlan, migrate_parts, plan_parts
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.catalog_format import is_of_this_version


@dataclass(frozen=True, kw_only=True)
class Migration:
    """What a state has, and what changes or has changed."""

    parts: PartsPlan
    is_catalog_due: bool
    """Another version built the catalog: its tables or views are not those of this one."""

    @property
    def is_due(self) -> bool:
        return self.parts.is_due or self.is_catalog_due


def plan_migration(state: StateDir, on_progress: OnProgress | None = None) -> Migration:
    """Changes nothing.

    Raises:
        StoreError: a file is damaged, a newer version wrote the state, or the folder is a cache.
        TableError: the catalog cannot be read.
    """
    _need_original(state)
    return Migration(parts=plan_parts(state.trajectories, on_progress), is_catalog_due=_is_catalog_due(state))


def migrate_state(state: StateDir, on_progress: OnProgress | None = None) -> Migration:
    """Rewrites old parts, then the catalog; safe during writes and reads of this version. After a kill, call it again.
    Nothing is written if nothing is due.

    Raises:
        StoreError: as plan_migration, other upkeep runs, or the file system refused.
        TableError: the catalog cannot be read or built.
    """
    _need_original(state)
    change = migrate_parts if state.trajectories.is_dir() else plan_parts
    parts = change(state.trajectories, on_progress)
    is_catalog_due = _is_catalog_due(state)
    if is_catalog_due or (parts.num_old and state.catalog.is_file()):
        begin(on_progress, "building the catalog")
        rebuild_catalog(state)
    return Migration(parts=parts, is_catalog_due=is_catalog_due)


def _is_catalog_due(state: StateDir) -> bool:
    return state.catalog.is_file() and not is_of_this_version(state)


def _need_original(state: StateDir) -> None:
    if is_cache(state.root):
        raise StoreError(f"{state.root} is a cache: migrate the original state, and pull again")
