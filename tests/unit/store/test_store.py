"""The trajectory store: what is written can be read unchanged, parts are complete, a rerun replaces its part."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from episode_samples import episodes, make_episode, make_sequence, make_step
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from osworld_pipeline.domain.episode import ContextMode, Outcome, Reward, StepSignals
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow, ReplayVerification
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import BlobStore, TrajectoryStore
from osworld_pipeline.tables.catalog import fresh_views


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path)


def temps(state: StateDir) -> list[Path]:
    return [path for path in state.root.rglob(".*") if path.suffix == ".tmp"]


def ask(state: StateDir, sql: str) -> list[tuple]:
    with fresh_views(state) as connection:
        return connection.execute(sql).fetchall()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arbitrary_episodes_come_back_as_they_were_written(tmp_path: Path, data: st.DataObject) -> None:
    written = [data.draw(episodes(f"e{index}")) for index in range(data.draw(st.integers(0, 3)))]
    store = TrajectoryStore(StateDir(tmp_path))
    store.write_episodes("part", written)
    assert store.read_episodes("part") == tuple(written)


def test_an_episode_of_windows_is_read_back_with_each_window(state: StateDir) -> None:
    windows = (
        make_sequence(3, image_steps=(0,)),
        make_sequence(5, image_steps=(0, 1), policy_versions=(-1, 7, 7, 8, 8)),
    )
    episode = make_episode("e1", context_mode=ContextMode.WINDOW, sequences=windows, earlier_faults=("env_fault: x",))
    store = TrajectoryStore(state)
    store.write_episodes("a", [episode])
    assert store.read_episodes("a") == (episode,)
    assert ask(state, "SELECT context_mode, earlier_faults FROM episodes") == [("window", ["env_fault: x"])]
    columns = "sequence_index, len(token_ids), image_steps, policy_versions[-1]"
    assert ask(state, f"SELECT {columns} FROM sequences ORDER BY 1") == [(0, 3, [0], 7), (1, 5, [0, 1], 8)]


def test_the_views_show_the_rows_of_all_parts(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1", num_steps=2)])
    store.write_episodes("b", [make_episode("e2", num_steps=3)])
    assert ask(state, "SELECT count(*), count(DISTINCT episode_id) FROM episodes") == [(2, 2)]
    assert ask(state, "SELECT episode_id, count(*) FROM steps GROUP BY 1 ORDER BY 1") == [("e1", 2), ("e2", 3)]


def test_the_same_part_written_again_replaces_its_rows(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1", num_steps=2)])
    store.write_episodes("a", [make_episode("e1", num_steps=3)])
    assert ask(state, "SELECT episode_id, num_steps FROM episodes") == [("e1", 3)]
    assert ask(state, "SELECT step_index FROM steps ORDER BY 1") == [(0,), (1,), (2,)]
    assert store.read_episodes("a") == (make_episode("e1", num_steps=3),)


def test_steps_without_their_committed_episodes_are_invisible(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1")])
    (head,) = (state.trajectories / "episodes").glob("a~*.parquet")
    head.unlink()
    assert ask(state, "SELECT * FROM steps") == []


def test_a_part_name_that_another_begins_with_keeps_its_own_steps(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("a.b", [make_episode("e1")])
    store.write_episodes("a", [make_episode("e2")])
    store.write_episodes("a", [make_episode("e3")])
    assert [episode.episode_id for episode in store.read_episodes("a.b")] == ["e1"]
    assert ask(state, "SELECT DISTINCT episode_id FROM steps ORDER BY 1") == [("e1",), ("e3",)]


def test_parts_are_found_by_prefix_and_read_many_at_a_time(state: StateDir) -> None:
    store = TrajectoryStore(state)
    for name in ("run-1", "run-2", "other"):
        store.write_episodes(name, [make_episode(name)])
    assert store.existing_parts("episodes", "run-") == store.existing_parts("steps", "run-") == ["run-1", "run-2"]
    assert store.read_parts(["run-2", "other", "nowhere"]) == {
        "run-2": (make_episode("run-2"),),
        "other": (make_episode("other"),),
    }


def test_an_episode_is_found_by_its_id(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1"), make_episode("e2", num_steps=3)])
    assert store.find_episode("e2") == make_episode("e2", num_steps=3)
    with pytest.raises(StoreError, match="no episode 'e3'"):
        store.find_episode("e3")


def test_a_verification_is_a_row_and_a_fault_has_no_reward(state: StateDir) -> None:
    proof = ReplayVerification(
        verification_id="v1", row_id="r1", task_id="t", task_digest="d", outcome=Outcome.SUCCESS, reward=1.0
    )
    fault = replace(proof, verification_id="v2", outcome=Outcome.ENV_FAULT, reward=None, error="gone")
    TrajectoryStore(state).write_verifications("v", [proof, fault])
    rows = ask(state, "SELECT verification_id, outcome, reward FROM replay_verifications ORDER BY 1")
    assert rows == [("v1", "success", 1.0), ("v2", "env_fault", None)]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "_seed", "a b", "x" * 300])
def test_a_part_name_that_is_not_a_file_name_is_refused(state: StateDir, name: str) -> None:
    with pytest.raises(StoreError, match="cannot name a part"):
        TrajectoryStore(state).write_episodes(name, [])


def test_an_episode_twice_in_a_part_is_refused(state: StateDir) -> None:
    with pytest.raises(StoreError, match="e1 twice"):
        TrajectoryStore(state).write_episodes("a", [make_episode("e1"), make_episode("e1")])


def test_reading_an_unknown_part_names_it(state: StateDir) -> None:
    with pytest.raises(StoreError, match="no part 'nowhere'"):
        TrajectoryStore(state).read_episodes("nowhere")


def test_half_a_surrogate_pair_from_a_model_does_not_lose_the_episode(state: StateDir) -> None:
    step = make_step(response_text="a\ud800b", action={"text": "\ud800"})
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1", steps=(step,))])
    (read,) = store.read_episodes("a")
    assert (read.steps[0].response_text, read.steps[0].action) == ("a?b", {"text": "?"})


def test_a_coordinate_beyond_64_bits_is_kept_in_the_action(state: StateDir) -> None:
    huge = 10**30
    signals = StepSignals(action_type="left_click", action_parsed=True, action_executed=False, coordinate=(huge, 1))
    store = TrajectoryStore(state)
    store.write_episodes("a", [make_episode("e1", steps=(make_step(signals=signals, action={"x": huge}),))])
    (read,) = store.read_episodes("a")
    assert read.steps[0].signals.coordinate == (2**63 - 1, 1)
    assert read.steps[0].action == {"x": huge}


def test_a_fault_keeps_no_reward_and_is_not_valid(state: StateDir) -> None:
    fault = make_episode("e1", outcome=Outcome.GRADER_FAULT, reward=None, error="the grader crashed")
    TrajectoryStore(state).write_episodes("a", [fault])
    assert ask(state, "SELECT task_reward, is_valid, error FROM episodes") == [(None, False, "the grader crashed")]


def make_group(group_id: str = "g1", *, update: int = 3) -> RolloutGroup:
    row = ReplayRow(
        row_id="r1", task_id="t", original_task_id="t_chunk0", source_dataset="sft_clean", reward=1.0,
        messages=(), image_sha256s=(),
    )  # fmt: skip
    siblings = (
        make_episode("e1", reward=Reward(task=0.0, shaped=0.2), outcome=Outcome.FAILURE),
        make_episode("e2", reward=None, outcome=Outcome.ENV_FAULT),
    )
    return RolloutGroup(
        group_id=group_id, task_id="t", stage_key="gspo_phase1-0", update=update, episodes=siblings, replay=row
    )


def make_injection(injection_id: str = "i1", group_id: str = "g1") -> Injection:
    return Injection(
        injection_id=injection_id, group_id=group_id, row_id="r1", task_id="t", source_dataset="sft_clean",
        reward=1.0, advantage=1.5, weight=0.5,
    )  # fmt: skip


def test_groups_and_injections_are_rows(state: StateDir) -> None:
    TrajectoryStore(state).write_groups("a", [make_group()], [make_injection()])
    assert ask(state, "SELECT num_episodes, num_valid, num_successes, task_rewards, outcomes FROM rollout_groups") == [
        (2, 1, 0, [0.0, None], ["failure", "env_fault"])
    ]
    assert ask(state, 'SELECT row_id, source_dataset, advantage, weight, stage_key, "update" FROM injections') == [
        ("r1", "sft_clean", 1.5, 0.5, "gspo_phase1-0", 4)
    ]


def test_an_episode_has_its_tokens_and_times_as_columns(state: StateDir) -> None:
    counted = make_episode("counted", started_at=86_400.0, image_num_tokens=128, advantage=-0.5)
    words = [make_step(0, prompt_num_tokens=0, response_num_tokens=0)]
    talker = make_episode("talker", steps=tuple(words), sequences=(), times_s={})
    imported = make_episode("imported", source_dataset="agentnet")
    store = TrajectoryStore(state)
    store.write_episodes("a", [counted, talker, imported])
    columns = (
        "prompt_tokens, response_tokens, image_tokens, num_images, mean_logprob, advantage, started_utc, ended_utc"
    )
    rows = ask(state, f"SELECT {columns} FROM episodes ORDER BY episode_id")
    # Two steps of 300 and 20 tokens; two sampled tokens of -0.5 and -0.25; 3 s.
    assert rows[0] == (600, 40, 128, 2, -0.375, -0.5, datetime(1970, 1, 2), datetime(1970, 1, 2, 0, 0, 3))
    assert rows[1] == (None, None, None, 2, -0.375, None, None, None), "an import counts no tokens, and has no date"
    assert rows[2] == (None,) * 8, "an engine of words counts none"
    assert store.find_episode("counted") == counted


def test_a_mean_of_numbers_whose_sum_is_too_large_is_a_number(state: StateDir) -> None:
    sequence = make_sequence(3, response_mask=(0, 1, 1), sampled_logprobs=(0.0, -1.7e308, -1.5e308))
    TrajectoryStore(state).write_episodes("a", [make_episode("e1", sequences=(sequence,))])
    assert ask(state, "SELECT mean_logprob FROM episodes") == [(-1.6e308,)]


def test_groups_written_again_do_not_keep_old_injections(state: StateDir) -> None:
    store = TrajectoryStore(state)
    store.write_groups("a", [make_group()], [make_injection()])
    store.write_groups("a", [make_group()], [])
    assert ask(state, "SELECT count(*) FROM injections") == [(0,)]


def test_an_image_is_stored_once_under_its_hash(state: StateDir) -> None:
    store = TrajectoryStore(state)
    sha256 = store.write_blob(b"pixels", suffix="png")
    assert store.write_blob(b"pixels", suffix=".png") == sha256
    assert [path.relative_to(state.blobs).as_posix() for path in state.blobs.rglob("*.png")] == [
        f"{sha256[:2]}/{sha256}.png"
    ]
    assert store.read_blob(sha256) == b"pixels"


def test_a_missing_image_is_named(state: StateDir) -> None:
    with pytest.raises(StoreError, match="image abcd is not in"):
        BlobStore(state.blobs).read("abcd")


FILL = """
import resource, sys
from pathlib import Path
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import StoreError
from osworld_pipeline.store import TrajectoryStore
store = TrajectoryStore(StateDir(Path(sys.argv[1])))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.write_blob(bytes(5000), suffix="png")
except StoreError as error:
    print(error)
