"""A small state to export, every row of it known: three tasks, a demonstration, episodes of two checkpoints."""

import io
import json
from pathlib import Path
from typing import Any

from episode_samples import make_episode, make_step
from PIL import Image

from osworld_pipeline.domain.checkpoint import Checkpoint, Stage
from osworld_pipeline.domain.episode import Episode, EpisodePurpose, Outcome, Reward, Step, StepSignals
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.checkpoints import upsert_checkpoint
from osworld_pipeline.tables.owned import write_table

PROMPT = "You operate a computer."
DEMONSTRATION = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "[Task]\nRename é."}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Action: type\n<tool_call>{}</tool_call>"}]},
]


def picture(shade: int, fmt: str = "PNG") -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 0, 0)).save(sink, format=fmt)
    return sink.getvalue()


def task_row(task_id: str, **changes) -> dict:
    row = {
        "task_id": task_id, "prompt": task_id, "domain": "os", "config_domain": "", "instruction": f"Do {task_id}.",
        "task_config": json.dumps({"id": task_id, "name": "é"}), "task_config_source": "osworld_repo",
        "has_task_config": True, "platform": "ubuntu",
    }  # fmt: skip
    return row | changes


def replay_row(row_id: str, task_id: str, **changes) -> dict:
    row = {
        "row_id": row_id, "task_id": task_id, "original_task_id": f"{task_id}_chunk0", "source_dataset": "sft_clean",
        "quality_rank": 1, "reward": 1.0, "is_reward_assumed": True, "num_steps": 1, "messages": DEMONSTRATION,
        "images": [], "dialect": "slime", "action_types": ["type"], "licence": "mit", "source_path": "x.jsonl",
        "source_line": 7,
    }  # fmt: skip
    return row | changes


def step(store: TrajectoryStore, index: int, shade: int, command: str | None, fmt: str = "PNG", **changes) -> Step:
    """A step whose screen has that shade of red."""
    suffix = fmt.lower()
    fields: dict[str, Any] = {
        "sha256": store.write_blob(picture(shade, fmt), suffix=suffix),
        "screenshot_format": suffix,
        "command": command,
        "response_text": f"Action: {command}\n<tool_call>{{}}</tool_call>",
        "signals": StepSignals(action_type="type", action_parsed=True, action_executed=True),
    }
    return make_step(index, **(fields | changes))


def episode(name: str, task_id: str, outcome: Outcome, steps: tuple[Step, ...], **changes) -> Episode:
    reward = Reward(task=1.0 if outcome is Outcome.SUCCESS else 0.0, shaped=0.5) if outcome.is_valid else None
    fields: dict[str, Any] = {
        "task_id": task_id, "outcome": outcome, "reward": reward, "steps": steps, "checkpoint_id": "sft-1",
        "error": None if outcome.is_valid else "the desktop died", "started_at": 1_700_000_000.0,
    }  # fmt: skip
    return make_episode(name, **(fields | changes))


def make_state(root: Path) -> StateDir:
    """sft-1 succeeds at `a` with seed 3, fails it with seed 5, and has only a fault on `b`; gspo-1 succeeds at `a`."""
    state = StateDir(root)
    store = TrajectoryStore(state)
    write_table(
        state,
        "union_tasks",
        [
            task_row("a"),
            task_row("b", domain="chrome", config_domain="chrome", platform="windows"),
            task_row("c", task_config=None, has_task_config=False, platform="unknown", task_config_source="missing"),
        ],
    )
    write_table(state, "train_tasks", [task_row("a")])
    source = {"source_dataset": "sft_clean", "licence": "MIT", "is_present": True, "num_records": 2}
    write_table(state, "raw_counts", [source])
    image = store.write_blob(picture(200), suffix="png")
    write_table(state, "replay_buffer", [replay_row("r1", "a", images=[image]), replay_row("r2", "b", images=[image])])
    for name, stage, parent in (("sft-1", Stage.SFT, None), ("gspo-1", Stage.GSPO_PHASE1, "sft-1")):
        upsert_checkpoint(
            state,
            Checkpoint(
                checkpoint_id=name, stage=stage, parent_id=parent, path=f"checkpoints/{name}", num_updates=1,
                recipe_digest=f"recipe-of-{name}", data_digest="d", weights_digest="w",
            ),
        )  # fmt: skip
    played = (step(store, 0, 1, "pyautogui.click(1, 2)"), step(store, 1, 2, None), step(store, 2, 3, "DONE"))
    cut = (step(store, 0, 1, "WAIT"), step(store, 1, 9, "pyautogui.write('x')", "JPEG"))
    train = EpisodePurpose.TRAIN
    store.write_episodes(
        "a",
        [
            episode("e-success", "a", Outcome.SUCCESS, played, seed=3),
            episode("e-cut", "a", Outcome.TRUNCATED, cut, seed=5),
            episode("e-fault", "b", Outcome.ENV_FAULT, cut[:1], seed=3),
            episode("e-later", "a", Outcome.SUCCESS, played[2:], seed=3, checkpoint_id="gspo-1"),
            episode("t-success", "a", Outcome.SUCCESS, played, purpose=train, stage_key="gspo-1", update=0),
            episode("t-failure", "a", Outcome.FAILURE, played, purpose=train, stage_key="gspo-1", update=0, seed=1),
            # The screen of an imported step is not kept.
            episode(
                "i-0", "c", Outcome.SUCCESS, (make_step(0, sha256=""),), purpose=EpisodePurpose.IMPORT,
                checkpoint_id="", source_dataset="agentnet", licence="MIT",
            ),
        ],
    )  # fmt: skip
    return state
