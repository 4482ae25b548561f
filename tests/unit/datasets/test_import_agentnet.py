"""AgentNet: shares of the screen become pixels of the image, a step of several calls becomes several turns, and an
action that cannot be expressed is reported with its step."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from import_samples import OPTIONS, agentnet_record, png, put_agentnet, read_lines

from osworld_pipeline.datasets.importers import ImportOptions
from osworld_pipeline.datasets.importers.agentnet import import_agentnet
from osworld_pipeline.dialects import load_dialect
from osworld_pipeline.domain.digest import digest_bytes
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import DatasetError

END = "computer.terminate(status='success')"


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "var")


def imported(state: StateDir, file: str = "demonstrations.jsonl") -> list[dict[str, Any]]:
    return read_lines(state.imports / "theirs" / file)


def turns(record: dict[str, Any], role: str) -> list[str]:
    return [turn["content"][-1].get("text", "") for turn in record["messages"] if turn["role"] == role]


def actions(record: dict[str, Any]) -> list[Any]:
    return [load_dialect("slime").parse_strict(text).arguments for text in turns(record, "assistant")]


def test_shares_of_the_screen_become_pixels_of_the_image(state: StateDir, tmp_path: Path) -> None:
    codes = ["pyautogui.click(x=0.5, y=0.25)", "pyautogui.rightClick(x=1.0, y=1)", END]
    import_agentnet(state, put_agentnet(tmp_path / "in", [agentnet_record("t", codes)]), OPTIONS)
    (record,) = imported(state)
    assert actions(record) == [
        {"action": "left_click", "coordinate": [100, 25]},
        {"action": "right_click", "coordinate": [199, 99]},
        {"action": "terminate", "status": "success"},
    ]


def test_a_step_of_several_calls_shows_its_screenshot_again(state: StateDir, tmp_path: Path) -> None:
    codes = ["pyautogui.moveTo(x=0.1, y=0.2)\npyautogui.dragTo(x=0.3, y=0.4, button='left')", END]
    import_agentnet(state, put_agentnet(tmp_path / "in", [agentnet_record("t", codes)]), OPTIONS)
    (record,) = imported(state)
    first, second = (f"images/{digest_bytes(png(number, (200, 100)))}.png" for number in (0, 1))
    assert record["images"] == [first, first, second]
    assert [action["action"] for action in actions(record)] == ["mouse_move", "left_click_drag", "terminate"]
    assert (state.imports / "theirs" / first).read_bytes() == png(0, (200, 100))


def test_a_demonstration_looks_like_one_recorded_here(state: StateDir, tmp_path: Path) -> None:
    codes = ["pyautogui.press('enter')", END]
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", codes, domain="os")])
    import_agentnet(state, path, OPTIONS)
    (record,) = imported(state)
    assert [turn["role"] for turn in record["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert record["messages"][0]["content"][0]["text"] == load_dialect("slime").system_prompt("full")
    assert record["messages"][1]["content"][0] == {"type": "image"}
    assert turns(record, "user") == ["[Domain hint]\nos\n[Task]\nDo t.", "[Last Action Result]\nok"]
    assert turns(record, "assistant")[0].startswith("Action: Press enter\n<tool_call>")


def test_the_recorded_words_are_in_the_action_line(state: StateDir, tmp_path: Path) -> None:
    record = agentnet_record("t", ["pyautogui.moveTo(0.1, 0.1)\npyautogui.click()", "pyautogui.press('a')", END])
    record["traj"][0]["value"] |= {"action": "Click on <cell>\n C2", "thought": "Since this is the first..."}
    record["traj"][1]["value"] |= {"thought": "First sentence. " + "Another one follows here. " * 40}
    import_agentnet(state, put_agentnet(tmp_path / "in", [record]), OPTIONS)
    lines = [text.split("\n")[0] for text in turns(imported(state)[0], "assistant")]
    assert lines[:2] == ["Action: Move the pointer", "Action: Click on cell C2"]
    assert lines[2].startswith("Action: First sentence. Another one follows here.")
    assert lines[2].endswith("here.")
    assert len(lines[2]) < 420


def test_instruction_and_reward_come_from_the_published_fields(state: StateDir, tmp_path: Path) -> None:
    records = [
        agentnet_record("failed", [END], task_completed=False, natural_language_task="Could you..."),
        agentnet_record("done", [END], task_completed=True, instruction="", natural_language_task="Could you?"),
    ]
    import_agentnet(state, put_agentnet(tmp_path / "in", records), OPTIONS)
    rewards = {record["task_id"]: record.get("reward") for record in imported(state)}
    assert rewards == {"failed": 0.0, "done": None}
    tasks = {task["task_id"]: task["instruction"] for task in imported(state, "tasks.jsonl")}
    assert tasks == {"failed": "Do failed.", "done": "Could you?"}


@pytest.mark.parametrize(
    ("record", "kind", "reason"),
    [
        ('{"task_id": "cut', "malformed", "not JSON"),
        ([1], "malformed", "not a JSON object"),
        ({"instruction": "x", "traj": []}, "malformed", "no task_id"),
        (agentnet_record("t", [END], instruction=None), "malformed", "no instruction"),
        (agentnet_record("t", []), "malformed", "no steps"),
        ({"task_id": "t", "instruction": "x", "traj": [{"image": "0.png"}]}, "malformed", "step 0 has no code"),
        (agentnet_record("t", ["pyautogui.click(x=300, y=4)", END]), "dropped_parse", "step 0: the point"),
        (agentnet_record("t", ["pyautogui.press('a')", "pyautogui.hscroll(3)"]), "dropped_parse", "step 1: "),
        (agentnet_record("t", [END, END]), "dropped_parse", "step 0: the task ends before"),
        (agentnet_record("t", ["WAIT"] * 9), "bad_image", "step 8: the image '8.png' cannot be read"),
        (
            {"task_id": "t", "instruction": "x", "traj": [{"image": "../some.jsonl", "value": {"code": END}}]},
            "bad_image",
            "not inside its folder",
        ),
    ],
)
def test_a_bad_record_affects_no_other(state: StateDir, tmp_path: Path, record: Any, kind: str, reason: str) -> None:
    path = put_agentnet(tmp_path / "in", [record, agentnet_record("good", [END])])
    summary = import_agentnet(state, path, OPTIONS)
    assert [found["task_id"] for found in imported(state)] == ["good"]
    (reject,) = imported(state, "rejects.jsonl")
    assert (reject["path"], reject["line"], reject["kind"]) == ("some.jsonl", 1, kind)
    assert reason in reject["reason"]
    assert summary.num_rejects_by_kind == {kind: 1}
    assert len(list((state.imports / "theirs" / "images").iterdir())) == 1


def test_a_file_that_is_not_an_image_is_reported(state: StateDir, tmp_path: Path) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    (tmp_path / "in" / "images" / "0.png").write_text("<html>")
    import_agentnet(state, path, OPTIONS)
    assert "neither PNG, JPEG nor WebP" in imported(state, "rejects.jsonl")[0]["reason"]


def test_images_are_linked_and_stay_when_the_original_is_removed(state: StateDir, tmp_path: Path) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    import_agentnet(state, path, OPTIONS)
    (image,) = (state.imports / "theirs" / "images").iterdir()
    origin = tmp_path / "in" / "images" / "0.png"
    assert image.stat().st_ino == origin.stat().st_ino
    origin.unlink()
    assert image.read_bytes() == png(0, (200, 100))


def test_source_and_licence_are_stored_next_to_the_demonstrations(state: StateDir, tmp_path: Path) -> None:
    import_agentnet(state, put_agentnet(tmp_path / "in", [agentnet_record("t", [END])]), OPTIONS)
    source = json.loads((state.imports / "theirs" / "source.json").read_text())
    assert (source["licence"], source["revision"], source["quality_rank"]) == ("MIT", "r1", 2)
    assert (source["importer"], source["num_demonstrations"], source["num_tasks"]) == ("agentnet", 1, 1)


def test_the_same_origin_gives_the_same_digest(state: StateDir, tmp_path: Path) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    assert import_agentnet(state, path, OPTIONS).sha256 == import_agentnet(state, path, OPTIONS).sha256


def test_the_next_import_repairs_what_killed_imports_left(state: StateDir, tmp_path: Path) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    import_agentnet(state, path, OPTIONS)
    # One died while writing, one between the two renames that put a new import in place of an older one.
    (state.imports / ".half.new" / "images").mkdir(parents=True)
    (state.imports / "theirs").rename(state.imports / ".theirs.old")
    import_agentnet(state, path, ImportOptions(name="other", licence="MIT"))
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", "other", "theirs"]
    assert len(imported(state)) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from osworld_pipeline.datasets.importers import ImportOptions
from osworld_pipeline.datasets.importers.agentnet import import_agentnet
from osworld_pipeline.domain.state import StateDir

kill = lambda done, total: os.kill(os.getpid(), signal.SIGKILL)
options = ImportOptions(name="theirs", licence="MIT")
import_agentnet(StateDir(Path(sys.argv[1])), Path(sys.argv[2]), options, on_progress=kill)
"""


