"""The union build: Slime-OSWorld's rules, one by one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_samples import SOURCES, config, image_bytes, image_text, put_lines, put_table, put_task, record, turn

from osworld_pipeline.datasets.normalize import normalise_messages, num_images
from osworld_pipeline.datasets.union.build import UnionSummary, build_union_tables
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError, TableError
from osworld_pipeline.tables.builds import STATS_FILE
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.owned import read_table, table_path
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.replay.rows import load_replay_rows


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


@dataclass(frozen=True)
class Built:
    summary: UnionSummary
    tables: dict[str, pa.Table]

    @property
    def stats(self) -> Mapping[str, Any]:
        return self.summary.stats

    def __getattr__(self, name: str) -> pa.Table:
        return self.tables[{"tasks": "union_tasks", "replay": "replay_buffer"}.get(name, name)]


def build(state: StateDir) -> Built:
    summary = build_union_tables(state, system_prompt="our prompt")
    names = ("union_tasks", "replay_buffer", "train_tasks", "rejects", "raw_counts")
    return Built(summary, {name: read_table(state, name) for name in names})


def kinds(result: Built) -> list[str]:
    return result.rejects.column("kind").to_pylist()


def tasks(result: Built) -> dict[str, dict]:
    return {row["task_id"]: row for row in result.tasks.to_pylist()}


def test_a_state_without_sources_gives_empty_tables(state: StateDir) -> None:
    result = build(state)
    assert (result.tasks.num_rows, result.replay.num_rows, result.train_tasks.num_rows) == (0, 0, 0)
    assert result.stats["replay_stats"]["input_samples"] == 0


def test_a_replay_row_has_our_prompt_its_source_and_its_images_as_blobs(state: StateDir) -> None:
    put_lines(state, "sft_hybrid", ["{", record("t1_chunk2", reward=...)])
    (row,) = build(state).replay.to_pylist()
    assert row["messages"][0] == {"role": "system", "content": [{"type": "text", "text": "our prompt"}]}
    assert row["messages"][1]["content"] == [
        {"type": "image", "text": None},
        {"type": "text", "text": "[Task]\nType x."},
    ]
    assert (row["task_id"], row["original_task_id"], row["num_steps"]) == ("t1", "t1_chunk2", 2)
    assert (row["source_dataset"], row["quality_rank"], row["source_line"]) == ("sft_hybrid", 3, 2)
    assert (row["reward"], row["is_reward_assumed"]) == (1.0, True)
    assert row["images"] == [digest_bytes(image_bytes(1)), digest_bytes(image_bytes(2))]
    for sha256 in row["images"]:
        assert (state.blobs / sha256[:2] / f"{sha256}.png").is_file()


def test_a_record_without_a_system_turn_gets_our_prompt_first(state: StateDir) -> None:
    put_lines(state, "sft_clean", [record(messages=record()["messages"][1:])])
    (row,) = build(state).replay.to_pylist()
    assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant", "user", "assistant"]


def test_of_equal_demonstrations_the_best_source_stays(state: StateDir) -> None:
    listed = record(task_id=..., id="t1", messages=..., conversations=[
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "[Task]\nType x."}]},
        record()["messages"][2],
        {"role": "user", "content": [{"type": "image"}]},
        record()["messages"][4],
    ])  # fmt: skip
    put_lines(state, "bc_sft", [record("t1_chunk0")])
    put_lines(state, "sft_curated_final", [listed])
    put_lines(state, "combined_sft", [record("t1"), record("t2")])
    result = build(state)
    assert [(row["task_id"], row["source_dataset"]) for row in result.replay.to_pylist()] == [
        ("t1", "sft_curated_final"),
        ("t2", "combined_sft"),
    ]
    assert result.stats["replay_stats"] == {
        "input_samples": 4, "kept_samples": 2, "dropped_parse": 0, "deduped": 0,
        "per_dataset": {"sft_curated_final": 1, "combined_sft": 1},
    }  # fmt: skip
    assert result.summary.num_duplicates == 2


def test_a_better_copy_with_a_broken_image_does_not_replace_a_good_one(state: StateDir) -> None:
    put_lines(state, "sft_curated_final", [record(images=[image_text(1), "AAAA"])])
    put_lines(state, "bc_sft", [record()])
    result = build(state)
    assert result.replay.column("source_dataset").to_pylist() == ["bc_sft"]
    assert kinds(result) == ["bad_image"]


def test_one_turn_that_does_not_parse_drops_the_record(state: StateDir) -> None:
    bad = record("t2")
    bad["messages"][2]["content"] = turn({"action": "ponder"})
    put_lines(state, "sft_clean", [record(), bad])
    result = build(state)
    assert result.replay.column("task_id").to_pylist() == ["t1"]
    assert result.stats["replay_stats"]["dropped_parse"] == 1
    assert kinds(result) == ["dropped_parse"]
    assert "t2" in tasks(result)


def test_bare_pyautogui_answers_parse(state: StateDir) -> None:
    bare = record()
    bare["messages"][2]["content"] = 'pyautogui.write("x")'
    bare["messages"][4]["content"] = "DONE"
    put_lines(state, "bc_sft", [bare])
    assert build(state).replay.num_rows == 1


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ([image_text(1)], "2 image placeholders and 1 images"),
        ([image_text(1)] * 3, "2 image placeholders and 3 images"),
        ([image_text(1), "not base64!"], "image 1: not base64"),
        ([image_text(1), image_text(2)[:60]], "image 1: "),
        ([image_text(1), "R0lGODlhAQABAAAAACw="], "image 1: neither PNG, JPEG nor WebP"),
    ],
)
def test_images_must_be_whole_and_as_many_as_their_placeholders(state: StateDir, images: list, reason: str) -> None:
    put_lines(state, "sft_clean", [record(images=images)])
    result = build(state)
    assert result.replay.num_rows == 0
    (reject,) = result.rejects.to_pylist()
    assert reject["kind"] == "bad_image"
    assert reason in reject["reason"]
    assert list(state.blobs.rglob("*.png")) == []


def test_the_distill_config_wins_over_the_tree_and_the_first_over_the_next(state: StateDir) -> None:
    put_task(state, config("a", instruction="tree"), domain="chrome")
    put_task(state, config("b", instruction="tree"), domain="chrome")
    first, second = config("a_chunk1", instruction="first"), config("a", instruction="second")
    put_table(state, "distill_train", [{"task_id": "a_chunk1", "task_config": json.dumps(first)}])
    put_table(state, "variance_subset", [{"task_id": "a", "task_config": json.dumps(second)}])
    put_lines(state, "exploratory_rollouts", [{"id": "c"}])
    rows = tasks(build(state))
    assert {name: (row["instruction"], row["task_config_source"]) for name, row in rows.items()} == {
        "a": ("first", "distill_data"),
        "b": ("tree", "osworld_repo"),
        "c": ("", "missing"),
    }
    assert json.loads(rows["a"]["task_config"])["id"] == "a"
    assert (rows["c"]["has_task_config"], rows["c"]["platform"], rows["c"]["task_config"]) == (False, "unknown", "{}")
    assert {row["prompt"] for row in rows.values()} == {"a", "b", "c"}
    assert rows["a"]["domain"] == "chrome"


def test_the_domain_falls_back_to_the_first_related_app(state: StateDir) -> None:
    put_table(state, "distill_train", [{"task_id": "a", "task_config": json.dumps(config("a"))}])
    assert tasks(build(state))["a"]["domain"] == "terminal"


@pytest.mark.parametrize(
    ("changes", "platform"),
    [
        ({"snapshot": "Excel"}, "windows"),
        ({"config": [{"parameters": {"path": "C:\\Users\\x"}}]}, "windows"),
        ({"config": [{"parameters": {"path": "C:/data"}}]}, "windows"),
        ({"config": [{"parameters": {"path": "x\\Users\\y"}}]}, "windows"),
        ({"config": [{"C:/key": 1}]}, "windows"),
        ({"instruction": "Copy it to /home/Users"}, "ubuntu"),
    ],
)
def test_windows_tasks_are_known_by_snapshot_or_path(state: StateDir, changes: dict, platform: str) -> None:
    put_task(state, config("a", **changes))
    assert tasks(build(state))["a"]["platform"] == platform


@pytest.mark.parametrize("suite", ["windows-basics", "wine-basics"])
def test_windows_tasks_of_the_requested_suite_are_trained_on(state: StateDir, suite: str) -> None:
    put_task(state, config("ours", snapshot="word", source=f"{suite}/cmd_echo"))
    put_task(state, config("theirs", snapshot="word", source="https://somewhere"))
    put_lines(state, "sft_clean", [record(name) for name in ("ours", "theirs")])
    result = build(state)
    assert result.train_tasks.column("task_id").to_pylist() == ["ours"]
    assert tasks(result)["ours"]["platform"] == "windows"


def test_training_tasks_have_a_config_a_demonstration_and_are_not_windows(state: StateDir) -> None:
    put_task(state, config("good"))
    put_task(state, config("undemonstrated"))
    put_task(state, config("windows", snapshot="word"))
    put_lines(state, "sft_clean", [record(name) for name in ("good_chunk0", "windows", "unconfigured")])
    result = build(state)
    assert result.train_tasks.column("task_id").to_pylist() == ["good"]
    assert result.stats["union_ready_rows"] == 1
    assert result.stats["replay_ready_rows"] == 1
    assert result.stats["platform_counts"] == {"ubuntu": 2, "unknown": 1, "windows": 1}


def test_a_task_without_an_evaluator_is_not_trained_on_and_says_why(state: StateDir) -> None:
    put_task(state, config("t1", evaluator={"func": ""}))
    put_lines(state, "sft_clean", [record("t1")])
    result = build(state)
    assert result.train_tasks.num_rows == 0
    (reject,) = result.rejects.to_pylist()
    assert (reject["kind"], reject["task_id"]) == ("bad_task", "t1")
    assert "no evaluator" in reject["reason"]


def test_the_tables_can_be_queried_and_the_trainer_reads_the_same_rows(state: StateDir) -> None:
    put_task(state, config("t1"))
    put_lines(state, "sft_clean", [record("t1"), record("t2", reward=0.0), "{"])
    build(state)
    rebuild_catalog(state)
    assert run_query(state, "SELECT task_id, is_train FROM tasks ORDER BY 1").rows == [("t1", True), ("t2", False)]
    assert run_query(state, "SELECT task_id, reward FROM replay ORDER BY 1").rows == [("t1", 1.0), ("t2", 0.0)]
    assert run_query(state, "SELECT source_line, kind FROM rejects").rows == [(3, "malformed")]
    counts = "SELECT is_present, num_records, num_rejects FROM raw_counts WHERE source_dataset = "
    assert run_query(state, f"{counts} 'sft_clean'").rows == [(True, 2, 1)]
    assert run_query(state, f"{counts} 'bc_sft'").rows == [(False, 0, 0)]
    (row,) = load_replay_rows(state)
    assert row.task_id == "t1"
    assert row.messages[1] == {
        "role": "user",
        "content": [{"type": "image"}, {"type": "text", "text": "[Task]\nType x."}],
    }
    assert row.image_sha256s == (digest_bytes(image_bytes(1)), digest_bytes(image_bytes(2)))
    assert json.loads((table_path(state, "union_tasks").with_name(STATS_FILE)).read_text())["union_all_rows"] == 2


def test_the_same_sources_give_the_same_tables(state: StateDir) -> None:
    put_task(state, config("t1"))
    put_lines(state, "sft_clean", [record("t1"), record("t2")])
    first = build(state)
    assert build(state).tables == first.tables
    assert len(set(first.replay.column("row_id").to_pylist())) == 2


def test_an_empty_replay_buffer_says_what_to_materialize(state: StateDir) -> None:
    with pytest.raises(TableError, match="materialize replay_buffer first"):
        load_replay_rows(state)


PART = st.sampled_from(["<image>", "a", "\n", "b c", "<imag"])


@given(st.lists(PART, min_size=1, max_size=8).map("".join))
def test_every_placeholder_becomes_one_image_and_text_stays(text: str) -> None:
    messages = [{"role": "user", "content": f"x{text}"}, {"role": "assistant", "content": text}]
    system, user, assistant = normalise_messages(messages, system_prompt="p")
    assert num_images([system, user, assistant]) == f"x{text}".count("<image>")
    words = "".join(part.get("text", "") for part in user["content"])
    assert words.replace("\n", "") == f"x{text}".replace("<image>", "").replace("\n", "")
    assert assistant["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "video"}]}],
        [{"role": "assistant", "content": [{"type": "image"}]}],
        [{"role": "user", "content": "x"}],
    ],
)
def test_turns_that_are_not_a_demonstration_are_refused(turns: list) -> None:
    with pytest.raises(DatasetError):
        normalise_messages(turns, system_prompt="p")


def test_all_source_names_are_known() -> None:
    assert len(SOURCES) == 13
