"""A dataset to publish: a folder that `export huggingface|parquet|lance` wrote."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from osworld_pipeline.datasets.exporters.folder import MANIFEST
from osworld_pipeline.domain.shown_commands import PIPELINE, shell_line
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.progress import OnProgress
from osworld_pipeline.publishing.publication import (
    CARD,
    LicensedRows,
    Publication,
    PublishedFile,
    join_licences,
    markdown_table,
    need_licences,
    read_files,
)

KINDS = ("huggingface", "parquet", "lance")
REMEDY = (
    "export again with --own-licence for rows of this pipeline; for another source, import it again with --licence and "
    "then export again"
)
_HEAD = re.compile(r"\A---\n.*?\n---\n(\s*# [^\n]*\n)?", re.DOTALL)
_LICENCES = re.compile(r"^## Licences\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)


def plan_dataset(folder: Path, on_progress: OnProgress | None = None) -> Publication:
    """
    Raises:
        DatasetError: it is not such an export, its files differ from its manifest, or rows have no licence.
    """
    manifest = _manifest(folder)
    licences = tuple(
        LicensedRows(what=row["table"], source=row["source"], licence=row["licence"], rows=row["rows"])
        for row in manifest["licences"]
    )
    need_licences(licences, remedy=REMEDY)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CARD)
    files = read_files(folder, paths, on_progress)
    _need_whole(folder, manifest, files)
    kind = manifest["kind"]
    return Publication(
        repo_type="dataset",
        kind=kind,
        title="Desktop agent trajectories",
        licence=join_licences(row.licence for row in licences),
        licences=licences,
        files=files,
        facts={"checkpoints": manifest["checkpoints"], "sources": manifest.get("sources", [])},
        front_matter=_configs(manifest),
        text=_own_text(folder) if kind == "huggingface" else _text(manifest),
    )


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    new = folder.with_name(f"{folder.name}-huggingface") if folder.exists() else folder
    advised = shell_line(PIPELINE, "export", "huggingface", new)
    way_out = f"publish an export of one of the kinds {', '.join(KINDS)}; `{advised}` writes one"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{folder} is not an export (its {MANIFEST} cannot be read: {error}): {way_out}") from error
    if not isinstance(found, dict) or found.get("kind") not in KINDS:
        raise DatasetError(f"{folder} is an export that cannot be published: {way_out}")
    if not isinstance(found.get("licences"), list) or "checkpoints" not in found:
        raise DatasetError(f"{folder} was written by an older version and states no licences: export it again")
    return found


def _need_whole(folder: Path, manifest: Mapping[str, Any], files: tuple[PublishedFile, ...]) -> None:
    """Checks the files of an export whose manifest has their hashes."""
    hashes = {file["file"]: file["sha256"] for table in manifest.get("tables", {}).values() for file in table["files"]}
    there = {file.path: file.sha256 for file in files}
    wrong = sorted(name for name, sha256 in hashes.items() if there.get(name) != sha256)
    if wrong:
        raise DatasetError(f"{folder / wrong[0]} is missing or was changed since the export: export it again")


def _configs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that the hub's own loader reads."""
    if manifest["kind"] == "huggingface":
        names = [
            (name, f"data/{name}-*.parquet") for name, number in manifest["counts"]["num_shards"].items() if number
        ]
    elif manifest["kind"] == "parquet":
        names = [(name, f"{name}/*.parquet") for name, table in manifest["tables"].items() if table["rows"]]
    else:
        return {}
    return {
        "configs": [{"config_name": name, "data_files": [{"split": "train", "path": path}]} for name, path in names]
    }


def _own_text(folder: Path) -> str:
    """The exporter's card, without its front matter and licences, which are generated again."""
    return _LICENCES.sub("", _HEAD.sub("", (folder / CARD).read_text(encoding="utf-8"))).strip() + "\n"


def _text(manifest: Mapping[str, Any]) -> str:
    tables = markdown_table(
        ("table", "rows", "files"),
        [(f"`{name}`", f"{table['rows']:,}", len(table["files"])) for name, table in manifest["tables"].items()],
    )
    columns = ("checkpoint_id", "stage", "parent_id", "recipe_digest", "data_digest", "weights_digest", "code_version")
    checkpoints = markdown_table(columns, [[row[name] for name in columns] for row in manifest["checkpoints"]])
    names = ("source_dataset", "source_path", "licence", "revision", "sha256", "num_records")
    sources = markdown_table(names, [[row[name] for name in names] for row in manifest["sources"]])
    return (
        f"The tables of a state folder of osworld_pipeline, schema version {manifest['schema_version']}; "
        f"`{manifest['views']['file']}` has the views over them as SQL.\n\n{tables}\n"
        f"## Checkpoints\n\n{checkpoints}\n## Raw sources\n\n{sources}"
    )
