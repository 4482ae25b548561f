"""OSGym's MultiTurnDataloader: one process per environment, batches of those that are ready, and a replay buffer that
it fills.

A batch holds the prompts of environments that wait for an action; `async_step` answers them, in any order and number.
Sampled tokens are kept: neither prompt nor response is tokenised again for training. Every wait is bounded. A lost
desktop or a dead process loses its episode, which has no reward, and is replaced.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Literal, Self

from osworld_pipeline.errors import EnvServerError
from osworld_pipeline.integrations.osgym.batches import Batch, StepTokens, collate, prompt_row, step_row
from osworld_pipeline.integrations.osgym.encoding import EncodedPrompt, PromptEncoder
from osworld_pipeline.integrations.osgym.prompts import Prompt, read_prompt
from osworld_pipeline.integrations.osgym.recording import EpisodeRecorder
from osworld_pipeline.integrations.osgym.replay_buffer import Item, ReplayBuffer
from osworld_pipeline.integrations.osgym.worker import EnvClass, EnvProcess, Fault, State, close_processes

log = logging.getLogger(__name__)

SlotState = Literal["busy", "ready", "offered"]
"""`busy`: in a reset or step; `ready`: has a prompt; `offered`: its prompt waits for an action."""
RUNNING_SHARE = 0.01
"""Weight of the newest episode in the running mean of outcomes."""


@dataclass(kw_only=True, eq=False)
class _Slot:
    worker_id: int
    process: EnvProcess
    state: SlotState = "busy"
    prompt: Prompt = ()
    encoded: EncodedPrompt | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    tokens: StepTokens | None = None
    """Tokens of the step in progress."""
    num_faults: int = 0
    """Faults since the last successful step."""


class MultiTurnDataloader:
    """Close it, or use it as a context manager. Not thread-safe."""

    def __init__(
        self,
        env_class: EnvClass,
        env_configs: Sequence[Any],
        tokenizer: Any,
        processor: Any = None,
        is_multi_modal: bool = True,
        batch_size: int = 8,
        replay_capacity: int = 10_000,
        replay_reward_discount: float = 0.9,
        max_prompt_length: int = 1024,
        max_response_length: int = 1024,
        only_keep_outcome_in_replay: bool = False,
        *,
        timeout_s: float = 600.0,
        max_faults: int = 5,
        close_grace_s: float = 15.0,
        image_text: str | None = None,
        recorder: EpisodeRecorder | None = None,
        seed: int | None = None,
    ) -> None:
        """`timeout_s` limits each wait for environments; an environment that fails `max_faults` times in a row ends the
        run. `recorder` writes finished episodes to a trajectory store. `image_text`: see `PromptEncoder`.

        Raises:
            ValueError: a batch has more rows than environments, each of which runs one step at a time, or the tokenizer
                has no padding token.
        """
        if not 1 <= batch_size <= len(env_configs):
            raise ValueError(
                f"batch_size is {batch_size}, but must be 1 to {len(env_configs)}, because a batch has at most one "
                "row of each environment: give more env_configs, or a smaller batch_size"
            )
        self.num_envs, self.batch_size = len(env_configs), batch_size
        self.max_response_length = max_response_length
        self.replay = ReplayBuffer(replay_capacity, replay_reward_discount, only_keep_outcome_in_replay, seed=seed)
        self.num_faults = 0
        """Number of lost episodes."""
        self._encoder = PromptEncoder(
            tokenizer, processor if is_multi_modal else None, max_length=max_prompt_length, image_text=image_text
        )
        self._env_class, self._env_configs = env_class, tuple(env_configs)
        self._timeout_s, self._max_faults, self._close_grace_s = timeout_s, max_faults, close_grace_s
        self._recorder = recorder
        self._ready: deque[_Slot] = deque()
        self._slots: list[_Slot] = []
        self._running_reward = 0.0
        self._is_closed = False
        try:
            for worker_id in range(self.num_envs):
                slot = _Slot(worker_id=worker_id, process=self._start(worker_id))
                self._slots.append(slot)
                self._reset(slot)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The prompts of the `batch_size` environments that have waited longest. The iteration never ends.

        Raises:
            ValueError: too many environments wait for an action; a prompt does not fit `max_prompt_length`.
            EnvServerError: too few environments became ready in time, or one fails repeatedly; names it.
        """
        self._gather_until(lambda: len(self._ready) >= self.batch_size, f"{self.batch_size} environments to be ready")
        slots = [self._ready[index] for index in range(self.batch_size)]
        rows = []
        for slot in slots:
            slot.encoded = self._encoder.encode(slot.prompt)
            rows.append(prompt_row(self._encoder, slot.encoded, slot.worker_id, slot.meta_info))
        for slot in slots:
            self._ready.popleft()
            slot.state = "offered"
        return collate(rows)

    def async_step(self, batch_return: Mapping[str, Any]) -> None:
        """Sends each row's response to its environment and returns immediately.

        Keys: `responses` (B, R), `attention_mask` (B, P + R) that selects the valid ones, `worker_id`, `meta_info`, and
        `rollout_log_probs` (B, R) if the policy reports them. Other keys are ignored. An answer to an episode that was
        lost in the meantime is dropped.

        Raises:
            ValueError: an environment whose prompt was not taken, a repeated environment, or an empty response; in
                these cases no response is sent.
            EnvServerError: an environment has failed `max_faults` times in a row.
        """
        answers = [self._answer_of(batch_return, row) for row in range(len(batch_return["worker_id"]))]
        if len({slot.worker_id for slot, _ in answers if slot is not None}) < sum(bool(slot) for slot, _ in answers):
            raise ValueError("two rows belong to one environment, which accepts one action at a time")
        for slot, tokens in answers:
            if slot is None:
                continue
            slot.state, slot.tokens = "busy", tokens
            if not slot.process.ask("step", self._text_of(tokens.response_ids)):
                self._lost(slot, slot.process.ending, is_gone=True)

    def sample_from_buffer(self, batch_size: int | None = None, *, is_balanced: bool = True) -> Batch:
        """Recorded steps with their returns as `reward`; waits until there are enough.

        Raises:
            ValueError: there are fewer, and no environment is acting.
            EnvServerError: there were not enough in time, or an environment fails repeatedly; names it.
        """
        wanted = batch_size or self.batch_size
        self._gather_until(lambda: len(self.replay) >= wanted, f"{wanted} steps of finished episodes")
        return collate([self._step_row(item) for item in self.replay.sample(wanted, is_balanced=is_balanced)])

    def clear_replay_buffer(self) -> None:
        self.replay.clear()

    def get_balance_stats(self) -> tuple[int, int]:
        return self.replay.get_balance_stats()

    def calculate_outcome_reward(self) -> float:
        """Mean return of the last steps of the episodes in the buffer; 0 without episodes."""
        outcomes = [env_ret["reward"] for _, env_ret, _ in self.replay.items if env_ret.get("done")]
        return sum(outcomes) / len(outcomes) if outcomes else 0.0

    def running_outcome_reward(self) -> float:
        """Running mean over ended episodes that weights the newest most; starts at 0."""
        return self._running_reward

    def print_stats_in_replay_buffer(self) -> None:
        """Prints the numbers of steps and episodes, a histogram of episode lengths, and the balance."""
        print(self.stats_in_replay_buffer())

    def stats_in_replay_buffer(self) -> str:
        steps_of = Counter(meta_info["uid"] for _, _, meta_info in self.replay.items)
        episodes_of = Counter(steps_of.values())
        lengths = ", ".join(f"{length}-{episodes_of[length]}" for length in sorted(episodes_of))
        below, above = self.get_balance_stats()
        return (
            f"Replay buffer size: {len(self.replay)}. Number of uids: {len(steps_of)}. Histogram of item counts per "
            f"uid in replay buffer (x-y): {lengths}. Below the balance threshold: {below}, not below: {above}. "
            f"Episodes lost: {self.num_faults}."
        )

    def close(self) -> None:
        """Ends the environments' processes and releases their desktops; idempotent, with bounded waits."""
        if not self._is_closed:
            self._is_closed = True
            close_processes([slot.process for slot in self._slots], grace_s=self._close_grace_s)
            self._ready.clear()

    def _start(self, worker_id: int) -> EnvProcess:
        return EnvProcess(self._env_class, self._env_configs[worker_id], worker_id)

    def _reset(self, slot: _Slot) -> None:
        slot.state, slot.prompt, slot.encoded, slot.tokens, slot.meta_info = "busy", (), None, None, {}
        # A process that ended before it received this is detected by its sentinel.
        slot.process.ask("reset")

    def _gather_until(self, is_enough: Callable[[], bool], what: str) -> None:
        if self._is_closed:
            raise ValueError("the dataloader is closed")
        deadline = time.monotonic() + self._timeout_s
        self._gather(0.0)
        while not is_enough():
            busy = sum(slot.state == "busy" for slot in self._slots)
            if not busy:
                waiting = sum(slot.state == "offered" for slot in self._slots)
                raise ValueError(
                    f"waiting for {what} would never end: {waiting} of {self.num_envs} environments wait for an "
                    "action; answer them with async_step"
                )
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise EnvServerError(
                    f"waited {self._timeout_s:g} s for {what}: {busy} of {self.num_envs} environments are still "
                    "resetting or acting; check the env server, or raise timeout_s"
                )
            self._gather(left_s)

    def _gather(self, timeout_s: float) -> None:
        """Receives pending messages of environments; waits for the first one if there are none."""
        by_handle: dict[Any, _Slot] = {}
        for slot in self._slots:
            if slot.state == "busy":
                by_handle[slot.process.connection] = slot
                by_handle[slot.process.sentinel] = slot
        if not by_handle:
            return
        pending = {by_handle[handle].worker_id for handle in wait(list(by_handle), timeout_s)}
        for worker_id in sorted(pending):
            slot = self._slots[worker_id]
            said = slot.process.receive()
            if isinstance(said, State):
                self._take(slot, said)
            elif isinstance(said, Fault):
                self._lost(slot, said.sentence)
            else:
                self._lost(slot, slot.process.ending, is_gone=True)

    def _take(self, slot: _Slot, state: State) -> None:
        tokens, slot.tokens = slot.tokens, None
        try:
            prompt = read_prompt(state.env_ret["obs"])
            if tokens is not None:
                self._keep(slot, state, tokens)
        except (ValueError, KeyError) as error:
            self._lost(slot, f"it sent an invalid answer: {error}")
            return
        if tokens is not None:
            slot.num_faults = 0
            if state.env_ret.get("done"):
                self._reset(slot)
                return
        slot.prompt, slot.meta_info, slot.encoded = _shared(prompt, slot.prompt), state.meta_info, None
        slot.state = "ready"
        self._ready.append(slot)

    def _keep(self, slot: _Slot, state: State, tokens: StepTokens) -> None:
        """Adds the step to the buffer and to the record of its episode. `tokens` contains its prompt, so the
        observations are not kept."""
        uid = state.meta_info["uid"]
        env_ret = {key: value for key, value in state.env_ret.items() if key not in ("obs", "prev_obs")}
        self.replay.add((slot.worker_id, {**env_ret, "tokens": tokens}, state.meta_info))
        if self._recorder is not None:
            self._recorder.add(state.env_ret, state.meta_info, tokens)
        if env_ret.get("done"):
            reward = float(env_ret["reward"])
            self._running_reward += RUNNING_SHARE * (reward - self._running_reward)
            log.debug("episode %s of environment %d ended with reward %g", uid, slot.worker_id, reward)

    def _lost(self, slot: _Slot, reason: str, *, is_gone: bool = False) -> None:
        """Drops the episode; the environment begins another one, in a new process if the old one `is_gone`.

        Raises:
            EnvServerError: it has failed too many times in a row.
        """
        uid = slot.meta_info.get("uid")
        if uid is not None:
            self.replay.drop(uid)
            if self._recorder is not None:
                self._recorder.fault(uid, reason)
        self.num_faults += 1
        slot.num_faults += 1
        log.warning("environment %d lost its episode (%d in a row): %s", slot.worker_id, slot.num_faults, reason)
        if slot.num_faults >= self._max_faults:
            raise EnvServerError(
                f"environment {slot.worker_id} failed {slot.num_faults} times in a row, the last time with: {reason}"
            )
        if is_gone:
            close_processes([slot.process], grace_s=self._close_grace_s)
            slot.process = self._start(slot.worker_id)
        self._reset(slot)

    def _answer_of(self, batch_return: Mapping[str, Any], row: int) -> tuple[_Slot | None, StepTokens]:
        """The environment that a row answers, None if its episode is gone, and the sampled tokens."""
        responses = batch_return["responses"][row]
        is_response = batch_return["attention_mask"][row][-len(responses) :].bool()
        response_ids = tuple(responses[is_response].tolist())
        worker_id = int(batch_return["worker_id"][row])
        if not response_ids:
            raise ValueError(f"row {row} answers environment {worker_id} with an empty response")
        if not 0 <= worker_id < self.num_envs:
            raise ValueError(f"row {row} belongs to environment {worker_id}; there are {self.num_envs}")
        slot = self._slots[worker_id]
        logprobs = batch_return.get("rollout_log_probs")
        tokens = StepTokens(
            prompt=slot.encoded or EncodedPrompt(token_ids=(), raw_token_ids=(), images=()),
            response_ids=response_ids,
            logprobs=None if logprobs is None else tuple(logprobs[row][is_response].tolist()),
        )
        if batch_return["meta_info"][row].get("uid") != slot.meta_info.get("uid"):
            return None, tokens
        if slot.state != "offered":
            raise ValueError(f"environment {worker_id} does not wait for an action: take its prompt from a batch first")
        return slot, tokens

    def _text_of(self, response_ids: Sequence[int]) -> str:
        """The text without the token that ended the turn."""
        tokenizer = self._encoder.tokenizer
        ids = list(response_ids)
        if ids[-1] in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            ids.pop()
        return tokenizer.decode(ids, skip_special_tokens=False)

    def _step_row(self, item: Item) -> Batch:
        worker_id, env_ret, meta_info = item
        return step_row(
            self._encoder,
            env_ret["tokens"],
            worker_id,
            meta_info,
            reward=env_ret["reward"],
            max_response_length=self.max_response_length,
        )


def _shared(prompt: Prompt, earlier: Prompt) -> Prompt:
    """The same prompt, with equal screenshots replaced by the objects of the earlier one, so that an episode holds each
    screenshot once."""
    known = {part: part for part in earlier if isinstance(part, bytes)}
    return tuple(known.get(part, part) if isinstance(part, bytes) else part for part in prompt)
