"""The tables beyond Slime-OSWorld's rules: imports as further sources, provenance, and rows that stay unchanged."""

import gzip
import json
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_samples import SOURCES, config, image_bytes, image_text, put_lines, put_table, put_task, record

from osworld_pipeline.datasets.artefacts import ALL_FILE, write_union_artefacts
from osworld_pipeline.datasets.source_lock import SourceLock, write_source_lock
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.datasets.union.sinks import GROUP_ROWS
from osworld_pipeline.domain.digest import canonical_json, digest_bytes, digest_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.owned import read_table, table_path
from osworld_pipeline.tables.query import run_query


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def put_import(state: StateDir, name: str, **changes: Any) -> Path:
    folder = state.imports / name
    (folder / "images").mkdir(parents=True)
    (folder / "images" / "1.png").write_bytes(image_bytes(7))
    place = {"images": ["images/1.png"] * 2, "source_path": "raw.jsonl", "source_line": 40}
    task = {"task_id": "i1", "instruction": "Go.", "domain": "vlc", "task_config": json.dumps(config("i1"))}
    bare = {"task_id": "i2", "instruction": "Look.", "domain": "gimp", "task_config": None}
    reject = {"path": "raw.jsonl", "line": 3, "kind": "bad_step", "reason": "no such key", "task_id": "i9"}
    manifest = {"name": name, "importer": "x", "licence": "mit", "revision": "r1", "quality_rank": -1} | changes
    files = {
        "demonstrations.jsonl": [record("i1", **place), record("t1", **place)],
        "tasks.jsonl": [task, bare],
        "rejects.jsonl": [reject],
        "source.json": [manifest],
    }
    for file, rows in files.items():
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(state: StateDir, name: str) -> list[dict[str, Any]]:
    return read_table(state, name).to_pylist()


def test_an_import_is_one_more_source_with_its_licence_rank_and_places(state: StateDir) -> None:
    put_import(state, "agentnet")
    put_lines(state, "bc_sft", [record("t1", images=[image_text(7)] * 2)])
    put_task(state, config("t1"))
    summary = build_union_tables(state, system_prompt="p")
    first, second = rows_of(state, "replay_buffer")
    assert (first["task_id"], first["source_dataset"], first["licence"]) == ("t1", "bc_sft", None)
    assert (second["task_id"], second["source_dataset"], second["licence"]) == ("i1", "agentnet", "mit")
    assert (second["quality_rank"], second["source_path"], second["source_line"]) == (-1, "raw.jsonl", 40)
    assert second["images"] == [digest_bytes(image_bytes(7))] * 2
    assert (second["dialect"], second["action_types"]) == ("slime", ["type", "terminate"])
    assert summary.num_duplicates == 1
    tasks = {row["task_id"]: row for row in rows_of(state, "union_tasks")}
    assert (tasks["i1"]["task_config_source"], tasks["i1"]["has_task_config"]) == ("import", True)
    i2 = tasks["i2"]
    assert (i2["task_config_source"], i2["has_task_config"], i2["instruction"], i2["domain"]) == (
        "import", False, "Look.", "gimp",
    )  # fmt: skip
    assert {row["task_id"] for row in rows_of(state, "train_tasks")} == {"i1", "t1"}
    assert [(row["source_dataset"], row["source_line"], row["kind"]) for row in rows_of(state, "rejects")] == [
        ("agentnet", 3, "bad_step")
    ]
    counts = {row["source_dataset"]: row for row in rows_of(state, "raw_counts")}
    assert (counts["agentnet"]["licence"], counts["agentnet"]["revision"]) == ("mit", "r1")
    assert (counts["agentnet"]["num_records"], counts["agentnet"]["num_rejects"]) == (2, 1)


def test_an_import_of_a_better_rank_replaces_an_equal_demonstration(state: StateDir) -> None:
    put_import(state, "verified", quality_rank=9)
    put_lines(state, "sft_curated_final", [record("t1", images=[image_text(7)] * 2)])
    build_union_tables(state, system_prompt="p")
    assert {row["source_dataset"] for row in rows_of(state, "replay_buffer")} == {"verified"}


