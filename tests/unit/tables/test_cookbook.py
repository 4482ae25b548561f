"""Every question of the cookbook against a state whose answers were worked out by hand."""

import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from episode_samples import make_episode, make_step

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, Step, StepSignals
from osworld_pipeline.domain.group import RolloutGroup
from osworld_pipeline.domain.replay import Injection, ReplayRow, ReplayVerification, TrainedRow
from osworld_pipeline.domain.stage_record import AttemptStatus, StageAttempt, TrainingStage, UpdateRecord
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.errors import TableError
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.catalog import rebuild_catalog
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.tables.query import run_query
from osworld_pipeline.tables.questions.cookbook import COOKBOOK, find_question, render_cookbook

DOC = Path(__file__).resolve().parents[3] / "docs" / "cookbook.md"
SHARED = "5" * 64
NOW = float(int(time.time())) + 3600
"""An hour ahead: a stage that is at work now is still at work when its test runs late."""
PRESS = 'pyautogui.press("a")'
UNREAD = "(no action could be read)"


def step(name: str, index: int, command: str | None, action_type: str, **changes: Any) -> Step:
    signals: dict[str, Any] = {"action_parsed": command is not None, "action_executed": command is not None}
    signals |= {key: changes.pop(key) for key in ("action_executed", "fallback_used") if key in changes}
    fields: dict[str, Any] = {
        "sha256": f"{name}/{index}", "command": command, "action": None, "policy_version": 0,
        "signals": StepSignals(action_type=action_type, **signals),
    }  # fmt: skip
    return make_step(index, **(fields | changes))


def played(name: str, task_id: str, outcome: Outcome, steps: list[Step], **changes: Any) -> Episode:
    is_success = outcome is Outcome.SUCCESS
    reward = Reward(task=1.0 if is_success else 0.0, shaped=0.5) if outcome.is_valid else None
    fields: dict[str, Any] = {
        "task_id": task_id, "outcome": outcome, "reward": reward, "steps": tuple(steps), "replica_id": "r0",
        "error": None if outcome.is_valid else "gone", "checkpoint_id": "sft-1",
    }  # fmt: skip
    return make_episode(name, **(fields | changes))


def evaluations() -> list[Episode]:
    later = {"checkpoint_id": "gspo-1"}
    press = [step("v-sft-b", index, PRESS, "key", action_executed=index < 2) for index in range(3)]
    unread = [step("v-gspo-a", 0, None, "unknown"), step("v-gspo-a", 1, "WAIT", "wait", fallback_used=True)]
    done = [step("v-sft-a", 0, "pyautogui.click(1, 2)", "left_click", sha256=SHARED)]
    return [
        played("v-sft-a", "a", Outcome.SUCCESS, [*done, step("v-sft-a", 1, "DONE", "terminate")]),
        played("v-sft-b", "b", Outcome.FAILURE, press, replica_id="r1"),
        played("v-sft-b1", "b", Outcome.ENV_FAULT, [], seed=1, replica_id="", attempt=2),
        played("v-gspo-a", "a", Outcome.FAILURE, unread, replica_id="r1", **later),
        played("v-gspo-b", "b", Outcome.SUCCESS, [step("v-gspo-b", 0, "DONE", "terminate")], **later),
    ]


