"""Which demonstrations can be played back: whole ones and complete sets of chunks; each other one has a reason."""

import io
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from raw_samples import config, turn

from osworld_pipeline.columns import OWNED_TABLES
from osworld_pipeline.domain.digest import canonical_json
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe, load_recipe
from osworld_pipeline.runs.verify_replay import playback_plan
from osworld_pipeline.runs.verify_replay.playback import command_on_screen
from osworld_pipeline.runs.verify_replay.playback_plan import PlaybackPlan, chosen_playbacks, plan_playbacks
from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.tables.owned import write_table

CLICK = {"action": "left_click", "coordinate": [16, 8]}
DONE = {"action": "terminate", "status": "success"}
SHOWN = 32, 16


def image(blobs: BlobStore) -> str:
    sink = io.BytesIO()
    Image.new("RGB", SHOWN).save(sink, "PNG")
    return blobs.write(sink.getvalue(), suffix="png")


def row(state: StateDir, row_id: str, *actions: dict[str, Any], task_id: str = "t1", **changes: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for action in actions or (CLICK, DONE):
        messages.append({"role": "user", "content": [{"type": "image"}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn(action)}]})
    fields = {
        "row_id": row_id,
        "task_id": task_id,
        "original_task_id": task_id,
        "source_dataset": "bc_sft",
        "source_path": "a.jsonl",
        "source_line": int("".join(filter(str.isdigit, row_id)) or 0),
        "reward": 1.0,
        "dialect": "slime",
        "messages": messages,
        "images": [image(BlobStore(state.blobs))] * (len(messages) // 2),
    }
    return fields | changes


def plan(state: StateDir, *rows: dict[str, Any], tasks: tuple[str, ...] = ("t1", "t2")) -> PlaybackPlan:
    configs = [{"task_id": name, "task_config": canonical_json(config(name)), "domain": "os"} for name in tasks]
    write_table(state, "replay_buffer", pa.Table.from_pylist(list(rows), schema=OWNED_TABLES["replay_buffer"]))
    write_table(state, "train_tasks", pa.Table.from_pylist(configs, schema=OWNED_TABLES["train_tasks"]))
    return plan_playbacks(state, min_reward=0.5)


@pytest.fixture
def state(tmp_path) -> StateDir:
    return StateDir(tmp_path)


def chunk(state: StateDir, row_id: str, number: int, *actions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return row(state, row_id, *actions, **{"original_task_id": f"t1_chunk{number}"} | changes)


def ids(plan: PlaybackPlan) -> list[tuple[str, ...]]:
    return sorted(playback.row_ids for playback in plan.playbacks)


def test_a_whole_demonstration_is_one_playback_with_the_place_it_came_from(state: StateDir) -> None:
    found = plan(state, row(state, "r7"))
    assert ids(found) == [("r7",)]
    assert found.playbacks[0].source == "bc_sft: a.jsonl:7"
    assert [dict(turn.arguments) for turn in found.playbacks[0].turns] == [CLICK, DONE]
    assert [turn.image_size for turn in found.playbacks[0].turns] == [SHOWN, None]
    assert found.num_unplayable == 0


def test_a_point_moves_from_the_image_to_a_screen_of_another_shape_and_stays_on_it(state: StateDir) -> None:
    click = plan(state, row(state, "r1")).playbacks[0].turns[0]
    assert command_on_screen(click, SHOWN) == "pyautogui.click(16, 8)"
    assert command_on_screen(click, (1920, 1080)) == "pyautogui.click(960, 540)"
    edge = plan(state, row(state, "r1", {"action": "left_click", "coordinate": [32, 16]})).playbacks[0].turns[0]
    assert command_on_screen(edge, (1920, 1080)) == "pyautogui.click(1919, 1079)"


def test_chunks_of_one_file_are_played_in_order_as_one_demonstration(state: StateDir) -> None:
    rows = [chunk(state, "r1", 0, CLICK), chunk(state, "r2", 1, CLICK), chunk(state, "r3", 2, DONE)]
    again = [chunk(state, "r4", 0, CLICK), chunk(state, "r5", 1, DONE)]
    found = plan(state, *reversed([*rows, *again]))
    assert ids(found) == [("r1", "r2", "r3"), ("r4", "r5")]


def test_chunks_left_in_two_files_after_deduplication_are_joined_if_there_is_one_of_each(state: StateDir) -> None:
    rows = [chunk(state, "r1", 0, CLICK), chunk(state, "r2", 1, DONE, source_path="b.jsonl")]
    assert ids(plan(state, *rows)) == [("r1", "r2")]
    doubtful = plan(state, *rows, chunk(state, "r3", 0, DONE, CLICK, source_path="c.jsonl"))
    assert ids(doubtful) == []
    assert doubtful.unplayable == {playback_plan.INCOMPLETE: ("r1", "r2", "r3")}


@pytest.mark.parametrize(
    ("numbers", "last", "reason"),
    [
        ((0, 2), DONE, playback_plan.INCOMPLETE),
        ((1,), DONE, playback_plan.INCOMPLETE),
        ((0, 1), CLICK, playback_plan.ENDS_OPEN),
    ],
)
def test_incomplete_sets_of_chunks_are_not_played(state: StateDir, numbers, last, reason: str) -> None:
    rows = [chunk(state, f"r{number}", number, last if number == numbers[-1] else CLICK) for number in numbers]
    found = plan(state, *rows)
    assert found.playbacks == ()
    assert set(found.unplayable) == {reason}
    assert found.num_unplayable == len(numbers)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task_id": "stranger"}, playback_plan.NO_TASK),
        ({"reward": 0.25}, playback_plan.NOT_CLAIMED),
        ({"dialect": "klingon"}, "no dialect named 'klingon'"),
        ({"images": ["ab" * 32] * 2}, "it refers to an image that is missing from the store or damaged"),
        ({"images": []}, "it refers to an image that it does not have"),
    ],
)
def test_a_demonstration_that_cannot_be_verified_is_listed_with_the_reason(
    state: StateDir, changes, reason: str
) -> None:
    found = plan(state, row(state, "r1", **changes), row(state, "r2"))
    assert ids(found) == [("r2",)]
    ((reported, rows),) = found.unplayable.items()
    assert reported.startswith(reason)
    assert rows == ("r1",)


