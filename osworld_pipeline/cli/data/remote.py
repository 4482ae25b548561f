"""`remote push`, `pull`, `status` and `collect-garbage`: the state on an S3-compatible object store."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, StateRemoteOption, existing_state, writable_state
from osworld_pipeline.cli.progress import shown_progress
from osworld_pipeline.cli.shown import counted
from osworld_pipeline.programs.answers import print_json

remote = typer.Typer(
    help="The state on an S3-compatible object store (credentials: AWS_* in the environment; extra 's3').",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    app.add_typer(remote, name="remote")


@remote.command("push")
def push_(state: StateOption = Path("var"), state_remote: StateRemoteOption = "", as_json: JsonOption = False) -> None:
    """Upload the changes to the object store; readers see them atomically. Safe while training runs."""
    from osworld_pipeline.remote.push import push
    from osworld_pipeline.remote.status import need_remote

    folder = existing_state(state)
    url = need_remote(folder, state_remote)
    with shown_progress("remote push", as_json=as_json) as on_progress:
        done = push(folder, url, on_progress)
    if as_json:
        print_json(done)
        return
    print(
        f"generation {done.generation}: {counted(done.num_uploaded, 'file')} of {done.num_files:,} and "
        f"{counted(done.num_images, 'image')} sent ({done.uploaded_bytes / 1e6:,.1f} MB)"
        if done.is_changed
        else f"generation {done.generation} is up to date"
    )
    if done.num_missing_images:
        missing = counted(done.num_missing_images, "image")
        print(f"{missing} that rows refer to could not be sent, because the state folder does not have them.")


@remote.command("pull")
def pull_(
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    checkpoint: Annotated[
        list[str] | None, typer.Option(help="Also fetch the weights of this checkpoint; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the state folder a cache of the object store, or update it; images are fetched on demand."""
    from osworld_pipeline.remote.pull import fetch_checkpoints, pull
    from osworld_pipeline.remote.status import need_remote

    folder = writable_state(state, must_exist=False)
    url = need_remote(folder, state_remote)
    with shown_progress("remote pull", as_json=as_json) as on_progress:
        done = pull(folder, url, on_progress)
        num_bytes = done.downloaded_bytes + fetch_checkpoints(folder, checkpoint or (), on_progress)
    if as_json:
        print_json(done)
        return
    print(f"generation {done.generation}: {num_bytes / 1e6:,.1f} MB received")


@remote.command()
def status(state: StateOption = Path("var"), state_remote: StateRemoteOption = "", as_json: JsonOption = False) -> None:
    """Compare the state folder with the object store."""
    from osworld_pipeline.remote.status import need_remote, remote_status

    folder = existing_state(state)
    url = need_remote(folder, state_remote)
    with shown_progress("remote status", as_json=as_json) as on_progress:
        found = remote_status(folder, url, on_progress)
    if as_json:
        print_json(found)
        return
    there = "nothing yet" if found.remote_generation is None else f"generation {found.remote_generation}"
    here = "nothing of it" if found.generation is None else f"generation {found.generation}"
    print(f"{found.url} has {there}: {counted(found.num_files, 'file')}, {found.num_bytes / 1e6:,.1f} MB")
    print(
        f"{folder.root} ({found.role or 'not pushed yet'}) has {here}; new or changed here: "
        f"{counted(found.num_changed, 'file')}"
    )


@remote.command("collect-garbage")
def collect(
    state: StateOption = Path("var"),
    state_remote: StateRemoteOption = "",
    grace_h: Annotated[float, typer.Option(min=0, help="Keep objects uploaded within this many hours.")] = 24.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Push, then remove objects that neither the manifest of the object store nor a row names, and single images that
    are also in a pack. Safe during training."""
    from osworld_pipeline.remote.garbage import collect_remote_garbage
    from osworld_pipeline.remote.status import need_remote

    folder = existing_state(state)
    url = need_remote(folder, state_remote)
    with shown_progress("remote collect-garbage", as_json=as_json) as on_progress:
        done = collect_remote_garbage(folder, url, grace_s=grace_h * 3600, is_dry_run=dry_run, on_progress=on_progress)
    if as_json:
        print_json({**asdict(done), "is_dry_run": dry_run})
        return
    print(
        f"{'would remove' if dry_run else 'removed'} {counted(done.num_images, 'image')} "
        f"({done.image_bytes / 1e6:,.1f} MB) and {counted(done.num_files, 'object')} of killed pushes "
        f"({done.file_bytes / 1e6:,.1f} MB)"
    )