def training() -> list[Episode]:
    common = {"purpose": EpisodePurpose.TRAIN, "stage_key": "gspo-1"}
    # The first one is as before schema version 6, when the stage's parent was recorded as the checkpoint.
    first = common | {"update": 0, "group_id": "g0", "weights_id": "sft-1"}
    second = common | {"update": 1, "group_id": "g1", "checkpoint_id": "gspo-1", "weights_id": "gspo-1-u0001"}
    slow = {"reset": 1.0, "model": 2.0, "step": 3.0, "evaluate": 0.5, "total": 9.0}

    def worth(task: float, shaped: float, efficiency: float) -> Reward:
        return Reward(task=task, shaped=shaped, parts={"efficiency": efficiency})

    waited = [step("t", 0, "WAIT", "wait", sha256=SHARED)]
    solved = [
        step("t-1-0", 0, "WAIT", "wait"),
        step("t-1-0", 1, "DONE", "terminate", policy_version=1, action={"action": "terminate"}),
    ]
    return [
        played(
            "t-0-0",
            "a",
            Outcome.FAILURE,
            waited,
            reward=worth(0, 0.1, 0.2),
            started_at=100.0,
            times_s=slow,
            advantage=-0.5,
            image_num_tokens=64,
            **first,
        ),
        played(
            "t-0-1", "a", Outcome.FAILURE, waited, reward=worth(0, 0.1, 0.4), started_at=101.0, advantage=0.5, **first
        ),
        played("t-1-0", "a", Outcome.SUCCESS, solved, reward=worth(1, 1.0, 1.0), started_at=200.0, **second),
        played("t-1-1", "a", Outcome.ENV_FAULT, [], replica_id="r1", started_at=201.0, **second),
    ]


def superseded() -> Episode:
    """An episode that was rolled out for update 2 before the stage was resumed."""
    return played(
        "t-1-0-superseded-1", "a", Outcome.SUCCESS, [step("lost", 0, "DONE", "terminate")], stage_key="gspo-1",
        update=1, purpose=EpisodePurpose.SUPERSEDED, checkpoint_id="gspo-1", group_id="g1-superseded-1",
        started_at=7200.0,
    )  # fmt: skip


def write_stages(store: TrajectoryStore) -> None:
    """gspo-1 was killed and resumed, sft-2 runs, gspo-2 was killed, and sft-1 is from before such records."""

    def stage(stage_key: str, kind: Stage, num_planned: int) -> TrainingStage:
        return TrainingStage(stage_key=stage_key, stage=kind, parent_id="sft-1", num_planned=num_planned)

    def attempt(name: str, of: TrainingStage, started_at: float, **changes: Any) -> None:
        fields: dict[str, Any] = {"first_update": 1, "host": "here", "process_id": 7}
        store.write_attempt(StageAttempt(attempt_id=name, stage=of, started_at=started_at, **(fields | changes)))

    def update(of: TrainingStage, number: int, started_at: float, **metrics: float) -> UpdateRecord:
        return UpdateRecord(stage=of, update=number, metrics=metrics, started_at=started_at, ended_at=started_at + 10.0)

    gspo, running = stage("gspo-1", Stage.GSPO_PHASE2, 2), stage("sft-2", Stage.SFT, 100)
    attempt("a1", gspo, 50.0)
    attempt("a2", gspo, 150.0, first_update=2, status=AttemptStatus.FINISHED, ended_at=400.0)
    attempt("a3", running, NOW)
    attempt("a4", stage("gspo-2", Stage.GSPO_PHASE2, 5), NOW - 86_400)
    figures = {
        "loss": 0.25, "kl": 0.5, "entropy": 1.5, "grad_norm": 2.0, "clipped_share": 0.125, "learning_rate": 1e-5,
        "effective_share": 0.75, "staleness_mean": 0.5, "success_rate": 0.0, "task_reward": 0.25,
        "rollout_s": 6.0, "update_s": 4.0, "score_s": 1.0, "canary_wait_s": 0.25, "forward_s": 2.0,
        "optimizer_s": 0.5, "tokens_per_s": 100.0,
        "is_held": 0.0, "is_skipped": 0.0, "num_held_tries": 0.0, "fault_share": 0.25,
    }  # fmt: skip
    held = {"is_held": 1.0, "is_held_by_staleness": 1.0, "num_held_tries": 1.0, "fault_share": 0.5, "rollout_s": 8.0}
    store.write_updates("gspo-1-u000001", [update(gspo, 1, 100.0, **figures)])
    store.write_updates("gspo-1-u000002", [update(gspo, 2, 200.0, **held)])
    quick = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.001, "update_s": 1.0}
    store.write_updates("sft-2-u000001", [update(running, number, NOW, **quick) for number in (1, 2)])


