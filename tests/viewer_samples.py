"""A small store with all that the viewer shows: two checkpoints evaluated on the same tasks, groups with a replay row
and a fault, every kind of action, and screenshots on which a click's place can be seen."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from PIL import Image, ImageDraw

from osworld_pipeline.domain.episode import (
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    StepSignals,
    TokenSequence,
)
from osworld_pipeline.domain.group import GroupStatus, RolloutGroup
from osworld_pipeline.domain.replay import Injection
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.store import TrajectoryStore
from osworld_pipeline.tables.owned import write_table
from osworld_pipeline.training.objective.advantage import compute_advantages

SIZE = (1024, 640)
BASE, SFT, GSPO = "base-000000000000", "sft-111111111111", "gspo_phase1-222222222222"
KEY = "0123456789ab"
BUTTON = (700, 430, 840, 474)
"""Of the picture, in pixels: left, top, right, bottom."""
CLICK = (770, 452)
"""The button's middle."""
HOSTILE = "<script>document.title='taken over'</script><img src=x onerror=\"document.title='taken over'\">"
TASKS = (
    ("desktop-basics-click_button-0001", "dialogs", "Click the button Save."),
    ("desktop-basics-rename_folder-0002", "files", "Rename the folder alpha on the desktop to bravo."),
    ("desktop-basics-type_text-0003", "editor", "Write “hello there” into the open text file and save it."),
    ("desktop-basics-close_window-0004", "dialogs", "Close the window that asks for an update."),
    ("desktop-basics-sort_list-0005", "sheets", "Sort the first column of the sheet from Z to A."),
    ("desktop-basics-find_word-0006", "editor", "Find the word needle and put the cursor behind it."),
)
UNREADABLE = "I am thinking about the desktop and " * 4


def draw_screen(title: str, *, note: str = "", is_saved: bool = False, shade: int = 0) -> bytes:
    """A desktop with a window and the button Save at BUTTON, as PNG."""
    image = Image.new("RGB", SIZE, (38, 70 + shade, 96))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, SIZE[0], 26), fill=(28, 30, 34))
    draw.text((12, 7), "Activities      Files   Terminal", fill=(230, 230, 230))
    for place, name in enumerate(("alpha", "notes.txt", "sheet")):
        top = 60 + 110 * place
        draw.rectangle((36, top, 92, top + 48), fill=(230, 178, 82))
        draw.text((44, top + 56), name, fill=(255, 255, 255))
    draw.rectangle((180, 90, 880, 500), fill=(250, 250, 248), outline=(70, 74, 80))
    draw.rectangle((180, 90, 880, 120), fill=(222, 224, 228))
    draw.text((196, 99), title, fill=(30, 30, 30))
    draw.text((210, 150), note, fill=(30, 30, 30))
    draw.rectangle(BUTTON, fill=(28, 130, 76) if is_saved else (36, 86, 199))
    draw.text((BUTTON[0] + 48, BUTTON[1] + 14), "Saved" if is_saved else "Save", fill=(255, 255, 255))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def said(action: dict[str, Any], words: str) -> str:
    call = {"name": "computer_use", "arguments": action}
    return f"Action: {words}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


@dataclass(frozen=True)
class Turn:
    """The response of a model, the action that was read from it, and the command for the desktop."""

    response: str
    action: dict[str, Any] | None = None
    command: str | None = None
    error: str | None = None


def act(words: str, action: dict[str, Any], command: str) -> Turn:
    return Turn(said(action, words), action, command)