def test_a_killed_import_is_absent_and_the_next_import_removes_its_files(state: StateDir, tmp_path: Path) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    command = [sys.executable, "-c", KILLED, str(state.root), str(path)]
    killed = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", ".theirs.new"]
    import_agentnet(state, path, ImportOptions(name="other", licence="MIT"))
    assert sorted(path.name for path in state.imports.iterdir()) == [".lock", "other"]


@pytest.mark.parametrize(("name", "licence"), [("Mixed", "MIT"), ("../up", "MIT"), ("fine", " ")])
def test_a_bad_name_or_no_licence_is_refused(state: StateDir, tmp_path: Path, name: str, licence: str) -> None:
    path = put_agentnet(tmp_path / "in", [agentnet_record("t", [END])])
    with pytest.raises(DatasetError, match=r"cannot name an import|has no licence"):
        import_agentnet(state, path, ImportOptions(name=name, licence=licence))


def test_the_real_trajectory_is_imported(state: StateDir, real_data: Path) -> None:
    command = [sys.executable, "-m", "osworld_pipeline.cli", "import", "agentnet", str(real_data / "agentnet")]
    options = ["--name", "theirs", "--licence", "MIT", "--state", str(state.root)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 demonstrations, 0 episodes, 1 tasks, 0 rejects: ")
    print(done.stdout)
    (record,) = imported(state)
    found = actions(record)
    # 15 steps, two of which are a move and an action at that place.
    assert len(found) == len(record["images"]) == 17
    assert found[0] == {"action": "left_click", "coordinate": [1241, 697]}
    assert [action["action"] for action in found[3:5]] == ["mouse_move", "left_click_drag"]
    assert found[-1] == {"action": "terminate", "status": "success"}
