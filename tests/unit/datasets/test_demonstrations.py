"""Raw sources written from demonstrations: complete, deterministic, and as untidy as real ones."""

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image

from osworld_pipeline.atomic_io import write_file
from osworld_pipeline.datasets import demonstrations as written
from osworld_pipeline.datasets.demonstration_records import broken_lines, chunk_records, pyautogui_record
from osworld_pipeline.datasets.demonstrations import Demonstration, write_raw_sources
from osworld_pipeline.datasets.sources import REPLAY_SOURCES, TASK_SOURCES
from osworld_pipeline.datasets.union.build import build_union_tables
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.domain.task import Task
from osworld_pipeline.errors import ActionParseError, DatasetError, StoreError
from osworld_pipeline.evaluation.suites import SuiteTask, build_suite
from osworld_pipeline.tables.owned import read_table

JSONL = (written.FINAL, written.V3, written.HYBRID, written.COMBINED, written.CLEAN, written.BC)
SUITE = build_suite(seed=0, num_train=3, num_heldout=1, screen=(512, 320))
TRAIN_TASKS = [item.task for item in SUITE.train]
HELDOUT_TASKS = [item.task for item in SUITE.heldout]


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 32), (shade % 256, 0, 0)).save(buffer, format="PNG")
    return buffer.getvalue()


