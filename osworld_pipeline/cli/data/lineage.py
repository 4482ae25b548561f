"""`lineage`: the origin and the descendants of an id."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osworld_pipeline.cli.machine import JsonOption
from osworld_pipeline.cli.options import StateOption, existing_state
from osworld_pipeline.programs.answers import print_json

if TYPE_CHECKING:
    from rich.tree import Tree

    from osworld_pipeline.domain.state import StateDir
    from osworld_pipeline.tables.walk import Link

WIDE = 4096


def register(app: typer.Typer) -> None:
    app.command()(lineage)


def lineage(
    thing: Annotated[
        str, typer.Argument(metavar="ID", help="An episode, checkpoint, task, replay row, or a screenshot's SHA-256.")
    ],
    limit: Annotated[int, typer.Option(min=1, help="Number of each kind to show; the rest is counted.")] = 20,
    as_json: JsonOption = False,
    state: StateOption = Path("var"),
) -> None:
    """Show the origin of an id (down to the files with its pixels) and its descendants."""
    from rich.console import Console

    from osworld_pipeline.tables.walk import walk

    folder = existing_state(state)
    found = walk(folder, thing, limit=limit)
    if as_json:
        print_json(_with_paths(asdict(found), folder))
        return
    console = Console()
    if not console.is_terminal:  # a file has no width: do not wrap lines
        console = Console(width=WIDE)
    console.print(_tree(found, folder), overflow="fold")


def _with_paths(link: dict[str, Any], state: Any) -> dict[str, Any]:
    """`file`: the local path of a file of the state folder, or of a packed image (`PACK.zip/NAME`); None if it is
    missing."""
    path = link["facts"].get("path")
    if path and _is_ours(path):
        found = _found(path, state)
        link["file"] = None if found is None else str(found)
    return {**link, "links": [_with_paths(below, state) for below in link["links"]]}


def _is_ours(path: str) -> bool:
    return path.startswith(("blobs/", "checkpoints/"))


def _found(path: str, state: "StateDir") -> Path | None:
    from osworld_pipeline.store import BlobStore

    if path.startswith("blobs/"):
        place = BlobStore(state.blobs).place(Path(path).stem)
        return None if place is None else state.blobs / place
    return state.root / path if (state.root / path).exists() else None


def _tree(link: "Link", state: Any) -> "Tree":
    from rich.tree import Tree

    tree = Tree(_line(link, state))
    for below in link.links:
        tree.children.append(_tree(below, state))
    return tree


def _line(link: "Link", state: Any) -> Any:
    from rich.text import Text

    if link.num_more:
        return Text(f"{link.num_more:,} more of kind {link.kind}", style="dim")
    line = Text.assemble((link.kind, "cyan"), " ", (_shown(link.id), "bold"))
    for name, value in link.facts.items():
        if name == "path":
            value = (_found(value, state) or f"{state.root / value} (gone)") if _is_ours(value) else value
        line.append(f"  {name} ", style="dim")
        line.append(_shown(value))
    return line


def _shown(value: Any) -> str:
    """Escapes control characters of a model's output, which must not reach the terminal."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in str(value))
