"""`migrate`: a state of an older version in the formats of this one."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, existing_state, writable_state
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from osworld_pipeline.runs.upkeep.migrate import Migration


def register(app: typer.Typer) -> None:
    app.command()(migrate)


def migrate(
    state: StateOption = Path("var"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report the formats and what would change.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a state of an older version in the formats of this one. Safe during training and queries; after a kill,
    run it again."""
    from osworld_pipeline.runs.upkeep.migrate import migrate_state, plan_migration

    folder = existing_state(state) if dry_run else writable_state(state)
    with shown_progress("migrate", as_json=as_json) as on_progress:
        found = (plan_migration if dry_run else migrate_state)(folder, on_progress)
    if as_json:
        print_json({**asdict(found), "is_due": found.is_due, "is_dry_run": dry_run})
        return
    for line in (*_formats(found), *_changes(found, dry_run)):
        print(line)


def _formats(found: "Migration") -> Iterator[str]:
    yield f"the trajectories are of format {found.parts.format}"
    for table, versions in found.parts.versions.items():
        counts = ", ".join(f"{count} of schema version {version}" for version, count in sorted(versions.items()))
        if counts:
            yield f"  {table}: {counts}"


def _changes(found: "Migration", dry_run: bool) -> Iterator[str]:
    from osworld_pipeline.columns import SCHEMA_VERSION
    from osworld_pipeline.store.format_note import FORMAT

    parts, would = found.parts, "would be " if dry_run else ""
    if not found.is_due:
        yield "nothing to change: this version reads and writes these formats"
    if parts.num_without_sequences:
        yield f"{would}moved: the token lists of {parts.num_without_sequences} files of episodes, to `sequences`"
    if parts.num_old:
        yield f"{would}rewritten: {parts.num_old} files, in schema version {SCHEMA_VERSION}"
    if parts.is_due:
        yield f"{would}recorded: format {FORMAT}"
    if found.is_catalog_due or parts.num_old:
        yield f"{would}rebuilt: the catalog"
