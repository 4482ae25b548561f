"""Values that JSON and Python allow and that a float, a writer or a column cannot hold: a record is rejected, and its
import continues."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from import_samples import OPTIONS, agentnet_record, png, put_agentnet, put_attempt, put_task, read_lines

from osworld_pipeline.datasets.importers.agentnet import import_agentnet
from osworld_pipeline.datasets.importers.osworld_results import import_osworld_results
from osworld_pipeline.datasets.importers.slime_replay import import_slime_replay
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.tables.catalog import fresh_views

HUGE = int("9" * 401)
DEEP: Any = json.loads("[" * 600 + "]" * 600)
END = "computer.terminate(status='success')"
CALL = 'Action: Wait\n<tool_call>{"name":"computer_use","arguments":{"action":"wait"}}</tool_call>'


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


@pytest.mark.parametrize(
    "actions",
    [[f"pyautogui.click({HUGE}, 4)"], [{"action_type": "CLICK", "x": HUGE}], [{"action_type": DEEP}]],
    ids=["huge click", "huge action", "deep action"],
)
def test_a_hostile_action_does_not_end_the_import(state: StateDir, tmp_path: Path, actions: list[Any]) -> None:
    for name, played in (("bad", actions), ("good", ["pyautogui.click(3, 4)"])):
        put_task(state.osworld_repo, name)
        put_attempt(tmp_path / "results", name, [*played, "DONE"])
    done = import_osworld_results(state, tmp_path / "results", OPTIONS)
    assert (done.num_demonstrations, done.num_rejects) == (1, 1)


@pytest.mark.parametrize("response", [HUGE, DEEP], ids=["huge", "deep"])
def test_an_attempt_with_a_hostile_response_is_a_reject(state: StateDir, tmp_path: Path, response: Any) -> None:
    put_task(state.osworld_repo, "a")
    put_attempt(tmp_path / "results", "a", ["pyautogui.click(3, 4)", "DONE"], response=response)
    done = import_osworld_results(state, tmp_path / "results", OPTIONS)
    assert (done.num_demonstrations, done.num_rejects) == (0, 1)
    (reject,) = read_lines(state.imports / OPTIONS.name / "rejects.jsonl")
    assert "cannot be text" in reject["reason"]


@pytest.mark.parametrize("steps", [1e300, 2**31, -1])
def test_a_number_of_steps_that_no_column_can_hold_is_unknown(state: StateDir, tmp_path: Path, steps: float) -> None:
    put_task(state.osworld_repo, "a")
    attempt = put_attempt(tmp_path / "results", "a", ["DONE"])
    (attempt.parent.parent / "args.json").write_text(json.dumps({"max_steps": steps}))
    import_osworld_results(state, tmp_path / "results", OPTIONS)
    with fresh_views(state) as connection:
        assert connection.execute("SELECT max_turns FROM episodes").fetchall() == [(0,)]


@pytest.mark.parametrize(
    "code",
    [
        f"pyautogui.click(x={HUGE}, y=0.5)",
        f"pyautogui.press('a', presses={HUGE})",
        f"pyautogui.scroll({HUGE})",
        "pyautogui.click(x=" + "-" * 600 + "1, y=0.5)",
    ],
    ids=["huge point", "huge count", "huge scroll", "deep code"],
)
def test_recorded_code_with_a_hostile_value_is_a_reject(state: StateDir, tmp_path: Path, code: str) -> None:
    records = [agentnet_record("bad", [code, END]), agentnet_record("good", [END])]
    done = import_agentnet(state, put_agentnet(tmp_path / "in", records), OPTIONS)
    assert (done.num_demonstrations, done.num_rejects_by_kind) == (1, {"dropped_parse": 1})


@pytest.mark.parametrize("rank", [HUGE, DEEP, 2**31, "first"], ids=["huge", "deep", "33 bits", "text"])
def test_a_rank_that_is_not_a_number_of_32_bits_is_a_reject(state: StateDir, tmp_path: Path, rank: Any) -> None:
    row = {
        "messages": [{"role": "user", "content": "<image>\nDo it."}, {"role": "assistant", "content": CALL}],
        "images": [base64.b64encode(png(1)).decode()],
        "task_id": "t",
        "source_dataset": "d",
    }
    path = tmp_path / "replay.jsonl"
    path.write_text("".join(json.dumps(row | {"quality_rank": value}) + "\n" for value in (3, rank)))
    done = import_slime_replay(state, path, OPTIONS)
    assert (done.num_demonstrations, done.num_rejects) == (1, 1)