def test_an_import_without_a_good_manifest_is_a_reject_and_a_half_written_one_is_ignored(state: StateDir) -> None:
    (put_import(state, "broken") / "source.json").write_text('{"licence": 7}')
    put_import(state, "half").rename(state.imports / ".half.tmp")
    build_union_tables(state, system_prompt="p")
    (reject,) = rows_of(state, "rejects")
    assert (reject["source_dataset"], reject["kind"]) == ("broken", "unreadable")
    assert rows_of(state, "replay_buffer") == []


def test_licence_and_revision_of_a_downloaded_source_are_in_its_rows(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record()])
    lock = SourceLock(
        source="bc_sft", repo_id="a/b", filename="x", revision="f" * 40, requested="main",
        sha256="0" * 64, num_bytes=1, licence="apache-2.0",
    )  # fmt: skip
    write_source_lock(state.datasets, {"bc_sft": lock})
    build_union_tables(state, system_prompt="p")
    assert rows_of(state, "replay_buffer")[0]["licence"] == "apache-2.0"
    counts = {row["source_dataset"]: row for row in rows_of(state, "raw_counts")}
    assert (counts["bc_sft"]["licence"], counts["bc_sft"]["revision"]) == ("apache-2.0", "f" * 40)
    assert counts["bc_sft"]["num_bytes"] == source.locate(state).stat().st_size
    assert len(counts["bc_sft"]["sha256"]) == 64
    assert counts["sft_clean"]["sha256"] is None


def test_the_config_domain_is_from_the_config_and_the_domain_is_the_better_one(state: StateDir) -> None:
    put_task(state, config("t1", related_apps=["libreoffice"]), domain="libreoffice_calc")
    build_union_tables(state, system_prompt="p")
    (row,) = rows_of(state, "union_tasks")
    assert (row["domain"], row["config_domain"]) == ("libreoffice_calc", "libreoffice")


def test_files_of_two_domains_with_one_id_are_two_tasks_and_the_artefact_has_the_last(
    state: StateDir, tmp_path: Path
) -> None:
    for domain in ("vlc", "chrome"):
        put_task(state, config("t1", instruction=f"Open {domain}."), domain=domain)
    put_task(state, config("t2"), domain="os")
    put_lines(state, "bc_sft", [record("t1"), record("t2")])
    build_union_tables(state, system_prompt="p")
    rows = rows_of(state, "union_tasks")
    assert [(row["domain"], row["task_id"], row["instruction"]) for row in rows] == [
        ("chrome", "t1", "Open chrome."), ("vlc", "t1", "Open vlc."), ("os", "t2", "Solve t2."),
    ]  # fmt: skip
    assert [row["task_id"] for row in rows_of(state, "train_tasks")] == ["t2"]
    (reject,) = rows_of(state, "rejects")
    assert (reject["kind"], reject["task_id"]) == ("duplicate_task", "t1")
    assert "chrome, vlc each have a task with this id" in reject["reason"]
    rebuild_catalog(state)
    assert run_query(state, "SELECT count(*), count(DISTINCT task_id) FROM tasks").rows == [(3, 2)]
    write_union_artefacts(state.datasets, state.osworld_repo, tmp_path / "out", system_prompt="p")
    artefact = pq.read_table(tmp_path / "out" / ALL_FILE).to_pylist()
    assert [(row["task_id"], row["instruction"]) for row in artefact] == [("t1", "Open vlc."), ("t2", "Solve t2.")]


def test_of_two_tasks_with_one_id_the_one_that_a_config_names_is_trained_on(state: StateDir) -> None:
    for domain in ("vlc", "chrome"):
        put_task(state, config("t1"), domain=domain)
    named = {"task_id": "t1", "domain": "chrome", "task_config": json.dumps(config("t1"))}
    put_table(state, "distill_train", [named])
    put_lines(state, "bc_sft", [record("t1")])
    build_union_tables(state, system_prompt="p")
    assert [row["domain"] for row in rows_of(state, "union_tasks")] == ["chrome", "vlc"]
    assert [row["domain"] for row in rows_of(state, "train_tasks")] == ["chrome"]


def test_of_two_tasks_with_one_id_the_one_that_is_not_for_windows_is_trained_on(state: StateDir) -> None:
    for domain in ("Windows/ppt", "libreoffice_impress"):
        put_task(state, config("t1"), domain=domain)
    put_lines(state, "bc_sft", [record("t1")])
    build_union_tables(state, system_prompt="p")
    assert {row["domain"] for row in rows_of(state, "union_tasks")} == {"ppt", "libreoffice_impress"}
    assert [row["domain"] for row in rows_of(state, "train_tasks")] == ["libreoffice_impress"]


