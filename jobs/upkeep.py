"""Maintenance of the store that makes no asset: removal of unreferenced files."""

from dataclasses import asdict

import dagster as dg

from osworld_pipeline.object_store import read_note
from osworld_pipeline.remote.garbage import collect_remote_garbage
from osworld_pipeline.runs.upkeep import upkeep
from resources.state import StateResource


@dg.op(pool="upkeep")
def remove_garbage(context: dg.OpExecutionContext, state: StateResource) -> None:
    """Removes images and superseded files that no row refers to, after a grace period, here and on the object store of
    the state; safe with concurrent writers."""
    folder = state.dir()
    context.log.info("removed: %s", asdict(upkeep.collect_garbage(folder)))
    note = read_note(folder.root)
    if note is not None and note.role == "origin":
        context.log.info("removed from %s: %s", note.url, asdict(collect_remote_garbage(folder, note.url)))


@dg.job(
    description="Removes images and superseded files that no row of the store or the tables refers to.",
)
def collect_garbage() -> None:
    remove_garbage()
