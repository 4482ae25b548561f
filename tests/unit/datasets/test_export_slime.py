"""Slime-OSWorld's files out of the store: its own buffer loads them, and each row says where it came from."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from export_samples import DEMONSTRATION, PROMPT, make_state, picture, replay_row
from raw_samples import config, put_lines, put_task, record, turn

from osworld_pipeline.datasets.artefacts import write_union_artefacts
from osworld_pipeline.datasets.exporters.selection import Selection
from osworld_pipeline.datasets.exporters.slime import chat_content, export_slime
from osworld_pipeline.datasets.importers.folder import ImportOptions
from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
from osworld_pipeline.datasets.normalize import normalise_messages
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError, TableError
from osworld_pipeline.tables.owned import read_table, write_table


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    return make_state(tmp_path_factory.mktemp("export") / "var")


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "osworld_replay_train.jsonl").read_text().splitlines()]


def test_a_demonstration_is_a_row_of_the_reference_with_its_provenance(state: StateDir, tmp_path: Path) -> None:
    done = export_slime(state, tmp_path / "out", system_prompt=PROMPT)
    assert (done.num_demonstrations, done.num_online, done.num_images) == (2, 0, 2)
    assert records(tmp_path / "out")[0] == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "<image>\n[Task]\nRename é."},
            {"role": "assistant", "content": "Action: type\n<tool_call>{}</tool_call>"},
        ],
        "images": [base64.b64encode(picture(200)).decode()],
        "reward": 1.0,
        "task_id": "a",
        "num_steps": 1,
        "original_task_id": "a_chunk0",
        "source_dataset": "sft_clean",
        "quality_rank": 1,
        "metadata": {
            "task_id": "a", "row_id": "r1", "kind": "demonstration", "is_reward_assumed": True, "dialect": "slime",
            "licence": "mit", "source_path": "x.jsonl", "source_line": 7, "episode_id": None, "checkpoint_id": None,
            "recorded_at": None, "verified_reward": None, "verified_at": None,
        },
    }  # fmt: skip


def test_an_online_success_is_written_as_the_model_saw_it(state: StateDir, tmp_path: Path) -> None:
    done = export_slime(state, tmp_path / "out", system_prompt=PROMPT, with_online=True)
    assert (done.num_demonstrations, done.num_online) == (2, 1)
    row = records(tmp_path / "out")[-1]
    assert [turn["role"] for turn in row["messages"]] == ["system"] + ["user", "assistant"] * 3
    assert row["messages"][0]["content"] == PROMPT
    assert row["messages"][1]["content"] == "<image>\nTask: rename alpha"
    assert row["messages"][2]["content"] == "Action: pyautogui.click(1, 2)\n<tool_call>{}</tool_call>"
    assert [base64.b64decode(image) for image in row["images"]] == [picture(1), picture(2), picture(3)]
    assert (row["source_dataset"], row["metadata"]["episode_id"]) == ("online", "t-success")
    assert (row["metadata"]["checkpoint_id"], row["reward"], row["num_steps"]) == ("gspo-1", 1.0, 3)


def test_turns_are_read_back_unchanged() -> None:
    text, image = (lambda words: {"type": "text", "text": words}), {"type": "image"}
    contents = [
        [image, text("after")], [text("before\n"), image], [image, image, text("\n\ntwo")], [text("no image")],
        [text("a"), image, text("b"), image], [text("says <image> itself"), image], [text("one"), text("two"), image],
    ]  # fmt: skip
    for content in contents:
        written = chat_content({"role": "user", "content": content})
        turns = [{"role": "user", "content": written}, {"role": "assistant", "content": "x"}]
        assert normalise_messages(turns, system_prompt="p")[1]["content"] == content


def test_the_task_tables_have_the_references_columns(state: StateDir, tmp_path: Path) -> None:
    done = export_slime(state, tmp_path / "out", system_prompt=PROMPT)
    tasks = pq.read_table(tmp_path / "out" / "osworld_tasks_all.parquet")
    assert tasks.column_names == [
        "task_id", "prompt", "domain", "instruction", "task_config", "task_config_source", "has_task_config", "platform"
    ]  # fmt: skip
    assert tasks.column("task_id").to_pylist() == ["a", "b", "c"]
    assert tasks.column("domain").to_pylist() == ["", "chrome", ""]
    train = pq.read_table(tmp_path / "out" / "osworld_tasks_train.parquet")
    # b has a replay row, but is a Windows task.
    assert train.column("task_id").to_pylist() == ["a"]
    assert (done.num_tasks, done.num_train_tasks) == (3, 1)


def test_tasks_to_train_on_are_those_with_a_row_in_this_export(state: StateDir, tmp_path: Path) -> None:
    done = export_slime(state, tmp_path / "out", system_prompt=PROMPT, selection=Selection(where="task_id = 'b'"))
    assert (done.num_demonstrations, done.num_train_tasks) == (1, 0)


@pytest.mark.parametrize(
    ("selection", "counts"),
    [
        (Selection(min_reward=1.5), (0, 0)),
        (Selection(licences=("MIT",)), (2, 0)),
        (Selection(licences=("apache-2.0",)), (0, 0)),
        (Selection(checkpoints=("gspo-1",)), (2, 1)),
        (Selection(checkpoints=("gspo-1",), where="task_id = 'a'"), (1, 1)),
        (Selection(where="verified_reward >= 0.5"), (0, 1)),
    ],
)
def test_filters_choose_rows(state: StateDir, tmp_path: Path, selection: Selection, counts: tuple[int, int]) -> None:
    done = export_slime(state, tmp_path / "out", system_prompt=PROMPT, selection=selection, with_online=True)
    assert (done.num_demonstrations, done.num_online) == counts


def test_bad_sql_gives_one_clear_error_and_writes_nothing(state: StateDir, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r'refused the filters over `replay`: .*"nothing" not found'):
        export_slime(state, tmp_path / "out", system_prompt=PROMPT, selection=Selection(where="nothing = 1"))
    assert not (tmp_path / "out").exists()


def test_a_missing_image_ends_the_export_and_leaves_nothing(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "var")
    write_table(state, "replay_buffer", [replay_row("r2", "a", images=["0" * 64])])
    with pytest.raises(StoreError, match="image 0000"):
        export_slime(state, tmp_path / "out", system_prompt=PROMPT)
    assert [path.name for path in tmp_path.iterdir()] == ["var"]


def test_progress_counts_to_the_end(state: StateDir, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    export_slime(
        state, tmp_path / "out", system_prompt=PROMPT, with_online=True, on_progress=lambda *at: seen.append(at)
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_state_without_rows_gives_an_empty_export(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    done = export_slime(StateDir(tmp_path / "var"), tmp_path / "out", system_prompt=PROMPT, with_online=True)
    assert (done.num_demonstrations, done.num_tasks) == (0, 0)
    assert records(tmp_path / "out") == []


def test_the_command_prints_counts_and_refuses_with_one_clear_error(state: StateDir, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "osworld_pipeline.cli", "export", "slime", str(out), "--state", str(state.root)]
    done = subprocess.run([*command, "--online"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{out}: 2 demonstrations, 1 online successes, 5 images; 3 tasks, 1 to train on\n"
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert again.stderr.startswith("StoreError: ")
    assert "add --replace to replace it" in " ".join(again.stderr.split())


def raw_state(root: Path) -> StateDir:
    """Sources with a chunk, a duplicate demonstration, a Windows task and one without a grader."""
    state = StateDir(root)
    chunk = record("t1_chunk2", messages=[{"role": "user", "content": "Go é."}, {"role": "assistant", "content": STOP}])
    put_lines(state, "sft_clean", [record("t1"), chunk | {"images": []}, record("t2"), record("t3")])
    put_lines(state, "bc_sft", [record("t1"), record("t4")])
    put_task(state, config("t1", domain="chrome"), domain="os")
    put_task(state, config("t2", snapshot="excel"))
    ungraded = config("t3")
    del ungraded["evaluator"]
    put_task(state, ungraded)
    return state


STOP = turn({"action": "wait"})


def test_the_export_has_the_values_of_the_union_builds_own_artefacts(tmp_path: Path) -> None:
    state = raw_state(tmp_path / "var")
    build_union_tables(state, system_prompt=PROMPT, num_workers=0)
    built, out = tmp_path / "built", tmp_path / "out"
    write_union_artefacts(state.datasets, state.osworld_repo, built, system_prompt=PROMPT, num_workers=0)
    export_slime(state, out, system_prompt=PROMPT)

    def reported(folder: Path) -> list[dict[str, Any]]:
        rows = [{key: value for key, value in row.items() if key != "metadata"} for row in records(folder)]
        return sorted(rows, key=lambda row: (row["task_id"], row["original_task_id"], row["source_dataset"]))

    assert reported(out) == reported(built)
    assert len(reported(out)) == 5
    for name in ("osworld_tasks_all.parquet", "osworld_tasks_train.parquet"):
        ours, theirs = pq.read_table(out / name), pq.read_table(built / name)
        assert ours.schema.equals(theirs.schema)
        # The same config; the table's has its keys in order.
        for mine, reference in zip(ours.to_pylist(), theirs.to_pylist(), strict=True):
            assert json.loads(mine.pop("task_config")) == json.loads(reference.pop("task_config"))
            assert mine == reference
    assert pq.read_table(out / "osworld_tasks_train.parquet").column("task_id").to_pylist() == ["t1", "t3"]


def test_our_importer_makes_the_same_demonstrations_of_the_export(tmp_path: Path) -> None:
    state, other = raw_state(tmp_path / "var"), StateDir(tmp_path / "other")
    build_union_tables(state, system_prompt=PROMPT, num_workers=0)
    export_slime(state, tmp_path / "out", system_prompt=PROMPT)
    options = ImportOptions(name="back", licence="mit")
    import_slime_replay(other, tmp_path / "out" / "osworld_replay_train.jsonl", options)
    build_union_tables(other, system_prompt=PROMPT, num_workers=0)

    def reported(place: StateDir) -> list[tuple[Any, ...]]:
        rows = read_table(place, "replay_buffer").to_pylist()
        return sorted((row["row_id"], row["task_id"], row["reward"], row["images"]) for row in rows)

    assert reported(other) == reported(state)
    assert len(reported(state)) == 5


INJECT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("reference", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["reference"] = module
spec.loader.exec_module(module)
buffer = module.ExperienceReplayBuffer(sys.argv[2])
solved = buffer.maybe_inject("a", [0.0, 1.0])
chosen = buffer.maybe_inject("b", [0.0, 0.0]).to_sample_dict()
print(json.dumps({"stats": buffer.get_stats(), "solved": solved, "chosen": chosen,
                  "coverage": buffer.get_coverage(["a", "b", "c"])}))
"""


def test_the_references_own_buffer_loads_and_injects_the_export(state: StateDir, tmp_path: Path) -> None:
    peers = os.environ.get("OSWORLD_PEERS")
    if not peers:
        pytest.skip("OSWORLD_PEERS names no folder with a checkout of Slime-OSWorld (slime/)")
    export_slime(state, tmp_path / "out", system_prompt=PROMPT, with_online=True)
    module = Path(peers) / "slime" / "slime_osworld" / "replay_buffer.py"
    command = [sys.executable, "-c", INJECT, str(module), str(tmp_path / "out" / "osworld_replay_train.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    reported = json.loads(done.stdout)
    assert (reported["stats"]["total_tasks"], reported["stats"]["total_samples"]) == (2, 3)
    assert reported["solved"] is None
    assert reported["coverage"] == pytest.approx(2 / 3)
    chosen = reported["chosen"]
    assert chosen["conversations"][1]["content"].startswith("<image>\n")
    assert base64.b64decode(chosen["images"][0]) == picture(200)
    assert (chosen["metadata"]["row_id"], chosen["metadata"]["source_line"]) == ("r2", 7)
    assert len(DEMONSTRATION) == len(chosen["conversations"])