def write_groups(store: TrajectoryStore, episodes: list[Episode]) -> None:
    row = ReplayRow(row_id="r1", task_id="a", original_task_id="a", source_dataset="sft_clean", reward=1.0)
    common: dict[str, Any] = {"stage_key": "gspo-1"}
    # A group with variance; its episodes do not matter otherwise.
    differs = tuple(
        played(name, "b", outcome, [], reward=Reward(task=shaped, shaped=shaped))
        for name, outcome, shaped in (("x", Outcome.SUCCESS, 1.0), ("y", Outcome.FAILURE, 0.0))
    )
    groups = [
        RolloutGroup(group_id="g0", task_id="a", update=0, episodes=tuple(episodes[:2]), replay=row, **common),
        RolloutGroup(group_id="g1", task_id="a", update=1, episodes=tuple(episodes[2:]), **common),
        RolloutGroup(group_id="g2", task_id="b", update=1, episodes=differs, **common),
    ]
    injection = Injection(
        injection_id="i0", group_id="g0", row_id="r1", task_id="a", source_dataset="sft_clean", reward=1.0,
        advantage=1.5, weight=1.0,
    )  # fmt: skip
    store.write_groups("gspo-1", groups, [injection])


def write_data(state: StateDir) -> None:
    tasks = [
        {"task_id": task_id, "domain": domain, "instruction": f"Do {task_id}.", "has_task_config": True}
        for task_id, domain in (("a", "os"), ("b", "chrome"), ("c", "os"))
    ]
    write_table(state, "union_tasks", tasks)
    write_table(state, "train_tasks", tasks)
    replay = {"source_dataset": "sft_clean", "reward": 1.0, "is_reward_assumed": True, "num_steps": 1}
    place = {"source_path": "x.jsonl", "source_line": 7}
    write_table(
        state,
        "replay_buffer",
        [
            {"row_id": "r1", "task_id": "a", "licence": "mit", **replay, **place},
            {"row_id": "r2", "task_id": "b", **replay, **place},
        ],
    )
    bad = {"source_dataset": "sft_clean", "source_path": "x.jsonl", "kind": "bad_image", "task_id": "a"}
    whole = {"source_dataset": "bc_sft", "source_path": "y.jsonl", "kind": "unreadable", "reason": "not gzip"}
    write_table(
        state,
        "rejects",
        [{**bad, "source_line": 9, "reason": "later"}, {**bad, "source_line": 4, "reason": "first"}, whole],
    )
    counts = (("sft_clean", 10), ("bc_sft", 3))
    write_table(state, "raw_counts", [{"source_dataset": name, "num_records": number} for name, number in counts])


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> StateDir:
    state = StateDir(tmp_path_factory.mktemp("cookbook"))
    store = TrajectoryStore(state)
    write_data(state)
    tuned = TrainedRow(row_id="r9", kind="demonstration", task_id="b", source_dataset="bc_sft", licence="cc-by-4.0")
    for name, stage, parent in (("sft-1", Stage.SFT, None), ("gspo-1", Stage.GSPO_PHASE2, "sft-1")):
        checkpoint = Checkpoint(
            checkpoint_id=name, stage=stage, parent_id=parent, path=name, num_updates=2, recipe_digest="r" * 20,
            data_digest="d" * 20, weights_digest="w" * 20, saved_at=410.0 if parent else 0.0,
            sources=() if parent else (tuned,),
        )  # fmt: skip
        upsert_checkpoint(state, checkpoint)
    store.write_episodes("eval", evaluations())
    store.write_episodes("gspo-1", training())
    store.write_episodes("gspo-1-superseded", [superseded()])
    write_groups(store, training())
    write_stages(store)
    tried = {"task_digest": "d", "started_at": 5.0}
    good = ReplayVerification(
        verification_id="1", row_id="r1", task_id="a", outcome=Outcome.SUCCESS, reward=1.0, **tried
    )
    fault = ReplayVerification(
        verification_id="2", row_id="r2", task_id="b", outcome=Outcome.ENV_FAULT, error="gone", **tried
    )
    store.write_verifications("one", [good, fault])
    rebuild_catalog(state)
    return state


