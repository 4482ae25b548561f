"""Summaries of raw sources: what the sources hold, and that an unchanged source is not read again."""

import json
import os

import pytest
from raw_samples import SOURCES, config, put_lines, put_task, record

from osworld_pipeline.datasets.raw import REPLAY_SOURCES, TASK_SOURCES
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError
from osworld_pipeline.runs.sources.source_summaries import look_at_imports, look_at_source


@pytest.fixture
def state(tmp_path) -> StateDir:
    return StateDir(tmp_path)


def test_a_summary_has_the_number_of_records_and_the_places_of_the_first_rejects(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("t1"), "{cut", record("t1_chunk2"), record("t2")])
    found = look_at_source(state, source)
    assert (found.is_present, found.num_records, found.num_rejects, found.num_tasks) == (True, 3, 1, 2)
    ((path, line, kind, reason),) = found.rejects
    assert (path, line, kind) == (source.path, 2, "malformed")
    assert reason


@pytest.mark.parametrize("source", [*REPLAY_SOURCES, *TASK_SOURCES], ids=lambda source: source.name)
def test_an_absent_source_holds_nothing(state: StateDir, source) -> None:
    found = look_at_source(state, source)
    assert (found.is_present, found.num_records, found.num_bytes, found.rejects) == (False, 0, 0, ())


def test_an_unchanged_source_is_not_read_again_and_a_changed_one_is(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("t1")])
    first, second = look_at_source(state, source), look_at_source(state, source)
    assert (first.is_cached, second.is_cached) == (False, True)
    assert second.digest == first.digest
    assert second.num_records == 1

    put_lines(state, "bc_sft", [record("t1"), record("t2")])
    third = look_at_source(state, source)
    assert (third.is_cached, third.num_records) == (False, 2)
    assert third.digest != first.digest


def test_a_file_of_the_same_size_that_was_written_again_is_read_again(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("t1")])
    first = look_at_source(state, source)
    put_lines(state, "bc_sft", [record("t9")])
    path = source.locate(state)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    second = look_at_source(state, source)
    assert not second.is_cached
    assert second.digest != first.digest
    # The file is touched and not changed: it is read again, and its digest is the same.
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    third = look_at_source(state, source)
    assert not third.is_cached
    assert third.digest == second.digest


def test_a_tree_is_read_again_when_one_of_its_files_is_added_or_removed(state: StateDir) -> None:
    source = SOURCES["osworld_repo"]
    path = put_task(state, config("t1"))
    put_task(state, config("t2"), domain="chrome")
    first = look_at_source(state, source)
    assert (first.num_records, look_at_source(state, source).is_cached) == (2, True)
    path.unlink()
    assert look_at_source(state, source).num_records == 1


def test_a_damaged_summary_file_is_made_again(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("t1")])
    look_at_source(state, source)
    note = state.tables / "raw_sources" / "bc_sft.json"
    note.write_text("{")
    assert look_at_source(state, source).num_records == 1
    assert json.loads(note.read_text())["source"]["num_records"] == 1


def put_import(state: StateDir, name: str, **changes) -> None:
    folder = state.imports / name
    folder.mkdir(parents=True)
    note = {
        "name": name, "importer": "agentnet", "licence": "mit", "revision": "r1", "origin": "a file",
        "quality_rank": -1, "num_demonstrations": 3, "num_tasks": 2, "num_rejects": 1, "sha256": "ab",
    }  # fmt: skip
    (folder / "source.json").write_text(json.dumps(note | changes))
    reject = {"path": "raw.jsonl", "line": 7, "kind": "bad_image", "reason": "no image", "task_id": "t1"}
    (folder / "rejects.jsonl").write_text(json.dumps(reject) + "\n")


def test_imports_are_counted_with_their_licence_and_their_rejects(state: StateDir) -> None:
    assert look_at_imports(state).num_demonstrations == 0
    put_import(state, "one")
    put_import(state, "two", licence="apache-2.0", num_demonstrations=4)
    found = look_at_imports(state)
    assert (found.num_demonstrations, found.num_rejects) == (7, 2)
    assert [row[0] for row in found.rows] == ["one", "two"]
    assert [row[5] for row in found.rows] == ["mit", "apache-2.0"]
    assert found.rejects[0] == ("raw.jsonl", 7, "bad_image", "no image")


def test_a_damaged_import_names_its_folder(state: StateDir) -> None:
    put_import(state, "one")
    (state.imports / "one" / "source.json").write_text("{")
    with pytest.raises(DatasetError, match=r"imports/one is damaged .* import it again"):
        look_at_imports(state)