"""


def test_a_write_that_the_file_system_refuses_is_one_clear_error_and_leaves_nothing(state: StateDir) -> None:
    done = subprocess.run([sys.executable, "-c", FILL, str(state.root)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("cannot write ")
    assert done.stdout.count("\n") == 1
    assert [path for path in state.root.rglob("*") if path.is_file()] == []


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        store = TrajectoryStore(StateDir(disk))
        with pytest.raises(StoreError, match=r"no disk space left to write .*free some space"):
            store.write_blob(bytes(100_000), suffix="png")
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


WRITE_FOR_EVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from episode_samples import make_episode
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
store = TrajectoryStore(StateDir(Path(sys.argv[1])))
for turn in range(10**6):
    if turn == 1:
        print("ready", flush=True)
    for part in range(3):
        store.write_episodes(f"p{part}", [make_episode(f"p{part}-e{i}", num_steps=turn % 4 + 1) for i in range(4)])
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_parts_and_no_duplicates(state: StateDir) -> None:
    tests = Path(__file__).parents[2]
    for round_ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(state.root), str(tests)], stdout=subprocess.PIPE, text=True
        )
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(0.3 + 0.037 * round_)
            os.kill(child.pid, signal.SIGKILL)
        store = TrajectoryStore(state)
        assert temps(state) == []
        for part in store.existing_parts():
            assert len(store.read_episodes(part)) == 4
        wrong = """
            SELECT e.episode_id FROM episodes e LEFT JOIN steps s USING (episode_id)
            GROUP BY e.episode_id, e.num_steps
            HAVING count(DISTINCT s.step_index) <> e.num_steps OR count(*) <> e.num_steps
        """
        assert ask(state, wrong) == []
        assert ask(state, "SELECT count(*) = count(DISTINCT episode_id) FROM episodes") == [(True,)]
    assert ask(state, "SELECT count(*) FROM episodes") == [(12,)]