CLICK_SAVE = act(
    'Click "Save".', {"action": "left_click", "coordinate": list(CLICK)}, f"pyautogui.click({CLICK[0]}, {CLICK[1]})"
)
TYPE = act("Type the words.", {"action": "type", "text": "hello there\n"}, 'pyautogui.write("hello there\\n")')
KEYS = act("Save the file.", {"action": "key", "keys": ["ctrl", "s"]}, 'pyautogui.hotkey("ctrl", "s")')
DRAG = act(
    "Drag the folder.",
    {"action": "left_click_drag", "start_coordinate": [64, 84], "end_coordinate": [520, 300]},
    "pyautogui.moveTo(64, 84)\npyautogui.dragTo(520, 300)",
)
SCROLL = act(
    "Scroll down.",
    {"action": "scroll", "coordinate": [530, 300], "direction": "down", "amount": 3},
    "pyautogui.moveTo(530, 300)\npyautogui.scroll(-3)",
)
DONE = act("The task is done.", {"action": "terminate", "status": "success"}, "DONE")
UNREAD = Turn(UNREADABLE, error="no tool call in the response")
REFUSED = Turn(said({"action": "key", "keys": ["hyper"]}, "Press it."), {"action": "key", "keys": ["hyper"]},
               'pyautogui.press("hyper")', "the desktop refused: no key named 'hyper'")  # fmt: skip
SOLVING = (DRAG, SCROLL, CLICK_SAVE, TYPE, KEYS, DONE)
FAILING = (SCROLL, UNREAD, CLICK_SAVE, REFUSED)


def make_steps(images: Sequence[str], turns: Sequence[Turn], *, version: int = 0) -> tuple[Step, ...]:
    steps = []
    for index, turn in enumerate(turns):
        kind = turn.action["action"] if turn.action else "unknown"
        point = (turn.action or {}).get("coordinate") or (turn.action or {}).get("start_coordinate")
        steps.append(
            Step(
                step_index=index,
                screenshot_sha256=images[min(index, len(images) - 1)],
                screenshot_width=SIZE[0],
                screenshot_height=SIZE[1],
                screenshot_format="png",
                screenshot_num_bytes=4_000,
                observation_text=f"Task: step {index}\n[Accessibility]\nbutton Save ({CLICK[0]}, {CLICK[1]})",
                response_text=turn.response,
                action=turn.action,
                command=turn.command,
                signals=StepSignals(
                    action_type=kind,
                    action_parsed=turn.action is not None,
                    action_executed=turn.action is not None and turn.error is None,
                    action_error=turn.error,
                    target_element="Save" if turn is CLICK_SAVE else None,
                    a11y_grounded=turn is CLICK_SAVE,
                    coordinate=None if point is None else (point[0], point[1]),
                    screen_diff=0.031 if turn is not UNREAD else 0.0,
                    screen_changed=turn is not UNREAD,
                ),
                policy_version=version,
                prompt_num_tokens=310 + 90 * index,
                response_num_tokens=len(turn.response.encode()),
                model_s=0.4 + 0.35 * (index % 3),
                step_s=0.3 + 0.2 * (index % 2),
            )
        )
    return tuple(steps)


def sequence_of(turns: Sequence[Turn]) -> TokenSequence:
    """One token a byte, of the vocabulary that `write_vocabulary` writes; rarer bytes have lower log-probabilities."""
    ids, mask, logprobs = [], [], []
    for turn in turns:
        data = turn.response.encode()
        ids += [0, 0, *data]
        mask += [0, 0, *([1] * len(data))]
        logprobs += [0.0, 0.0, *(-5.5 if byte in b"CDS" else -0.9 if byte % 7 == 0 else -0.02 for byte in data)]
    versions = [0 if sampled else -1 for sampled in mask]
    return TokenSequence(
        token_ids=tuple(ids),
        response_mask=tuple(mask),
        sampled_logprobs=tuple(logprobs),
        policy_versions=tuple(versions),
        image_steps=tuple(range(len(turns))),
    )