def at(unix_time: float) -> datetime:
    return datetime(1970, 1, 1) + timedelta(seconds=unix_time)


DIGESTS = ("r" * 12, "d" * 12, "w" * 12)
UNKNOWN = "unknown image/grader unknown"
ANSWERS: dict[str, list[tuple[Any, ...]]] = {
    "success-by-checkpoint": [
        ("gspo-1", "gspo_phase2", 2, 0, 0.5, "", UNKNOWN),
        ("sft-1", "sft", 2, 1, 0.5, "", UNKNOWN),
    ],
    "success-by-domain": [
        ("gspo-1", "gspo_phase2", "chrome", 1, 1, 1, 1.0, 0, "", UNKNOWN),
        ("gspo-1", "gspo_phase2", "os", 1, 1, 0, 0.0, 0, "", UNKNOWN),
        ("sft-1", "sft", "chrome", 1, 1, 0, 0.0, 1, "", UNKNOWN),
        ("sft-1", "sft", "os", 1, 1, 1, 1.0, 0, "", UNKNOWN),
    ],
    "fell-between-checkpoints": [("sft-1", "gspo-1", "a", 1, 1.0, 0.0, 1, 0)],
    # 20 tokens sampled and 300 read at each step; 3 s an episode, but one of 9 s.
    "cost-per-success": [
        ("evaluate", "gspo-1", 2, 1, 60, 6.0, 60.0, 900.0, 6.0),
        ("evaluate", "sft-1", 3, 1, 100, 9.0, 100.0, 1500.0, 9.0),
        ("train", "gspo-1", 4, 1, 80, 18.0, 80.0, 1200.0, 18.0),
    ],
    "best-episode": [
        ("t-1-0", 0, "t-1-0/0", None, "WAIT"),
        ("t-1-0", 1, "t-1-0/1", '{"action":"terminate"}', "DONE"),
    ],
    "score-to-pixels": [
        (*head, index, command, sha256, 512, 320, "png")
        for head, index, command, sha256 in (
            (("gspo-1", "a", 0, "failure", 0.0, "v-gspo-a"), 0, None, "v-gspo-a/0"),
            (("gspo-1", "a", 0, "failure", 0.0, "v-gspo-a"), 1, "WAIT", "v-gspo-a/1"),
            (("gspo-1", "b", 0, "success", 1.0, "v-gspo-b"), 0, "DONE", "v-gspo-b/0"),
            (("sft-1", "a", 0, "success", 1.0, "v-sft-a"), 0, "pyautogui.click(1, 2)", SHARED),
            (("sft-1", "a", 0, "success", 1.0, "v-sft-a"), 1, "DONE", "v-sft-a/1"),
            (("sft-1", "b", 0, "failure", 0.0, "v-sft-b"), 0, PRESS, "v-sft-b/0"),
            (("sft-1", "b", 0, "failure", 0.0, "v-sft-b"), 1, PRESS, "v-sft-b/1"),
            (("sft-1", "b", 0, "failure", 0.0, "v-sft-b"), 2, PRESS, "v-sft-b/2"),
        )
    ],
    "behind-a-score": [
        ("", "gspo-1", "evaluation", None, None, None, 1, 2, None, None),
        ("", "gspo-1", "screenshot", None, None, None, 3, 2, "blobs/v-/v-gspo-a/0.png", None),
        ("", "gspo-1", "task", None, None, None, 2, 2, None, None),
        ("", "gspo-1", "checkpoint", None, 0, "gspo-1", 1, 2, "gspo-1", None),
        ("", "gspo-1", "demonstration", "injected", 0, "gspo-1", 1, 2, "x.jsonl", None),
        ("", "gspo-1", "group", "rolled_out", 0, "gspo-1", 3, 2, None, None),
        ("", "gspo-1", "checkpoint", None, 1, "sft-1", 1, 2, "sft-1", None),
        ("", "gspo-1", "demonstration", "fine_tuned", 1, "sft-1", 1, 2, None, None),
        ("", "sft-1", "evaluation", None, None, None, 1, 3, None, None),
        ("", "sft-1", "screenshot", None, None, None, 5, 2, f"blobs/55/{SHARED}.png", None),
        ("", "sft-1", "task", None, None, None, 2, 3, None, None),
        ("", "sft-1", "checkpoint", None, 0, "sft-1", 1, 3, "sft-1", None),
        ("", "sft-1", "demonstration", "fine_tuned", 0, "sft-1", 1, 3, None, None),
    ],
    "slowest-episodes": [
        ("t-0-0", "a", "train", "failure", 1, "r0", 9.0, 1.0, 2.0, 3.0, 0.5),
        *(
            (name, task_id, purpose, outcome, steps, replica, 3.0, 0.5, None, None, None)
            for name, task_id, purpose, outcome, steps, replica in (
                ("t-0-1", "a", "train", "failure", 1, "r0"),
                ("t-1-0", "a", "train", "success", 2, "r0"),
                ("t-1-0-superseded-1", "a", "superseded", "success", 1, "r0"),
                ("t-1-1", "a", "train", "env_fault", 0, "r1"),
                ("v-gspo-a", "a", "evaluate", "failure", 2, "r1"),
                ("v-gspo-b", "b", "evaluate", "success", 1, "r0"),
                ("v-sft-a", "a", "evaluate", "success", 2, "r0"),
                ("v-sft-b", "b", "evaluate", "failure", 3, "r1"),
                ("v-sft-b1", "b", "evaluate", "env_fault", 0, ""),
            )
        ),
    ],
    "time-by-part": [
        ("evaluate", "", "total", 5, 3.0, 3.0, 3.0),
        ("evaluate", "", "reset", 5, 0.5, 0.5, 0.5),
        ("superseded", "", "total", 1, 3.0, 3.0, 3.0),
        ("superseded", "", "reset", 1, 0.5, 0.5, 0.5),
        ("train", "", "total", 4, 4.5, 3.0, 8.1),
        ("train", "", "step", 1, 3.0, 3.0, 3.0),
        ("train", "", "model", 1, 2.0, 2.0, 2.0),
        ("train", "", "reset", 4, 0.625, 0.5, 0.925),
        ("train", "", "evaluate", 1, 0.5, 0.5, 0.5),
    ],
    "faults-by-replica": [
        ("", "(none)", 1, 1, 1.0, 1, 0, 0, 0, 2, "gone"),
        ("", "r1", 3, 1, 0.3333, 1, 0, 0, 0, 0, "gone"),
        ("", "r0", 6, 0, 0.0, 0, 0, 0, 0, 0, None),
    ],
    "repeated-failing-actions": [
        ("key", PRESS, 3, 2, 1, 1, 3),
        ("wait", "WAIT", 3, 0, 3, 0, 3),
        ("unknown", UNREAD, 1, 0, 1, 1, 1),
    ],
    "parse-failures": [
        ("evaluate", "gspo-1", 3, 1, 1, 0, 0.3333, 0.3333),
        ("evaluate", "sft-1", 5, 0, 0, 1, 0.0, 0.0),
        ("superseded", "gspo-1", 1, 0, 0, 0, 0.0, 0.0),
        ("train", "gspo-1", 4, 0, 0, 0, 0.0, 0.0),
    ],
    "training-curve": [
        ("gspo-1", "gspo_phase2", 1, "sft-1", 2, 0, 0.0),
        ("gspo-1", "gspo_phase2", 2, "gspo-1-u0001", 1, 1, 1.0),
    ],
    "solved-only-with-replay": [("a", 1, 2, 1, 1, "t-1-0")],
    "after-the-injection": [
        ("gspo-1", 1, "a", "r1", "demonstration", "sft_clean", "uniform", 1.0, None, 2, 0.0, 1, 1.0)
    ],
    "injected-rows": [("g0", "r1", "a", "sft_clean", "x.jsonl", 7, 1.0, 1.5, 1.0)],
    "reward-components": [("gspo-1", 1, "efficiency", 2, 0.3), ("gspo-1", 2, "efficiency", 1, 1.0)],
    "groups-without-variance": [("gspo-1", 1, 1, 1, 1, 0, 1, 0), ("gspo-1", 2, 2, 1, 0, 0, 0, 1)],
    "staleness": [("gspo-1", 1, 2, 0, 0, 0, 0, 0), ("gspo-1", 2, 2, 0, 1, 1, 1, 1)],
    "ancestors": [
        ("gspo-1", 0, "gspo-1", "gspo_phase2", 2, *DIGESTS),
        ("gspo-1", 1, "sft-1", "sft", 2, *DIGESTS),
        ("sft-1", 0, "sft-1", "sft", 2, *DIGESTS),
    ],
    "rejects-by-source": [
        ("sft_clean", "bad_image", 2, 1, 10, "x.jsonl:4", "first"),
        ("bc_sft", "unreadable", 1, 0, 3, "y.jsonl:0", "not gzip"),
    ],
    "replay-by-source": [
        ("online", "episode", "unknown", 1, 1, 0, 0, 1, 2.0),
        ("sft_clean", "demonstration", "mit", 1, 1, 1, 1, 1, 1.0),
        ("sft_clean", "demonstration", "unknown", 1, 1, 1, 1, 0, 1.0),
    ],
    "verified-coverage": [("chrome", 1, 1, 1, 0, 0.0), ("os", 2, 1, 1, 1, 0.5)],
    "shared-screenshots": [(SHARED, 3, 1, 3, 512, 1024)],
    "update-curve": [
        ("gspo-1", 1, 0.25, 0.5, 1.5, 2.0, 0.125, 0.75, 0.5, 1e-5, 0.0, 0.25),
        ("gspo-1", 2, *(None,) * 10),
        ("sft-2", 1, 2.0, None, None, 1.0, None, None, None, 0.001, None, None),
        ("sft-2", 2, 2.0, None, None, 1.0, None, None, None, 0.001, None, None),
    ],
    # -0.5 and -0.25 of the two sampled tokens; update 1: 20 tokens in each of two, update 2: 40 in one.
    "logprobs-and-reward": [("gspo-1", 1, 2, 40, -0.375, 0.0, 0.1), ("gspo-1", 2, 1, 40, -0.375, 1.0, 1.0)],
    "running-stages": [
        ("gspo-2", "silent", 0, 5, 1, at(NOW - 86_400), at(NOW - 86_400), "here", 7),
        ("sft-2", "running", 2, 100, 1, at(NOW), at(NOW + 10), "here", 7),
    ],
    "stages": [
        ("sft-1", "sft", "finished", 2, None, None, None, None, None),
        ("gspo-1", "gspo_phase2", "finished", 2, 2, at(50), at(400), 350.0, None),
        ("gspo-2", "gspo_phase2", "silent", 0, 1, at(NOW - 86_400), None, None, None),
        ("sft-2", "sft", "running", 2, 1, at(NOW), None, None, None),
    ],
    "held-updates": [("gspo-1", 2, True, "staleness", 1, None, 0.5, None, at(210))],
    "time-of-updates": [
        ("gspo_phase2", 2, 10.0, 7.0, 1.0, 0.25, 2.0, 0.5, 100.0),
        ("sft", 2, 1.0, None, None, None, None, None, None),
    ],
    "faults-by-update": [("gspo-1", 1, 2, 0, 0.0, 0, 0, 0, 0), ("gspo-1", 2, 2, 1, 0.5, 1, 0, 0, 0)],
    "advantages": [
        ("gspo-1", 1, "g0", "t-0-1", "failure", 0.0, 0.1, 0.5),
        ("gspo-1", 1, "g0", "t-0-0", "failure", 0.0, 0.1, -0.5),
    ],
    "tokens-per-episode": [
        ("evaluate", "gspo-1", 2, 1.5, 450.0, 30.0, None, 1.5, 640),
        ("evaluate", "sft-1", 3, 1.67, 500.0, 33.3, None, 1.67, 960),
        ("superseded", "gspo-1", 1, 1.0, 300.0, 20.0, None, 1.0, 320),
        ("train", "gspo-1", 4, 1.0, 300.0, 20.0, 64.0, 1.0, 640),
    ],
    "throughput-by-hour": [
        (at(0), "train", 4, 3, 4, 80, 2),
        (at(7200), "superseded", 1, 1, 1, 20, 1),
    ],
    "licences": [
        ("gspo-1", "cc-by-4.0", "bc_sft", 1, 1, "fine_tuned", None),
        ("gspo-1", "mit", "sft_clean", 1, 0, "injected", "x.jsonl"),
        ("sft-1", "cc-by-4.0", "bc_sft", 1, 0, "fine_tuned", None),
    ],
    "superseded-rollouts": [("gspo-1", 2, 1, 1, 20, 3.0)],
    "checkpoint-updates": [
        ("sft-1", 2, None, None, None, None),
        ("gspo-1", 2, at(410), at(210), None, None),
    ],
    "evaluation-dates": [
        ("gspo-1", "osworld", "", 2, 0, None, None),
        ("sft-1", "osworld", "", 3, 1, None, None),
    ],
    "tasks-never-tried": [("b", "chrome", "Do b.", 1), ("c", "os", "Do c.", 0)],
}


