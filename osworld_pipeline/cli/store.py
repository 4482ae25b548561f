"""`compact`, `collect-garbage`, `missing-images` and `rebuild-catalog`: upkeep of trajectories and images."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption, tell
from osworld_pipeline.cli.options import StateRemoteOption, existing_state
from osworld_pipeline.cli.pipeline import StateOption
from osworld_pipeline.cli.shown import say


def register(app: typer.Typer) -> None:
    app.command()(compact)
    app.command("collect-garbage")(collect)
    app.command("missing-images")(missing)
    app.command("rebuild-catalog")(rebuild)


def compact(
    state: StateOption = Path("var"),
    min_parts: Annotated[int, typer.Option(min=1, help="Leave a table alone that has fewer small parts.")] = 8,
    target_mb: Annotated[int, typer.Option(min=1, help="Size that a file grows to, compressed.")] = 64,
    cold_days: Annotated[float, typer.Option(min=0, help="Pack images that were not stored for so long.")] = 3.0,
    state_remote: StateRemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make few large, sorted files of many small trajectory parts, and packs of cold images; safe beside training and
    queries."""
    from osworld_pipeline.runs.upkeep.upkeep import compact_store

    folder = existing_state(state)
    done = compact_store(folder, min_parts=min_parts, target_bytes=target_mb << 20, cold_days=cold_days)
    if state_remote:
        from osworld_pipeline.remote.status import push_after

        push_after(folder, state_remote, lambda sentence: say(sentence, as_json=as_json))
    if as_json:
        tell(done)
        return
    print(
        f"{done.num_parts} parts and {done.num_merged} earlier files became {done.num_written} files with "
        f"{done.num_rows:,} rows; {done.num_removed} replaced files removed; {done.num_newer} newer parts left alone; "
        f"{done.num_images:,} images went into {done.num_packs} packs"
    )


def collect(
    state: StateOption = Path("var"),
    grace_h: Annotated[float, typer.Option(min=0, help="Keep what was written within so many hours.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove images that no row names and files of parts that were replaced; safe beside training and queries."""
    from osworld_pipeline.runs.upkeep.upkeep import collect_garbage

    done = collect_garbage(existing_state(state), grace_s=grace_h * 3600, is_dry_run=dry_run)
    if as_json:
        tell({**asdict(done), "is_dry_run": dry_run})
        return
    print(
        f"{'would remove' if dry_run else 'removed'} {done.num_images:,} images ({done.image_bytes / 1e6:,.1f} MB), "
        f"{done.num_part_files + done.num_retired:,} files of replaced parts ({done.part_bytes / 1e6:,.1f} MB)"
    )


def missing(state: StateOption = Path("var"), as_json: JsonOption = False) -> None:
    """Name every image that a row refers to and the store lacks; status 1 where there is one."""
    from osworld_pipeline.runs.upkeep.upkeep import missing_blobs

    found = missing_blobs(existing_state(state))
    if as_json:
        tell([{"sha256": sha256, "named_in": path} for sha256, path in found.items()])
    else:
        for sha256, path in found.items():
            print(f"{sha256}  named in {path}")
    if found:
        raise typer.Exit(1)
    if not as_json:
        print("every image is there")


def rebuild(state: StateOption = Path("var"), as_json: JsonOption = False) -> None:
    """Make the catalog again, and the compaction's manifest where it is lost, damaged or old; nothing else changes."""
    from osworld_pipeline.runs.upkeep.upkeep import rebuild_store

    done = rebuild_store(existing_state(state))
    if as_json:
        tell(done)
        return
    manifest = "was made again" if done.is_changed else "is whole"
    print(f"the catalog was made again; the manifest {manifest} and names {done.num_files} compacted files")
    if done.num_lost:
        print(f"{done.num_lost} files that it named are gone: their rows are lost unless a copy of the folder has them")