def make_played(episode_id: str, images: Sequence[str], turns: Sequence[Turn], **changes: Any) -> Episode:
    """An episode of these turns; by default it is a success in an evaluation of SFT."""
    outcome = changes.setdefault("outcome", Outcome.SUCCESS)
    shaped = changes.pop("shaped", {Outcome.SUCCESS: 0.92, Outcome.FAILURE: 0.18, Outcome.TRUNCATED: 0.1}.get(outcome))
    parts = {"action_parse_valid": 0.9, "a11y_grounding": 0.5, "screen_change": 0.7, "penalty_repetition": 0.2}
    fields: dict[str, Any] = {
        "task_id": TASKS[0][0],
        "task_digest": "d" * 64,
        "purpose": EpisodePurpose.EVALUATE,
        "checkpoint_id": SFT,
        "engine": "transformers",
        "dialect": "slime",
        "coordinate_space": "model_pixels",
        "sampling": SamplingParams(temperature=0.8, top_p=0.95),
        "reward": Reward(task=float(outcome is Outcome.SUCCESS), partial=0.4, penalty=0.1, shaped=shaped, parts=parts)
        if outcome.is_valid
        else None,
        "steps": make_steps(images, turns),
        "sequences": (sequence_of(turns),),
        "stage_key": f"eval-{SFT}-{KEY}",
        "replica_id": "local-0",
        "provider": "local",
        "image_digest": "9" * 64,
        "grader_version": "1",
        "max_turns": 6,
        "times_s": {"reset": 0.6, "model": 4.2, "step": 2.1, "evaluate": 0.4, "total": 7.4},
        "started_at": 1_790_000_000.0,
        "run_ids": {"mlflow": "abc123", "dagster": "run-1"},
    }
    return Episode(episode_id=episode_id, **(fields | changes))


def write_vocabulary(state: StateDir, checkpoint_id: str) -> None:
    """A byte-level tokenizer whose token ids are the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}
    folder = state.checkpoints / checkpoint_id
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {name: byte for byte, name in names.items()}
    found = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": [{"id": 300, "content": "<|im_end|>"}]}
    (folder / "tokenizer.json").write_bytes(orjson.dumps(found))


def checkpoint_row(checkpoint_id: str, stage: str, parent: str | None, **changes: Any) -> dict[str, Any]:
    recipe = {"name": "demo", "agent": {"dialect": "slime"}, "gspo": {"advantage": "mean_std"}}
    return {
        "checkpoint_id": checkpoint_id, "stage": stage, "parent_id": parent, "path": f"checkpoints/{checkpoint_id}",
        "num_updates": 20, "run_ids": {"mlflow": "abc123", "dagster": "run-1"}, "recipe": json.dumps(recipe),
    } | changes  # fmt: skip


def write_suite(state: StateDir, name: str, **instructions: str) -> Path:
    """A suite of the user's own: instructions by task id."""
    evaluator = {"func": "exact_match", "result": {"type": "vm_command_line", "command": "id"},
                 "expected": {"type": "rule", "rules": {"expected": ""}}}  # fmt: skip
    tasks = [
        {"id": task_id, "instruction": instruction, "config": [], "evaluator": evaluator}
        for task_id, instruction in instructions.items()
    ]
    path = state.suites / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tasks))
    return path