def demonstration(item: SuiteTask, *, shade: int = 0) -> Demonstration:
    """What recording the oracle gives, with plain images in place of screenshots."""
    dialect = load_dialect("slime")
    messages: list[dict[str, Any]] = [{"role": "system", "content": [{"type": "text", "text": "You operate."}]}]
    for index, step in enumerate(item.oracle):
        text = f"[Task]\n{item.task.instruction}" if index == 0 else "[Last Action Result]\nok"
        answer = dialect.format(step.description, step.arguments)
        messages.append({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    images = tuple(png(shade + index) for index in range(len(item.oracle)))
    return Demonstration(task_id=item.task.task_id, messages=tuple(messages), images=images, reward=1.0)


def write(folder: Path, *, seed: int = 0, items: tuple[SuiteTask, ...] = SUITE.train) -> StateDir:
    state = StateDir(folder)
    write_raw_sources(
        [demonstration(item, shade=10 * index) for index, item in enumerate(items)],
        train_tasks=TRAIN_TASKS,
        heldout_tasks=HELDOUT_TASKS,
        state=state,
        seed=seed,
    )
    return state


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    return write(tmp_path_factory.mktemp("raw"))


def place_of(state: StateDir, name: str) -> Path:
    return next(source for source in (*REPLAY_SOURCES, *TASK_SOURCES) if source.name == name).locate(state)


def lines_of(state: StateDir, name: str) -> list[bytes]:
    return place_of(state, name).read_bytes().split(b"\n")


def records_of(state: StateDir, name: str) -> Iterator[dict[str, Any]]:
    for line in lines_of(state, name):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(turns_of(record), list):
            yield record


def turns_of(record: dict[str, Any]) -> Any:
    return record.get("messages", record.get("conversations"))


def id_of(record: dict[str, Any]) -> str:
    return record.get("task_id") or record.get("id") or record["metadata"]["task_id"]


def text_of(turn: Mapping[str, Any]) -> str:
    content = turn["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<image>") for part in content)


def placeholders(record: dict[str, Any]) -> int:
    return sum(text_of(turn).count("<image>") for turn in turns_of(record))


def answers(record: dict[str, Any]) -> list[str]:
    return [text_of(turn) for turn in turns_of(record) if turn["role"] == "assistant"]


def bytes_of(state: StateDir) -> dict[str, bytes]:
    return {str(path.relative_to(state.root)): path.read_bytes() for path in state.root.rglob("*") if path.is_file()}


def test_the_same_input_gives_the_same_bytes(tmp_path: Path):
    assert bytes_of(write(tmp_path / "a")) == bytes_of(write(tmp_path / "b"))


def test_another_seed_distributes_the_demonstrations_differently(tmp_path: Path):
    assert bytes_of(write(tmp_path / "a", seed=0)) != bytes_of(write(tmp_path / "b", seed=1))


def test_every_train_task_is_whole_and_clean_in_a_source(state: StateDir):
    dialect = load_dialect("slime")
    clean = set()
    for name in (written.FINAL, written.V3, written.COMBINED, written.CLEAN):
        for record in records_of(state, name):
            turns = [dialect.parse_strict(answer) for answer in answers(record)]
            assert not any(turn.fallback_used for turn in turns)
            assert turns[-1].action_type == "terminate"
            clean.add(id_of(record))
    assert clean == {task.task_id for task in TRAIN_TASKS}


def test_every_readable_record_has_an_image_for_each_placeholder(state: StateDir):
    num_records = 0
    for name in JSONL:
        for record in records_of(state, name):
            assert placeholders(record) == len(record["images"]) > 0
            for image in record["images"]:
                data = base64.b64decode(image.removeprefix("data:image/png;base64,"), validate=True)
                assert Image.open(io.BytesIO(data)).size == (64, 32)
            num_records += 1
    assert num_records > len(TRAIN_TASKS)


def test_sources_differ_in_their_fields_as_real_ones_do(state: StateDir):
    records = [record for name in JSONL for record in records_of(state, name)]
    assert {"messages" in record for record in records} == {True, False}
    assert {next(key for key in ("task_id", "id", "metadata") if key in record) for record in records} == {
        "task_id",
        "id",
        "metadata",
    }
    assert {type(turns_of(record)[0]["content"]) for record in records} == {str, list}
    assert {record["images"][0].startswith("data:") for record in records} == {True, False}
    assert {"reward" in record for record in records} == {True, False}


def test_some_demonstrations_are_in_several_sources(state: StateDir):
    whole = [
        (id_of(record), tuple(answers(record)))
        for name in (written.FINAL, written.V3, written.COMBINED, written.CLEAN)
        for record in records_of(state, name)
    ]
    assert len(whole) > len(set(whole)) == len(TRAIN_TASKS)


def test_long_demonstrations_are_also_cut_into_chunks(state: StateDir):
    ids = {id_of(record) for record in records_of(state, written.HYBRID)}
    assert any(task_id.endswith("_chunk0") for task_id in ids)
    assert any(task_id.endswith("_chunk1") for task_id in ids)
    assert {task_id.rsplit("_chunk", 1)[0] for task_id in ids} <= {task.task_id for task in TRAIN_TASKS}


def test_chunks_hold_all_turns_in_order_and_each_names_its_task():
    item = next(item for item in SUITE.train if len(item.oracle) == 4)
    whole = demonstration(item, shade=7)
    chunks = chunk_records(whole.task_id, whole.messages, whole.images)
    assert [id_of(chunk) for chunk in chunks] == [f"{whole.task_id}_chunk0", f"{whole.task_id}_chunk1"]
    said = [text_of(message) for message in whole.messages if message["role"] == "assistant"]
    assert [answer for chunk in chunks for answer in answers(chunk)] == said
    assert [base64.b64decode(image) for chunk in chunks for image in chunk["images"]] == list(whole.images)
    for chunk in chunks:
        assert item.task.instruction in text_of(turns_of(chunk)[1])
        assert placeholders(chunk) == len(chunk["images"]) == 2


def test_some_lines_cannot_be_used_for_different_reasons(state: StateDir):
    kinds = set()
    for name in JSONL:
        for line in filter(None, lines_of(state, name)):
            try:
                record = json.loads(line)
            except ValueError:
                kinds.add("no JSON")
                continue
            if not isinstance(record, dict):
                kinds.add("no object")
            elif turns_of(record) is None:
                kinds.add("no turns")
            elif not isinstance(turns_of(record), list):
                kinds.add("wrong turns")
    assert kinds == {"no JSON", "no object", "no turns", "wrong turns"}


def test_a_broken_line_is_not_valid_json():
    cut = broken_lines(b'{"task_id": "x", "messages": []}')[0]
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        json.loads(cut)


def test_one_source_has_wrong_formats_and_no_line_end_at_its_end(state: StateDir):
    raw = place_of(state, written.BC).read_bytes()
    assert not raw.endswith(b"\n")
    json.loads(raw.split(b"\n")[-1])
    dialect = load_dialect("slime")
    num_unreadable = num_pyautogui = 0
    for record in records_of(state, written.BC):
        try:
            turns = [dialect.parse_strict(answer) for answer in answers(record)]
        except ActionParseError:
            num_unreadable += 1
            continue
        num_pyautogui += "<tool_call>" not in answers(record)[0]
        assert turns
    assert num_unreadable == written.UNKNOWN_ACTION_RECORDS
    assert num_pyautogui == written.PYAUTOGUI_RECORDS


def test_pyautogui_answers_mean_the_same_actions():
    dialect = load_dialect("slime")
    for item in SUITE.train:
        whole = demonstration(item)
        bare = answers(pyautogui_record(whole.task_id, whole.messages, whole.images))
        assert not any("tool_call" in answer for answer in bare)
        assert [dialect.parse_strict(answer).arguments for answer in bare] == [step.arguments for step in item.oracle]


def test_task_tables_hold_configurations_of_all_platforms(state: StateDir):
    rows = pq.read_table(place_of(state, "distill_train")).to_pylist()
    ids = [row["task_id"] for row in rows]
    assert len(ids) > len(set(ids)), "one task must have two configurations"
    assert any("_chunk" in task_id for task_id in ids)
    assert any(json.loads(row["task_config"])["snapshot"] == "excel" for row in rows)
    known = {task.task_id: task for task in TRAIN_TASKS}
    first = {row["task_id"]: json.loads(row["task_config"]) for row in reversed(rows)}
    for task_id in set(first) & set(known):
        assert Task.from_config(first[task_id]).config_digest == known[task_id].config_digest
    heldout = pq.read_table(place_of(state, "distill_test")).column("task_id").to_pylist()
    assert heldout == [task.task_id for task in HELDOUT_TASKS]
    assert 0 < pq.read_table(place_of(state, "variance_subset")).num_rows < len(TRAIN_TASKS)


def test_merged_tables_next_to_the_datasets_hold_ids_only(state: StateDir):
    folder = state.datasets / "osworld-merged-replay"
    table = pq.read_table(folder / "osworld_gspo_tasks.parquet")
    assert table.column("task_id").to_pylist() == [task.task_id for task in TRAIN_TASKS]
    assert "task_config" not in table.column_names
    assert pq.read_table(folder / "osworld_gspo_tasks_aligned.parquet").num_rows == -(-len(TRAIN_TASKS) // 2)


def test_the_osworld_tree_holds_every_task_and_an_index(state: StateDir):
    root = state.osworld_repo / "evaluation_examples"
    index = json.loads((root / "test_all.json").read_text())
    for task in [*TRAIN_TASKS, *HELDOUT_TASKS]:
        path = root / "examples" / task.domain / f"{task.task_id}.json"
        assert Task.from_config(json.loads(path.read_text())).config_digest == task.config_digest
        assert task.task_id in index[task.domain]
    windows = json.loads(next(root.glob("examples/excel/*.json")).read_text())
    assert "C:\\Users" in windows["config"][0]["parameters"]["path"]


def test_writing_again_removes_tasks_of_an_earlier_suite_and_no_others(tmp_path: Path):
    examples = tmp_path / "osworld" / "evaluation_examples" / "examples" / "os"
    examples.mkdir(parents=True)
    (examples / "desktop-basics-juggle-0001.json").write_text("{}")
    (examples / "e0df059f.json").write_text("{}")
    write(tmp_path)
    assert not (examples / "desktop-basics-juggle-0001.json").exists()
    assert (examples / "e0df059f.json").exists()


def test_every_source_of_the_table_is_written(state: StateDir):
    for source in (*REPLAY_SOURCES, *TASK_SOURCES):
        assert source.locate(state).exists(), source.name


def test_nothing_temporary_is_left(state: StateDir):
    assert not [path for path in state.root.rglob(".*") if path.is_file()]


def test_one_demonstration_is_enough_for_every_source(tmp_path: Path):
    state = write(tmp_path, items=SUITE.train[:1])
    for name in JSONL:
        assert list(records_of(state, name)), name


def test_without_demonstrations_nothing_is_written(tmp_path: Path):
    with pytest.raises(DatasetError, match="no demonstration"):
        write(tmp_path, items=())
    assert not list(tmp_path.iterdir())


def test_a_demonstration_of_a_heldout_task_is_refused(tmp_path: Path):
    with pytest.raises(DatasetError, match=r"rename_folder-0004 has a demonstration and is not a training task"):
        write(tmp_path, items=SUITE.heldout[:1])


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "blocked").write_text("a file where a folder must be")
    with pytest.raises(StoreError, match=r"cannot write .*blocked"):
        write_file(tmp_path / "blocked" / "file.jsonl", b"x")


def test_the_union_of_the_written_sources_keeps_every_train_task_and_rejects_what_is_wrong(tmp_path: Path):
    state = write(tmp_path)
    summary = build_union_tables(state, system_prompt="You operate a computer.")
    trained = {task.task_id for task in TRAIN_TASKS}
    assert set(read_table(state, "train_tasks").column("task_id").to_pylist()) == trained
    assert set(read_table(state, "replay_buffer").column("task_id").to_pylist()) == trained
    rows = {row["task_id"]: row for row in read_table(state, "union_tasks").to_pylist()}
    assert {row["platform"] for row in rows.values()} == {"ubuntu", "windows", "unknown"}
    for task in [*TRAIN_TASKS, *HELDOUT_TASKS]:
        assert Task.from_config(json.loads(rows[task.task_id]["task_config"])).config_digest == task.config_digest
    assert summary.stats["replay_stats"]["dropped_parse"] == written.UNKNOWN_ACTION_RECORDS
    assert summary.num_duplicates > 0
    assert set(read_table(state, "rejects").column("kind").to_pylist()) == {"malformed", "dropped_parse"}
