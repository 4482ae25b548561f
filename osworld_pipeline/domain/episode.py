"""An episode: one attempt at one task on one replica, a sequence of steps with one outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    TAMPERING = "tampering"
    """The policy disabled its desktop or interfered with the grader. This counts as a failure: if it were left out of
    training like a fault, a policy would learn to do it whenever it fails."""
    TIMEOUT = "timeout"
    ENV_FAULT = "env_fault"
    POLICY_FAULT = "policy_fault"
    GRADER_FAULT = "grader_fault"

    @property
    def is_valid(self) -> bool:
        """Only valid episodes are trained on or counted in a denominator: a fault is not a reward of zero."""
        return self in (Outcome.SUCCESS, Outcome.FAILURE, Outcome.TRUNCATED, Outcome.TAMPERING)

    @property
    def has_reason(self) -> bool:
        """Whether `Episode.error` is set."""
        return not self.is_valid or self is Outcome.TAMPERING


class EpisodePurpose(StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"
    DEMONSTRATE = "demonstrate"
    IMPORT = "import"
    """Recorded elsewhere, by a policy that is not a checkpoint of ours."""
    SUPERSEDED = "superseded"
    """Rolled out for updates that a resumed stage made again: kept, but neither trained on nor counted."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    temperature: float
    top_p: float = 1.0
    max_new_tokens: int = 400
    stop: tuple[str, ...] = ("</tool_call>",)
    """Generation ends after the first of these, which stays in the text; the end-of-turn token always ends it."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """The effects of one action, with Slime-OSWorld's names."""

    action_type: str
    action_parsed: bool
    action_executed: bool
    action_error: str | None = None
    target_element: str | None = None
    fallback_used: bool = False
    coordinate: tuple[int, int] | None = None
    a11y_grounded: bool = False
    screen_diff: float = 0.0
    """Mean absolute difference of the 64x64 greyscale screenshots before and after, 0..1."""
    screen_changed: bool = False
    screen_hash: str = ""
    a11y_delta: float = 0.0
    a11y_changed: bool = False
    terminal_changed: bool = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """One observation and the action taken."""

    step_index: int
    screenshot_sha256: str
    """Name of the blob with the exact bytes that the model saw (after resizing)."""
    screenshot_width: int
    screenshot_height: int
    screenshot_format: str
    screenshot_num_bytes: int
    observation_text: str
    response_text: str
    action: Mapping[str, Any] | None
    """The parsed tool-call arguments; None if parsing failed."""
    command: str | None
    """Command sent to the desktop: a pyautogui call, or WAIT, DONE, FAIL."""
    signals: StepSignals
    policy_version: int
    """Weight version at the start of this turn: its number of updates."""
    prompt_num_tokens: int
    response_num_tokens: int
    model_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Raw success and shaped reward are separate: `task` is the grader's score, `shaped` is used for training."""

    task: float
    partial: float = 0.0
    penalty: float = 0.0
    shaped: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of `partial` (each 0..1, before its weight) and of `penalty`, by name."""


class ContextMode(StrEnum):
    """The part of an episode in the policy's context."""

    APPEND = "append"
    """All of it: the episode is one growing sequence."""
    WINDOW = "window"
    """The task and the last screenshots: each turn is a separate sequence."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One forward pass as the sampler saw it: a whole episode in `append` mode, one turn in `window` mode."""

    token_ids: tuple[int, ...]
    """With image placeholders expanded."""
    response_mask: tuple[int, ...]
    """1 for tokens that the policy sampled."""
    sampled_logprobs: tuple[float, ...]
    """Aligned with token_ids, 0.0 outside the mask; see protocols.GenerateResult.logprobs."""
    policy_versions: tuple[int, ...]
    """Aligned with token_ids: number of updates of the weights that sampled the token; -1 outside the mask."""
    image_steps: tuple[int, ...]
    """The steps whose screenshots are at the placeholders, in order."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Result of the parity probe of a policy engine: the difference between its log-probabilities of fixed
    conversations and those of the checkpoint."""

    num_tokens: int
    mean_diff: float
    """|engine - checkpoint| of a sampled token's log-probability, in nats."""
    max_diff: float


@dataclass(frozen=True, kw_only=True)
class Episode:
    episode_id: str
    """Deterministic id from stage, update, group, sample and attempt, so that a rerun replaces it instead of adding a
    duplicate."""
    task_id: str
    task_digest: str
    purpose: EpisodePurpose
    checkpoint_id: str
    """The checkpoint that played it; in training the one that is being trained."""
    engine: str
    sampling: SamplingParams
    outcome: Outcome
    error: str | None = None
    """One sentence if the outcome is a fault, a timeout or tampering."""
    reward: Reward | None = None
    """None if and only if there is no grader's score: timeouts and faults."""
    steps: tuple[Step, ...] = ()
    context_mode: ContextMode = ContextMode.APPEND
    sequences: tuple[TokenSequence, ...] = ()
    """Token sequences of the sampler; empty for engines that use text only."""
    image_num_tokens: int | None = None
    """Image placeholders in all sequences; None if not counted."""
    advantage: float | None = None
    """The advantage in its update; 0 if its group had no signal. None outside training, for a fault, and in a dropped
    group."""
    group_id: str | None = None
    seed: int = 0
    attempt: int = 0
    earlier_faults: tuple[str, ...] = ()
    """Faults of the earlier attempts, one sentence each, with the replica."""
    domain: str = ""
    """Domain of the task: tasks of different domains may have the same id. Empty if unknown."""
    suite: str = ""
    """For an evaluation, the origin of its tasks: a built-in suite, osworld, or a user's suite."""
    suite_name: str = ""
    """For an evaluation, the suite as commands name it."""
    stage: str = ""
    """Stage of `checkpoint_id`; empty if it is not a checkpoint of ours."""
    weights_id: str = ""
    """The weights at its start: the id of a checkpoint; in training that of the parent or of the milestone with the
    current number of updates, whether or not it was kept. Empty if no turn was sampled."""
    weights_update: int | None = None
    """The stage's number of updates of these weights; None outside training."""
    parity: Parity | None = None
    """Parity of its engine, probed before the first episode of its session; None if not probed."""
    replica_id: str = ""
    provider: str = ""
    image_digest: str = ""
    grader_version: str = ""
    processor_digest: str = ""
    """Digest of the tokenizer, the image processor's settings and the chat template."""
    source_dataset: str = ""
    licence: str = ""
    """Both for an imported episode."""
    stage_key: str = ""
    """Key of the stage run that made it (a checkpoint id being trained, or an eval key)."""
    update: int = -1
    """The update that this episode's group trains, from 0; -1 outside training."""
    max_turns: int = 0
    """Its step budget; 0 if unknown."""
    times_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part: reset, model, step, evaluate, total."""
    started_at: float = 0.0
    """Unix time."""
    run_ids: Mapping[str, str] = field(default_factory=dict)
    """dagster, mlflow."""

    @property
    def is_success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences; in `window` mode, tokens in several windows count in each."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def oldest_policy_version(self) -> int | None:
        """The oldest version of the weights that sampled its turns; None without turns."""
        return min((step.policy_version for step in self.steps), default=None)
