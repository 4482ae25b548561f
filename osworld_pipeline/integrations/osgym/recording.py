"""Connects the replay buffer and the trajectory store: finished episodes are written in the store's format, and
recorded ones fill a buffer, token by token.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from osworld_pipeline.domain.episode import (
    ContextMode,
    Episode,
    EpisodePurpose,
    Outcome,
    Reward,
    SamplingParams,
    Step,
    TokenSequence,
)
from osworld_pipeline.integrations.osgym.batches import StepTokens
from osworld_pipeline.integrations.osgym.encoding import EncodedPrompt
from osworld_pipeline.integrations.osgym.replay_buffer import Item, ReplayBuffer
from osworld_pipeline.integrations.osgym.step_record import StepRecord
from osworld_pipeline.protocols import EpisodeSink
from osworld_pipeline.store.trajectories import TrajectoryStore

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Growing:
    started_at: float
    meta_info: Mapping[str, Any]
    steps: list[Step] = field(default_factory=list)
    sequences: list[TokenSequence] = field(default_factory=list)


class EpisodeRecorder:
    """Writes each episode of environments that report step records (as `OsgymEnv` does) as a separate part when it
    ends: complete, with its outcome, or as a fault without a reward."""

    def __init__(
        self,
        store: EpisodeSink,
        *,
        checkpoint_id: str,
        sampling: SamplingParams,
        engine: str = "osgym",
        policy_version: int = 0,
        success_threshold: float = 1.0,
        max_turns: int = 0,
    ) -> None:
        """`policy_version`: number of updates in the sampling weights; set it again when they change."""
        self.policy_version = policy_version
        self._store = store
        self._checkpoint_id, self._sampling, self._engine = checkpoint_id, sampling, engine
        self._success_threshold, self._max_turns = success_threshold, max_turns
        self._growing: dict[str, _Growing] = {}

    def add(self, env_ret: Mapping[str, Any], meta_info: Mapping[str, Any], tokens: StepTokens) -> None:
        """Adds one step; the last one writes the episode.

        Raises:
            ValueError: the environment reports no step records.
            StoreError: the file system refused.
        """
        record, uid = env_ret.get("record"), meta_info["uid"]
        if not isinstance(record, StepRecord):
            raise ValueError(f"a step of episode {uid} has no record: only environments that report one are recorded")
        growing = self._growing.setdefault(uid, _Growing(started_at=time.time(), meta_info=meta_info))
        sha256 = self._store.write_blob(record.screenshot, suffix=record.suffix)
        growing.steps.append(
            Step(
                **record.fields,
                step_index=len(growing.steps),
                screenshot_sha256=sha256,
                policy_version=self.policy_version,
                prompt_num_tokens=len(tokens.prompt.token_ids),
                response_num_tokens=len(tokens.response_ids),
            )
        )
        if tokens.logprobs is not None:
            growing.sequences.append(self._sequence(tokens, len(growing.steps)))
        if env_ret.get("done"):
            reward, tampering = float(env_ret["reward"]), env_ret.get("tampering")
            outcome = Outcome.TRUNCATED if env_ret.get("is_truncated") else Outcome.FAILURE
            if tampering is not None:
                outcome = Outcome.TAMPERING
            elif reward >= self._success_threshold:
                outcome = Outcome.SUCCESS
            self._write(uid, outcome, reward=Reward(task=reward, shaped=reward), error=tampering)

    def fault(self, uid: str, reason: str) -> None:
        """Records a lost episode as an env fault. If no step of it was recorded, nothing is written."""
        if uid in self._growing:
            self._write(uid, Outcome.ENV_FAULT, error=reason)

    def _write(self, uid: str, outcome: Outcome, *, reward: Reward | None = None, error: str | None = None) -> None:
        growing = self._growing.pop(uid)
        meta = growing.meta_info
        episode = Episode(
            episode_id=f"osgym-{uid}",
            task_id=meta.get("task_id", ""),
            task_digest=meta.get("task_digest", ""),
            purpose=EpisodePurpose.TRAIN,
            checkpoint_id=self._checkpoint_id,
            engine=self._engine,
            sampling=self._sampling,
            outcome=outcome,
            error=error,
            reward=reward,
            steps=tuple(growing.steps),
            context_mode=ContextMode.WINDOW,
            # Without the log-probabilities of every step, token ids are of no use to a trainer.
            sequences=tuple(growing.sequences) if len(growing.sequences) == len(growing.steps) else (),
            replica_id=meta.get("replica_id", ""),
            provider=meta.get("provider", ""),
            image_digest=meta.get("image_digest", ""),
            grader_version=meta.get("grader_version", ""),
            max_turns=self._max_turns,
            started_at=growing.started_at,
            times_s={"total": time.time() - growing.started_at},
        )
        self._store.write_episodes(episode.episode_id, [episode])

    def _sequence(self, tokens: StepTokens, num_steps: int) -> TokenSequence:
        prompt, response = tokens.prompt.token_ids, tokens.response_ids
        assert tokens.logprobs is not None, "checked by the caller"
        return TokenSequence(
            token_ids=(*prompt, *response),
            response_mask=(0,) * len(prompt) + (1,) * len(response),
            sampled_logprobs=(0.0,) * len(prompt) + tokens.logprobs,
            policy_versions=(-1,) * len(prompt) + (self.policy_version,) * len(response),
            image_steps=tuple(range(num_steps - len(tokens.prompt.images), num_steps)),
        )


def fill_from_store(buffer: ReplayBuffer, store: TrajectoryStore, *, prefix: str = "") -> int:
    """Adds the steps of recorded episodes (of parts whose names start with `prefix`) to the buffer, with the sampled
    ids; returns the number of episodes. Episodes that are not valid, or that have no token ids, are skipped.

    Raises:
        StoreError: a part or a screenshot cannot be read.
    """
    count = 0
    parts = store.existing_parts(prefix=prefix)
    for episodes in store.read_parts(parts).values():
        for episode in episodes:
            items = list(_items_of(episode, store))
            for item in items:
                buffer.add(item)
            count += bool(items)
    return count


def _items_of(episode: Episode, store: TrajectoryStore) -> Iterator[Item]:
    if not episode.outcome.is_valid or episode.reward is None:
        return
    turns = [turn for sequence in episode.sequences for turn in _turns_of(sequence)]
    meta_info = {"uid": episode.episode_id, "task_id": episode.task_id}
    images: dict[int, bytes] = {}
    for index, (start, end, sequence, shown) in enumerate(turns):
        for step in shown:
            if step not in images:
                images[step] = store.read_blob(episode.steps[step].screenshot_sha256)
        prompt_ids = sequence.token_ids[:start]
        tokens = StepTokens(
            prompt=EncodedPrompt(
                token_ids=prompt_ids, raw_token_ids=prompt_ids, images=tuple(images[step] for step in shown)
            ),
            response_ids=sequence.token_ids[start:end],
            logprobs=sequence.sampled_logprobs[start:end],
        )
        is_last = index == len(turns) - 1
        reward = episode.reward.task if is_last else 0.0
        yield -1, {"reward": reward, "done": is_last, "is_init": False, "tokens": tokens}, meta_info


def _turns_of(sequence: TokenSequence) -> Iterator[tuple[int, int, TokenSequence, tuple[int, ...]]]:
    """For each run of sampled tokens: its first index, its end, the sequence, and the steps whose screenshots come
    before the run. In a sequence with several turns, each turn shows one more screenshot."""
    mask = (*sequence.response_mask, 0)
    starts = [at for at, value in enumerate(mask) if value and not (at and mask[at - 1])]
    for index, start in enumerate(starts):
        end = mask.index(0, start)
        still_to_come = len(starts) - 1 - index
        yield start, end, sequence, sequence.image_steps[: len(sequence.image_steps) - still_to_come]