def test_a_turn_that_cannot_be_read_is_reported_with_its_dialect(state: StateDir) -> None:
    odd = row(state, "r1")
    odd["messages"][1]["content"][0]["text"] = "I ponder."
    assert list(plan(state, odd).unplayable) == ["a turn cannot be read in the dialect slime"]


def test_rows_of_an_older_table_have_no_dialect_and_are_read_as_slime(state: StateDir) -> None:
    assert ids(plan(state, row(state, "r1", dialect=None))) == [("r1",)]


def test_a_sample_takes_one_demonstration_of_each_task_before_any_second(state: StateDir) -> None:
    found = plan(state, *(row(state, f"r{n}", task_id="t1") for n in range(5)), row(state, "r9", task_id="t2"))
    recipe = load_recipe("smoke")

    def chosen(**replay: Any) -> list[str]:
        data = recipe.model_dump(mode="json")
        changed = Recipe.model_validate({**data, "replay": {**data["replay"], **replay}})
        return [playback.task_id for playback in chosen_playbacks(found, changed)]

    assert sorted(chosen(verify="sample", verification_sample=2)) == ["t1", "t2"]
    assert len(chosen(verify="all")) == 6
    assert chosen(verify="none") == []


def test_without_a_table_there_is_nothing_to_play(state: StateDir) -> None:
    found = plan_playbacks(state, min_reward=0.5)
    assert found.playbacks == ()
    assert found.num_unplayable == 0