@pytest.mark.parametrize("rewards", [(..., 0.0), (0.0, ...), (..., ...)], ids=["later", "first", "nowhere"])
def test_a_recorded_reward_of_any_duplicate_counts_and_duplicates_are_listed(
    state: StateDir, rewards: tuple[Any, Any]
) -> None:
    better, worse = rewards
    put_lines(state, "sft_curated_final", [record("t0"), record("t1", reward=better)])
    path = put_lines(state, "bc_sft", ["{", record("t1", reward=worse)]).path
    build_union_tables(state, system_prompt="p", num_workers=0)
    first, row = rows_of(state, "replay_buffer")
    is_recorded = 0.0 in rewards
    assert (row["reward"], row["is_reward_assumed"]) == (0.0 if is_recorded else 1.0, not is_recorded)
    listed = {"source_dataset": "bc_sft", "source_path": path, "source_line": 2}
    assert row["duplicates"] == [{**listed, "reward": None if worse is ... else worse}]
    assert (first["reward"], first["duplicates"]) == (1.0, [])


def test_the_same_turns_with_other_screenshots_are_another_demonstration(state: StateDir) -> None:
    pictures = [[image_text(1), image_text(colour)] for colour in (2, 3, 4)]
    put_lines(state, "bc_sft", [record("t1", images=images) for images in pictures])
    assert build_union_tables(state, system_prompt="p").num_duplicates == 0
    rows = rows_of(state, "replay_buffer")
    assert len({row["row_id"] for row in rows}) == len({tuple(row["images"]) for row in rows}) == 3
    assert len({row["former_row_id"] for row in rows}) == 1


def test_the_hash_of_a_source_is_that_of_its_file(state: StateDir) -> None:
    path = put_lines(state, "bc_sft", [record()]).locate(state)
    build_union_tables(state, system_prompt="p")
    counts = {row["source_dataset"]: row["sha256"] for row in rows_of(state, "raw_counts")}
    assert counts["bc_sft"] == digest_bytes(path.read_bytes())


def test_a_task_without_a_config_keeps_its_instruction_and_domain(state: StateDir) -> None:
    bare = {"task_id": "t1", "instruction": "Look.", "domain": "gimp", "task_config": None}
    put_table(state, "distill_train", [bare])
    build_union_tables(state, system_prompt="p")
    (row,) = rows_of(state, "union_tasks")
    assert (row["instruction"], row["domain"], row["has_task_config"]) == ("Look.", "gimp", False)
    assert row["task_config_source"] == "missing"


def test_an_imported_config_keeps_its_large_integers(state: StateDir) -> None:
    task = {"task_id": "i1", "task_config": config("i1", limit=2**64 + 1)}
    (put_import(state, "large") / "tasks.jsonl").write_text(json.dumps(task))
    build_union_tables(state, system_prompt="p")
    (row,) = [row for row in rows_of(state, "union_tasks") if row["task_id"] == "i1"]
    assert json.loads(row["task_config"])["limit"] == 2**64 + 1


@pytest.mark.parametrize("name", ["bc_sft", "distill_train", "exploratory_rollouts"])
def test_a_folder_in_place_of_a_source_is_a_reject(state: StateDir, name: str) -> None:
    SOURCES[name].locate(state).mkdir(parents=True)
    build_union_tables(state, system_prompt="p")
    (reject,) = rows_of(state, "rejects")
    assert (reject["source_dataset"], reject["kind"]) == (name, "unreadable")
    assert "the path is a folder, not a file" in reject["reason"]


@pytest.mark.parametrize("reward", [-0.1, 1.5, 7])
def test_a_reward_outside_0_to_1_is_a_reject(state: StateDir, reward: float) -> None:
    put_lines(state, "bc_sft", [record("t1", reward=reward)])
    build_union_tables(state, system_prompt="p")
    (reject,) = rows_of(state, "rejects")
    assert (reject["kind"], reject["reason"]) == ("malformed", f"the reward {reward:g} is not within 0..1")


