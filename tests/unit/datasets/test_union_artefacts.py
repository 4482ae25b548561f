"""The four artefacts: a result worked out by hand from Slime-OSWorld's rules, and what a record may and may not be."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from raw_samples import SOURCES, config, image_bytes, image_text, put_lines, put_table, put_task, record, turn

from osworld_pipeline.datasets.artefacts import write_union_artefacts
from osworld_pipeline.datasets.union.build import UnionSummary
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

CLICK = turn({"action": "left_click", "coordinate": [3, 4]})
DONE = turn({"action": "terminate", "status": "success"})


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    """Its datasets folder is the root of the raw sources."""
    return StateDir(tmp_path)


def build(state: StateDir, **options: Any) -> UnionSummary:
    return write_union_artefacts(
        state.datasets, state.osworld_repo, state.root / "out", system_prompt="PROMPT", **options
    )


def table(state: StateDir, name: str) -> list[dict[str, Any]]:
    return pq.read_table(state.root / "out" / f"osworld_{name}.parquet").to_pylist()


def replay(state: StateDir) -> list[dict[str, Any]]:
    data = (state.root / "out" / "osworld_replay_train.jsonl").read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def test_the_golden_input_gives_the_golden_artefacts(state: StateDir) -> None:
    turns = [{"role": "user", "content": "<image>\nGo — now", "name": "u"}, {"role": "assistant", "content": CLICK}]
    listed = [{"role": "system", "content": [{"type": "text", "text": "old"}]}, *turns]
    unknown = [{"role": "assistant", "content": turn({"action": "ponder"})}]
    put_lines(state, "bc_sft", [{"id": "a_chunk7", "messages": turns, "images": [image_text(1)]}])  # again, rank 0
    put_lines(state, "sft_curated_final", [
        {"metadata": {"id": "a_chunk1"}, "conversations": listed, "images": [image_text(1)], "reward": 0.5},
        {"task_id": "b", "messages": unknown, "images": []},
    ])  # fmt: skip
    put_lines(state, "sft_clean", [{"task_id": "c", "messages": [*turns[1:], {"role": "assistant", "content": DONE}]}])
    put_lines(state, "exploratory_rollouts", [{"task_id": "d"}, {"id": "win_chunk0"}])
    in_distill = {"instruction": "I — 1", "evaluator": {"func": "f"}, "id": "other", "domain": "chrome", "big": 2**70}
    put_table(state, "distill_train", [{"task_id": "a_chunk2", "task_config": json.dumps(in_distill)}])
    put_table(state, "distill_test", [{"task_id": "a", "task_config": json.dumps(config("a"))}])
    put_table(state, "gspo_tasks", [{"task_id": "e"}])
    put_task(state, config("c", related_apps=["gimp"]))
    put_task(state, config("a"))
    put_task(state, config("win", snapshot="Excel"))
    put_task(state, config("tree_only"))
    summary = build(state)
    assert replay(state) == [
        {
            "messages": [{"role": "system", "content": "PROMPT"}, *turns],
            "images": [image_text(1)], "reward": 0.5, "task_id": "a", "num_steps": 1, "original_task_id": "a_chunk1",
            "source_dataset": "sft_curated_final", "quality_rank": 5,
        },
        {
            "messages": [{"role": "system", "content": "PROMPT"}, turns[1], {"role": "assistant", "content": DONE}],
            "images": [], "reward": 1.0, "task_id": "c", "num_steps": 2, "original_task_id": "c",
            "source_dataset": "sft_clean", "quality_rank": 1,
        },
    ]  # fmt: skip
    big = json.dumps({**in_distill, "id": "a"}, ensure_ascii=False)
    assert big.endswith('"id": "a", "domain": "chrome", "big": 1180591620717411303424}')

    def row(task_id: str, domain: str, instruction: str, text: str, source: str, platform: str) -> dict[str, Any]:
        return {
            "task_id": task_id, "prompt": task_id, "domain": domain, "instruction": instruction, "task_config": text,
            "task_config_source": source, "has_task_config": source != "missing", "platform": platform,
        }  # fmt: skip

    a = row("a", "chrome", "I — 1", big, "distill_data", "ubuntu")
    c_config = json.dumps(config("c", related_apps=["gimp"]))
    c = row("c", "gimp", "Solve c.", c_config, "osworld_repo", "ubuntu")
    win_config = json.dumps(config("win", snapshot="Excel"))
    assert table(state, "tasks_all") == [
        a,
        row("b", "", "", "{}", "missing", "unknown"),
        c,
        row("d", "", "", "{}", "missing", "unknown"),
        row("e", "", "", "{}", "missing", "unknown"),
        row("win", "terminal", "Solve win.", win_config, "osworld_repo", "windows"),
    ]
    assert table(state, "tasks_train") == [a, c]
    assert json.loads((state.root / "out" / "osworld_train_stats.json").read_text()) == {
        "union_task_ids": 6, "task_config_distill": 1, "task_config_osworld": 4, "union_all_rows": 6,
        "union_ready_rows": 2, "replay_ready_rows": 2, "platform_counts": {"ubuntu": 2, "unknown": 3, "windows": 1},
        "replay_stats": {
            "input_samples": 4, "kept_samples": 2, "dropped_parse": 1, "deduped": 0,
            "per_dataset": {"sft_curated_final": 1, "sft_clean": 1},
        },
    }  # fmt: skip
    assert [(row["source_dataset"], row["source_line"], row["kind"]) for row in table(state, "rejects")] == [
        ("sft_curated_final", 2, "dropped_parse")
    ]
    assert summary.num_duplicates == 1
    assert "sft_hybrid" in summary.absent


def test_tree_tasks_are_included_only_on_request(state: StateDir) -> None:
    put_task(state, config("tree_only"))
    build(state)
    assert table(state, "tasks_all") == []
    build(state, with_tree_tasks=True)
    assert [row["task_id"] for row in table(state, "tasks_all")] == ["tree_only"]


def test_without_any_source_the_error_names_the_expected_folder(state: StateDir) -> None:
    with pytest.raises(DatasetError, match="name the folder that holds osworld_datasets/"):
        build(state)
    assert not (state.root / "out").exists()


def test_equal_messages_are_one_demonstration_in_any_order_of_their_keys(state: StateDir) -> None:
    plain, turned = record()["messages"], [dict(reversed(turn.items())) for turn in record()["messages"]]
    put_lines(state, "bc_sft", [record(messages=turned), record(messages=plain), record("t2", messages=turned)])
    assert build(state).num_duplicates == 1
    assert [row["messages"][1:] for row in replay(state)] == [plain[1:], plain[1:]]


@pytest.mark.parametrize("odd", [{"n": 2**80}, {"n": float("nan")}, {"n": -0.0}, {"n": [None, True, {"x": 1.5}]}])
def test_other_fields_of_a_message_stay_unchanged(state: StateDir, odd: dict) -> None:
    messages = record()["messages"]
    messages[1] = {**messages[1], **odd}
    put_lines(state, "bc_sft", [record(messages=messages)])
    build(state)
    (row,) = replay(state)
    assert repr(row["messages"][1]) == repr(messages[1])


def test_a_copy_without_images_keeps_its_placeholders_as_text(state: StateDir) -> None:
    put_lines(state, "bc_sft", [record(images=[]), record("t2", images=None), record("t3", images=[image_text(1)])])
    build(state)
    assert [row["images"] for row in replay(state)] == [[], None]
    assert [row["kind"] for row in table(state, "rejects")] == ["bad_image"]


def test_images_may_be_paths_that_stay_in_the_source_folder(state: StateDir) -> None:
    names = {"in": ["shots/1.png"] * 2, "out": ["../1.png"] * 2, "link": ["link.png"] * 2, "none": ["no.png"] * 2}
    source = put_lines(state, "bc_sft", [record(name, images=images) for name, images in names.items()])
    folder = source.locate(state).parent
    (folder / "shots").mkdir()
    (folder / "shots" / "1.png").write_bytes(image_bytes())
    (folder.parent / "1.png").write_bytes(image_bytes())
    (folder / "link.png").symlink_to(folder.parent / "1.png")
    build(state)
    (row,) = replay(state)
    assert (row["task_id"], row["images"]) == ("in", names["in"])
    reasons = {row["task_id"]: row["reason"] for row in table(state, "rejects")}
    assert "points outside the source's folder" in reasons["out"]
    assert "points outside the source's folder" in reasons["link"]
    assert "No such file" in reasons["none"]


def test_a_bare_string_evaluator_is_a_located_reject_and_is_not_trained_on(state: StateDir) -> None:
    put_task(state, config("t1", evaluator="exact_match"))
    put_task(state, config("t2"))
    put_lines(state, "bc_sft", [record("t1"), record("t2")])
    build(state)
    assert [row["task_id"] for row in table(state, "tasks_train")] == ["t2"]
    (reject,) = table(state, "rejects")
    assert (reject["kind"], reject["source_path"]) == ("bad_task", "evaluation_examples/examples/os/t1.json")


def test_of_two_tree_files_with_one_id_the_later_in_order_counts_and_the_other_is_reported(state: StateDir) -> None:
    put_task(state, config("t1", instruction="first"), domain="Windows")
    put_task(state, config("t1", instruction="second"), domain="os")
    build(state, with_tree_tasks=True)
    assert [row["instruction"] for row in table(state, "tasks_all")] == ["second"]
    (reject,) = table(state, "rejects")
    assert (reject["kind"], reject["source_path"]) == (
        "duplicate_task",
        "evaluation_examples/examples/Windows/t1.json",
    )


ODD_LINES = [
    (b"\xef\xbb\xbf" + json.dumps(record("bom")).encode(), None),
    (json.dumps(record("crlf")).encode() + b"\r", None),
    (json.dumps(record("separator\u2028")).encode(), None),
    (json.dumps(record("separator\u2028"), ensure_ascii=False).encode(), None),
    (json.dumps(record("nul\0")).encode(), None),
    (json.dumps(record("nan", reward=float("nan"))).encode(), "reward is not a number"),
    (json.dumps(record("half \ud800")).encode(), "an incomplete character"),
    (b'{"task_id": "\xff"}', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b"\0\0\0", "not JSON"),
    (b"null", "not a JSON object"),
]


@pytest.mark.parametrize(("line", "reason"), ODD_LINES)
def test_odd_unicode_and_numbers_affect_no_other_line(state: StateDir, line: bytes, reason: str | None) -> None:
    path = SOURCES["bc_sft"].locate(state)
    path.parent.mkdir(parents=True)
    path.write_bytes(line + b"\n\n" + json.dumps(record("good")).encode())
    build(state)
    rows, rejects = replay(state), table(state, "rejects")
    assert rows[-1]["task_id"] == "good"
    assert len(rows) == (2 if reason is None else 1)
    assert [(row["source_line"], reason in row["reason"]) for row in rejects if reason] == (
        [(1, True)] if reason else []
    )


def test_real_osworld_tasks_are_built_with_every_reject_explained(real_data: Path, tmp_path: Path) -> None:
    summary = write_union_artefacts(
        tmp_path, real_data / "osworld", tmp_path / "out", system_prompt="p", with_tree_tasks=True
    )
    rejects = pq.read_table(tmp_path / "out" / "osworld_rejects.parquet").to_pylist()
    assert summary.num_rows["osworld_tasks_all.parquet"] > 400
    assert {row["kind"] for row in rejects} <= {"duplicate_task", "bad_task", "malformed"}
    assert all(row["reason"] and row["source_path"] for row in rejects)
