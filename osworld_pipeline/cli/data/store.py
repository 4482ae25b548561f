"""`compact`, `collect-garbage`, `missing-images` and `rebuild-catalog`: upkeep of trajectories and images."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, StateRemoteOption, existing_state, writable_state
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.cli.shown import say
from osworld_pipeline.programs.answers import print_json


def register(app: typer.Typer) -> None:
    app.command()(compact)
    app.command("collect-garbage")(collect)
    app.command("missing-images")(missing)
    app.command("rebuild-catalog")(rebuild)


def compact(
    state: StateOption = Path("var"),
    min_parts: Annotated[int, typer.Option(min=1, help="Skip tables with fewer small parts.")] = 8,
    target_mb: Annotated[int, typer.Option(min=1, help="Target size of a file, compressed.")] = 64,
    cold_days: Annotated[
        float, typer.Option(min=0, help="Pack images that were last written or touched more than this many days ago.")
    ] = 3.0,
    state_remote: StateRemoteOption = "",
    as_json: JsonOption = False,
) -> None:
    """Merge many small trajectory parts into few large, sorted files, and cold images into packs. Safe during training
    and queries."""
    from osworld_pipeline.runs.upkeep.upkeep import compact_store

    folder = writable_state(state)
    with shown_progress("compact", as_json=as_json) as on_progress:
        done = compact_store(
            folder,
            min_parts=min_parts,
            target_bytes=target_mb << 20,
            cold_days=cold_days,
            on_progress=on_progress,
        )
        if state_remote:
            from osworld_pipeline.remote.status import push_after

            push_after(folder, state_remote, lambda sentence: say(sentence, as_json=as_json), on_progress)
    if as_json:
        print_json(done)
        return
    print(
        f"{done.num_parts} parts and {done.num_merged} earlier files became {done.num_written} files with "
        f"{done.num_rows:,} rows; {done.num_removed} replaced files removed; {done.num_newer} newer parts skipped; "
        f"{done.num_images:,} images packed into {done.num_packs} packs"
    )


def collect(
    state: StateOption = Path("var"),
    grace_h: Annotated[float, typer.Option(min=0, help="Keep files written within this many hours.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove images that no row names, and files of replaced parts. Safe during training and queries."""
    from osworld_pipeline.runs.upkeep.upkeep import collect_garbage

    folder = existing_state(state) if dry_run else writable_state(state)
    with shown_progress("collect-garbage", as_json=as_json) as on_progress:
        done = collect_garbage(folder, grace_s=grace_h * 3600, is_dry_run=dry_run, on_progress=on_progress)
    if as_json:
        print_json({**asdict(done), "is_dry_run": dry_run})
        return
    print(
        f"{'would remove' if dry_run else 'removed'} {done.num_images:,} images ({done.image_bytes / 1e6:,.1f} MB), "
        f"{done.num_part_files + done.num_retired:,} files of replaced parts ({done.part_bytes / 1e6:,.1f} MB)"
    )


def missing(state: StateOption = Path("var"), as_json: JsonOption = False) -> None:
    """List the images that rows name and the store lacks; exit status 1 if there is one."""
    from osworld_pipeline.runs.upkeep.upkeep import missing_blobs

    folder = existing_state(state)
    with shown_progress("missing-images", as_json=as_json) as on_progress:
        found = missing_blobs(folder, on_progress)
    if as_json:
        print_json([{"sha256": sha256, "named_in": path} for sha256, path in found.items()])
    else:
        for sha256, path in found.items():
            print(f"{sha256}  named in {path}")
    if found:
        raise typer.Exit(1)
    if not as_json:
        print("no image is missing")


def rebuild(state: StateOption = Path("var"), as_json: JsonOption = False) -> None:
    """Rebuild the catalog, and the compaction's manifest if it is missing, damaged or old. Nothing else changes."""
    from osworld_pipeline.runs.upkeep.upkeep import rebuild_store

    folder = writable_state(state)
    with shown_progress("rebuild-catalog", as_json=as_json) as on_progress:
        done = rebuild_store(folder, on_progress)
    if as_json:
        print_json(done)
        return
    manifest = "was rebuilt" if done.is_changed else "is valid"
    print(f"the catalog was rebuilt; the manifest {manifest} and names {done.num_files} compacted files")
    if done.num_lost:
        print(
            f"{done.num_lost} files that it named are missing: their rows are lost unless a copy of the folder has them"
        )
