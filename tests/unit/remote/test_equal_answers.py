"""A state that was copied to another path, and one that was copied to a bucket, answer as the original does: a plain
DuckDB client, our command line, the viewer and the reports."""

import json
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pytest
from s3_server import S3
from starlette.testclient import TestClient
from viewer_samples import GSPO, KEY, SFT, TASKS, write_sample_store

from osworld_pipeline.columns import OWNED_TABLES, PART_TABLES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.upkeep.upkeep import compact_store
from osworld_pipeline.store import BlobStore
from osworld_pipeline.store.packing import pack_cold_images
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.views import DERIVED
from osworld_pipeline.web.viewer.app import create_app
from osworld_pipeline.web.viewer.settings import ViewerSettings

"""Typer uses, while it is imported, what a later click will not have."""
VIEWS = (*PART_TABLES, *OWNED_TABLES, *DERIVED)
EPISODE = f"eval-{GSPO}-{KEY}-{TASKS[0][0]}-s0"
PAGES = ("/", "/episodes", f"/episode/{EPISODE}", "/groups", f"/group/{GSPO}-u0000-g00", f"/compare?a={SFT}&b={GSPO}")
QUESTION = "SELECT stage, suite, count(*) AS n, avg(reward) AS reward FROM evals GROUP BY ALL ORDER BY ALL"


def plain_client(state: StateDir) -> dict[str, Counter[str]]:
    with duckdb.connect(str(state.catalog), read_only=True) as connection:
        return {view: Counter(map(repr, connection.execute(f"FROM {view}").fetchall())) for view in VIEWS}


def command_line(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> Any:
    from osworld_pipeline.cli import app

    capfdbinary.readouterr()
    app([*arguments, "--json"], standalone_mode=False)
    return json.loads(capfdbinary.readouterr().out)


def viewer(state: StateDir) -> dict[str, Any]:
    settings = ViewerSettings(state=state)
    with TestClient(create_app(settings), base_url="http://127.0.0.1:8765") as client:
        pages = {page: client.get(page) for page in PAGES}
        sha256 = pages[f"/episode/{EPISODE}"].text.split("/blob/")[1][:64]
        pages["/blob"] = client.get(f"/blob/{sha256}")
    assert {page.status_code for page in pages.values()} == {200}
    found = {name: page.content.replace(str(state.root).encode(), b"STATE") for name, page in pages.items()}
    return {**found, "sha256": sha256}


def reports(capfdbinary: pytest.CaptureFixture[bytes], *place: str) -> dict[str, bytes]:
    """All pages, by name; their filmstrips show images of the store."""
    paths = [Path(path) for path in command_line(capfdbinary, "report", "--all", *place)["reports"]]
    # A page names the minute in which it was written, and this may differ between two calls.
    found = {
        path.name: re.sub(rb"[Ww]ritten \d{4}-\d\d-\d\d \d\d:\d\d", b"written", path.read_bytes()) for path in paths
    }
    assert {"report.html", "index.html"} < found.keys()
    assert b"data:image/" in found["report.html"]
    return found


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_state_gives_the_same_answers_in_its_folder_in_a_copy_and_from_a_bucket(
    s3: S3, url: str, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], is_packed: bool
) -> None:
    """Packed: all images are moved into packs after the first answer."""
    original, copy, cache = (StateDir(tmp_path / name) for name in ("original", "elsewhere/copy", "cache"))
    write_sample_store(original)
    compact_store(original, min_parts=1)
    rebuild_catalog(original)
    answers, pages = plain_client(original), viewer(original)
    reported = command_line(capfdbinary, "query", QUESTION, "--state", str(original.root))
    assert reported
    written = reports(capfdbinary, "--state", str(original.root))
    shutil.rmtree(original.reports)
    seen = command_line(capfdbinary, "lineage", pages["sha256"], "--state", str(original.root))
    assert Path(seen["file"]).is_file()
    if is_packed:
        pack_cold_images(BlobStore(original.blobs), cold_s=-10, min_bytes=0)
        assert list(original.blobs.glob("??/*")) == []
        assert viewer(original) == pages
        packed = command_line(capfdbinary, "lineage", pages["sha256"], "--state", str(original.root))
        pack, _, name = packed.pop("file").rpartition("/")
        with zipfile.ZipFile(pack) as whole:
            assert whole.read(name) == pages["/blob"]
        assert Path(seen.pop("file")).name == name
        assert packed == seen
    shutil.copytree(original.root, copy.root)
    pushed = command_line(capfdbinary, "remote", "push", "--state", str(original.root), "--state-remote", url)
    assert (pushed["generation"], pushed["num_missing_images"]) == (1, 0)

    at_copy = ("--state", str(copy.root))
    at_cache = ("--state", str(cache.root), "--state-remote", url)
    assert command_line(capfdbinary, "query", QUESTION, *at_copy) == reported
    assert command_line(capfdbinary, "query", QUESTION, *at_cache) == reported

    # From here on the original is gone.
    original.root.rename(tmp_path / "gone")
    for state in (copy, cache):
        assert plain_client(state) == answers
        assert viewer(state) == pages
    assert reports(capfdbinary, *at_copy) == written
    assert reports(capfdbinary, *at_cache) == written
    status = command_line(capfdbinary, "remote", "status", "--state", str(cache.root))
    assert (status["role"], status["generation"], status["num_changed"]) == ("cache", 1, 0)