@pytest.mark.parametrize("name", [question.name for question in COOKBOOK])
def test_the_answer_is_the_one_worked_out_by_hand(state: StateDir, name: str) -> None:
    assert run_query(state, find_question(name).sql).rows == ANSWERS[name]


def test_no_question_fails_before_anything_happened(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    rebuild_catalog(state)
    assert {question.name: run_query(state, question.sql).rows for question in COOKBOOK} == {
        question.name: [] for question in COOKBOOK
    }


def test_the_cookbook_has_enough_questions_with_distinct_names_and_an_answer_to_each() -> None:
    names = [question.name for question in COOKBOOK]
    assert len(set(names)) == len(names) >= 14
    assert set(ANSWERS) == set(names)
    assert all(question.question.endswith("?") for question in COOKBOOK)


def test_the_page_is_up_to_date_with_the_questions() -> None:
    assert DOC.read_text() == render_cookbook(), "run: osworld-pipeline cookbook --markdown > docs/cookbook.md"


def test_an_unknown_question_names_the_known_ones() -> None:
    with pytest.raises(TableError, match="no question 'success'; it has: success-by-checkpoint, success-by-domain"):
        find_question("success")


def test_the_command_line_lists_the_questions_shows_their_sql_and_runs_them(state: StateDir) -> None:
    def reported(*arguments: str) -> str:
        command = [sys.executable, "-m", "osworld_pipeline.cli", "cookbook", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert len(reported().splitlines()) == len(COOKBOOK)
    assert reported("ancestors", "--sql").strip() == find_question("ancestors").sql.strip()
    answer = reported("solved-only-with-replay", "--format", "csv", "--state", str(state.root))
    assert answer.splitlines()[1] == "a,1,2,1,1,t-1-0"