def write_sample_store(state: StateDir) -> None:
    """Two checkpoints on six tasks with two seeds, two groups of GSPO, and one episode that writes markup."""
    store = TrajectoryStore(state)
    images = [
        store.write_blob(draw_screen(title, note=note, is_saved=index > 2, shade=4 * index), suffix="png")
        for index, (title, note) in enumerate(
            [
                ("Unsaved changes", ""),
                ("Unsaved changes", "alpha"),
                ("Unsaved changes", "hello"),
                ("Saved", "hello there"),
            ]
        )
    ]
    write_table(state, "union_tasks", [
        {"task_id": name, "domain": domain, "instruction": instruction, "has_task_config": True}
        for name, domain, instruction in TASKS
    ])  # fmt: skip
    write_table(state, "checkpoints", [
        checkpoint_row(BASE, "base", None, num_updates=0),
        checkpoint_row(SFT, "sft", BASE),
        checkpoint_row(GSPO, "gspo_phase1", SFT),
    ])  # fmt: skip
    for checkpoint_id in (SFT, GSPO):
        write_vocabulary(state, checkpoint_id)
    for place, checkpoint_id in enumerate((SFT, GSPO)):
        episodes = []
        for number, (task_id, _, _) in enumerate(TASKS):
            for seed in range(2):
                solves = (number + seed) % 3 == 0 if place == 0 else number != 4
                is_fault = number == 5 and seed == 1 and place == 0
                outcome = Outcome.SUCCESS if solves else (Outcome.FAILURE if seed else Outcome.TRUNCATED)
                episodes.append(
                    make_played(
                        f"eval-{checkpoint_id}-{KEY}-{task_id}-s{seed}",
                        images,
                        () if is_fault else SOLVING if solves else FAILING,
                        task_id=task_id,
                        seed=seed,
                        checkpoint_id=checkpoint_id,
                        stage_key=f"eval-{checkpoint_id}-{KEY}",
                        outcome=Outcome.ENV_FAULT if is_fault else outcome,
                        error="replica local-3 did not answer within 30.0 s" if is_fault else None,
                        started_at=1_790_000_000.0 + 600 * place + 20 * number + seed,
                    )
                )
        store.write_episodes(f"eval-{checkpoint_id}-{KEY}", episodes)
    for update in range(2):
        write_group(store, images, update)
    store.write_episodes("hostile", [
        make_played("hostile", images, [Turn(HOSTILE), CLICK_SAVE], task_id="other-<b>task</b>", seed=7,
                    outcome=Outcome.FAILURE, started_at=1_789_000_000.0),
    ])  # fmt: skip


def write_group(store: TrajectoryStore, images: Sequence[str], update: int) -> RolloutGroup:
    """Four siblings, one of them a fault; in the first update none succeeds and a replay row is added."""
    group_id = f"{GSPO}-u{update:04d}-g00"
    rewards = (0.1, 0.3, 0.2) if update == 0 else (0.9, 0.2, 0.4)
    common: dict[str, Any] = {
        "task_id": TASKS[1][0],
        "purpose": EpisodePurpose.TRAIN,
        "checkpoint_id": GSPO,
        "stage_key": GSPO,
        "group_id": group_id,
        "update": update,
    }
    advantages = compute_advantages([*rewards, 1.0] if update == 0 else rewards)
    episodes = [
        make_played(
            f"{group_id}-s{seed:02d}",
            images,
            SOLVING if shaped > 0.5 else FAILING[: 2 + seed],
            outcome=Outcome.SUCCESS if shaped > 0.5 else Outcome.TRUNCATED,
            shaped=shaped,
            advantage=advantages[seed],
            seed=seed,
            started_at=1_790_010_000.0 + 100 * update + seed,
            **common,
        )
        for seed, shaped in enumerate(rewards)
    ]
    episodes.append(
        make_played(f"{group_id}-s03", images, (), outcome=Outcome.POLICY_FAULT, seed=3,
                    error="the engine answered 503 three times", started_at=1_790_010_003.0, **common)
    )  # fmt: skip
    store.write_episodes(f"{GSPO}-u{update:04d}", episodes)
    group = RolloutGroup(
        group_id=group_id,
        task_id=TASKS[1][0],
        stage_key=GSPO,
        update=update,
        episodes=tuple(episodes),
        status=GroupStatus.TRAINED,
    )
    injections = [
        Injection(injection_id=f"{group_id}-r", group_id=group_id, row_id="9ab9cfcd7089f3a6848918f4",
                  task_id=TASKS[1][0], source_dataset="sft_curated_final", reward=1.0, advantage=1.45, weight=1.0)
    ] if update == 0 else []  # fmt: skip
    store.write_groups(f"{GSPO}-u{update:04d}", [group], injections)
    return group
