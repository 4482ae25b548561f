"""Updates per second of our GSPO trainer compared with TRL's, on the same tiny model and the same tokens, and an upper
bound of the machine: bare forward and backward passes and optimiser steps."""

import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.processes import BenchmarkError
from benchmarks.spread import Spread, print_table, verdict
from osworld_pipeline.agent.processor import load_processor
from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.recipes.schema import GspoSharedSection, TinyModelSection, TrainerSection
from osworld_pipeline.training.batch import build_batch
from osworld_pipeline.training.micro_batches import split_by_size
from osworld_pipeline.training.model import load_model
from osworld_pipeline.training.objective.loss import sft_loss
from osworld_pipeline.training.objective.score import score_responses, score_trajectories
from osworld_pipeline.training.tiny.model import build_tiny_checkpoint
from osworld_pipeline.training.update import GspoTrainer

MIN_RATIO = 1.0
NUM_TASKS = 4
NUM_TURNS = 4
TINY = TinyModelSection(kind="tiny")
SETTINGS = GspoSharedSection(group_size=4, tasks_per_update=NUM_TASKS, minibatches_per_update=2, micro_batch_size=4)
NUM_EPISODES = SETTINGS.group_size * NUM_TASKS
SECTION = TrainerSection(activation_checkpointing=False)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Input of every trainer at every update."""

    folder: Path
    """The tiny checkpoint."""
    trajectories: tuple[Trajectory, ...]
    """Group after group."""

    @property
    def num_tokens(self) -> int:
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)


def run_trainers(console: Console, *, rounds: int, num_updates: int) -> list[dict[str, Any]]:
    """
    Raises:
        BenchmarkError: TRL is missing, or a trainer did not make its updates.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-training-"))
    try:
        work = make_work(folder / "model")
        trainers: dict[str, Callable[[Work, int], list[float]]] = {
            "ours": time_ours,
            "TRL": lambda work, count: time_trl(work, count, folder / "trl"),
            "bare": time_bare,
        }
        updates_per_s: dict[str, list[float]] = {name: [] for name in trainers}
        for number in range(rounds):
            # The order is reversed in each round, so that a machine that slows down favours no trainer.
            for name in list(trainers) if number % 2 == 0 else reversed(trainers):
                updates_per_s[name].append(1 / statistics.median(trainers[name](work, num_updates)))
        return [_report(console, work, updates_per_s)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _report(console: Console, work: Work, updates_per_s: dict[str, list[float]]) -> dict[str, Any]:
    ratio = Spread.of(a / b for a, b in zip(updates_per_s["ours"], updates_per_s["TRL"], strict=True))
    limit = Spread.of(a / b for a, b in zip(updates_per_s["ours"], updates_per_s["bare"], strict=True))
    names = {
        "ours": "ours: scoring, reference, 2 optimiser steps",
        "TRL": "TRL GRPOTrainer: the same",
        "bare": "bare forward, backward and 2 optimiser steps",
    }
    rows = []
    for name, values in updates_per_s.items():
        spread = Spread.of(values)
        tokens = Spread.of(value * work.num_tokens for value in values)
        rows.append((names[name], spread.range_text(3), tokens.range_text(0)))
    print_table(
        console,
        f"Updates of {len(work.trajectories)} episodes, {work.num_tokens} text tokens, GSPO with KL, float32, "
        f"{torch.get_num_threads()} threads; {len(updates_per_s['ours'])} rounds, in turns",
        ("trainer", "updates/s", "tokens/s"),
        rows,
    )
    is_met = ratio.median >= MIN_RATIO
    console.print(f"ours / TRL: {ratio.range_text(2)}x, required {MIN_RATIO:.1f}x: {verdict(is_met)}")
    console.print(f"ours / bare: {limit.range_text(2)}x; scoring and reference are two more forward passes")
    console.print("Only text tokens: TRL accepts pictures in prompts or from its tools, not between recorded turns.")
    return {
        "bench": "trainers",
        "num_tokens": work.num_tokens,
        "updates_per_s": {name: Spread.of(values).fields() for name, values in updates_per_s.items()},
        "ratio_to_trl": ratio.fields(),
        "ratio_to_bare": limit.fields(),
        "is_met": is_met,
    }


def make_work(folder: Path, *, seed: int = 0) -> Work:
    """Episodes of different lengths: a prompt, and turns of a response and an observation, with the sampler's
    log-probabilities. In each group the first half has an advantage of 1."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(1500)]
    build_tiny_checkpoint(folder, TINY, (" ".join(rng.choices(words, k=20)) for _ in range(500)))
    processor = load_processor(folder)
    special = set(processor.tokenizer.all_special_ids)
    ordinary = [token_id for token_id in range(len(processor.tokenizer)) if token_id not in special]
    trajectories = []
    for index in range(NUM_EPISODES):
        task, member = divmod(index, SETTINGS.group_size)
        # One prompt for each group, as for siblings.
        prompt_rng = random.Random(f"{seed}:{task}")
        ids = prompt_rng.choices(ordinary, k=prompt_rng.randint(120, 320))
        mask = [0] * len(ids)
        for turn in range(NUM_TURNS):
            num_response, num_observation = rng.randint(20, 60), rng.randint(40, 120) if turn < NUM_TURNS - 1 else 0
            ids += rng.choices(ordinary, k=num_response + num_observation)
            mask += [1] * num_response + [0] * num_observation
        trajectories.append(
            Trajectory(
                trajectory_id=f"e{index:02}",
                task_id=str(task),
                token_ids=tuple(ids),
                response_mask=tuple(mask),
                images=(),
                policy_versions=(0,) * len(ids),
                advantage=1.0 if member < SETTINGS.group_size // 2 else -1.0,
            )
        )
    logprobs = score_trajectories(load_model(folder), processor, trajectories)
    sampled = tuple(
        Trajectory(**{**vars(trajectory), "sampled_logprobs": tuple(row.tolist())})
        for trajectory, row in zip(trajectories, logprobs, strict=True)
    )
    return Work(folder=folder, trajectories=sampled)


def _load(work: Work) -> Any:
    model = load_model(work.folder)
    model.model.visual.requires_grad_(False)
    return model


def time_ours(work: Work, num_updates: int) -> list[float]:
    """Seconds of each update; the first is a warm-up and left out, as with the other trainers."""
    trainer = GspoTrainer(
        _load(work), load_processor(work.folder), SETTINGS, reference=load_model(work.folder, is_frozen=True),
        section=SECTION,
    )  # fmt: skip
    times = []
    for update in range(num_updates + 1):
        trajectories = _sampled_now(trainer, work, update)
        started = time.perf_counter()
        metrics = trainer.update(trajectories)
        times.append(time.perf_counter() - started)
        if metrics["num_optimizer_steps"] != SETTINGS.minibatches_per_update:
            raise BenchmarkError(f"our trainer made {metrics['num_optimizer_steps']:.0f} optimiser steps in an update")
    return times[1:]


def _sampled_now(trainer: GspoTrainer, work: Work, update: int) -> tuple[Trajectory, ...]:
    """The same tokens with the log-probabilities of the current weights: an update with only older tokens needs a
    canary, which only an engine can sample."""
    logprobs = score_trajectories(trainer.model, trainer.processor, work.trajectories)
    return tuple(
        replace(
            trajectory,
            policy_versions=(update,) * len(trajectory.token_ids),
            sampled_logprobs=tuple(row.tolist()),
        )
        for trajectory, row in zip(work.trajectories, logprobs, strict=True)
    )


def time_bare(work: Work, num_updates: int) -> list[float]:
    """Times only the passes with gradients and the optimiser steps; batches are built beforehand."""
    model, processor = _load(work), load_processor(work.folder)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), fused=True)
    half = NUM_EPISODES // 2
    minibatches = [
        [
            build_batch(processor, part)
            for part in split_by_size(
                work.trajectories[start : start + half],
                max_tokens=SECTION.max_tokens_per_batch,
                max_sequences=SETTINGS.micro_batch_size,
            )
        ]
        for start in (0, half)
    ]
    model.train()
    times = []
    for _ in range(num_updates + 1):
        started = time.perf_counter()
        for minibatch in minibatches:
            for batch in minibatch:
                sft_loss(score_responses(model, batch).logprobs_BT, batch.response_mask_BT).backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return times[1:]


def time_trl(work: Work, num_updates: int, folder: Path) -> list[float]:
    """TRL's own training loop, whose sampler returns the recorded episodes."""
    try:
        from datasets import Dataset
        from transformers import PrinterCallback, TrainerCallback
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer
    except ImportError as error:
        raise BenchmarkError(f"TRL is not installed ({error}): install the extra `dev`") from error

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.ends.append(time.perf_counter())

    num_steps = SETTINGS.minibatches_per_update
    accumulated = NUM_EPISODES // num_steps // SETTINGS.micro_batch_size
    config = GRPOConfig(
        output_dir=str(folder), use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False,
        per_device_train_batch_size=SETTINGS.micro_batch_size, gradient_accumulation_steps=accumulated,
        steps_per_generation=accumulated * num_steps, num_generations=SETTINGS.group_size,
        max_steps=(num_updates + 1) * num_steps, max_completion_length=4096, learning_rate=SETTINGS.learning_rate,
        lr_scheduler_type="constant", adam_beta1=SETTINGS.beta1, adam_beta2=SETTINGS.beta2,
        weight_decay=SETTINGS.weight_decay, max_grad_norm=SETTINGS.max_grad_norm, beta=SETTINGS.kl_coef,
        entropy_coef=SETTINGS.entropy_coef, epsilon=SETTINGS.clip_low, epsilon_high=SETTINGS.clip_high,
        importance_sampling_level="sequence", loss_type="grpo", shuffle_dataset=False, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    clock = Clock()
    trainer = GRPOTrainer(
        _load(work), reward_funcs=_earned, args=config, rollout_func=Recorded(work), callbacks=[clock],
        train_dataset=Dataset.from_list([{"prompt": str(task)} for task in range(NUM_TASKS)]),
        processing_class=load_processor(work.folder).tokenizer,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    with warnings.catch_warnings():
        # TRL uses deprecated names of transformers.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        trainer.train()
    ends = clock.ends[num_steps - 1 :: num_steps]
    if len(ends) != num_updates + 1:
        raise BenchmarkError(f"TRL made {len(clock.ends)} optimiser steps instead of {(num_updates + 1) * num_steps}")
    return [end - before for before, end in pairwise(ends)]


class Recorded:
    """TRL's `rollout_func`: a prompt is a task's id, and its siblings are that group's episodes."""

    def __init__(self, work: Work) -> None:
        self._groups = {
            task: list(group) for task, group in groupby(work.trajectories, key=lambda trajectory: trajectory.task_id)
        }

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "env_mask": []}
        found["earned"] = []
        members = {task: iter(group) for task, group in self._groups.items()}
        for prompt in prompts:
            trajectory = next(members[prompt])
            start = trajectory.response_mask.index(1)
            found["prompt_ids"].append(list(trajectory.token_ids[:start]))
            found["completion_ids"].append(list(trajectory.token_ids[start:]))
            found["env_mask"].append(list(trajectory.response_mask[start:]))
            found["logprobs"].append(list((trajectory.sampled_logprobs or ())[start:]))
            found["earned"].append(trajectory.advantage)
        return found


def _earned(*, earned: Sequence[float], **kwargs: Any) -> list[float | None]:
    return list(earned)