def test_a_record_that_cannot_be_used_still_names_its_task(state: StateDir) -> None:
    put_lines(state, "bc_sft", [record("t1_chunk3", messages=...), record("t2", images=["x"])])
    build_union_tables(state, system_prompt="p")
    assert [row["task_id"] for row in rows_of(state, "union_tasks")] == ["t1", "t2"]
    assert [row["task_id"] for row in rows_of(state, "rejects")] == ["t1_chunk3", "t2"]


def test_the_replay_table_is_written_in_row_groups(state: StateDir) -> None:
    put_lines(state, "sft_curated_final", [record(f"t{index}", images=[], messages=[
        {"role": "user", "content": str(index)}, record()["messages"][4],
    ]) for index in range(GROUP_ROWS + 5)])  # fmt: skip
    other = put_lines(state, "sft_clean", [])
    other.locate(state).write_text(json.dumps(record("last")))
    build_union_tables(state, system_prompt="p")
    file = pq.ParquetFile(table_path(state, "replay_buffer"))
    assert file.metadata.num_rows == GROUP_ROWS + 6
    assert file.metadata.num_row_groups == 2


def test_a_row_keeps_its_id_under_another_system_prompt_and_names_its_prompt_dependent_id(state: StateDir) -> None:
    put_lines(state, "bc_sft", [record("t1"), record("t2")])
    tables = []
    for prompt in ("one prompt", "another"):
        build_union_tables(state, system_prompt=prompt)
        tables.append(rows_of(state, "replay_buffer"))
    first, second = tables
    assert [row["row_id"] for row in first] == [row["row_id"] for row in second]
    assert [row["messages"][0]["content"][0]["text"] for row in second] == ["another"] * 2
    for row, prompt in ((first[0], "one prompt"), (second[0], "another")):
        plain = [
            {
                "role": turn["role"],
                "content": [{k: v for k, v in part.items() if v is not None} for part in turn["content"]],
            }
            for turn in row["messages"]
        ]
        assert plain[0]["content"][0]["text"] == prompt
        assert row["former_row_id"] == digest_json({"task_id": "t1", "messages": plain})[:24]


def test_a_row_has_the_digest_of_the_bytes_of_its_line(state: StateDir) -> None:
    source = put_lines(state, "bc_sft", [record("t1")])
    build_union_tables(state, system_prompt="p")
    line = source.locate(state).read_bytes().removesuffix(b"\n")
    assert rows_of(state, "replay_buffer")[0]["source_sha256"] == digest_bytes(line)


MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant"]),
        "content": st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}), max_size=3),
    }
)


@given(st.text(), st.lists(MESSAGE, max_size=3))
def test_the_fast_digest_of_a_row_is_the_canonical_one(task_id: str, messages: list) -> None:
    value = {"task_id": task_id, "messages": messages}
    fast = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    assert fast == canonical_json(value).encode()
    assert digest_bytes(fast) == digest_json(value)


def test_a_folder_or_a_link_loop_in_place_of_a_source_is_not_read(state: StateDir) -> None:
    path = SOURCES["bc_sft"].locate(state)
    path.mkdir(parents=True)
    put_lines(state, "sft_clean", [record()])
    loop = SOURCES["sft_hybrid"].locate(state)
    loop.parent.mkdir(parents=True)
    loop.symlink_to(loop)
    build_union_tables(state, system_prompt="p")
    assert len(rows_of(state, "replay_buffer")) == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_source_is_read_like_a_plain_one_and_rejected_next_to_one(state: StateDir, suffix: str) -> None:
    plain = put_lines(state, "bc_sft", [record("t1"), "{", record("t2")])
    build_union_tables(state, system_prompt="p")
    expected = [rows_of(state, name) for name in ("replay_buffer", "rejects")]
    data = plain.locate(state).read_bytes()
    packed = gzip.compress(data) if suffix == ".gz" else pa.Codec("zstd").compress(data, asbytes=True)
    plain.locate(state).with_name(plain.locate(state).name + suffix).write_bytes(packed)
    build_union_tables(state, system_prompt="p")
    assert rows_of(state, "replay_buffer") == expected[0]
    assert [row["kind"] for row in rows_of(state, "rejects")] == ["duplicate_file", "malformed"]
    plain.locate(state).unlink()
    build_union_tables(state, system_prompt="p")
    assert [rows_of(state, name) for name in ("replay_buffer", "rejects")] == expected
