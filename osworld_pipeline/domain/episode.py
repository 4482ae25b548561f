"""An episode: one attempt at one task on one replica, told step by step, ending in exactly one outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    TAMPERING = "tampering"
    """The policy disabled its desktop or interfered with the grader. This is a failure: were it left out of training,
    as a fault is, a policy would learn to do it wherever it fails."""
    TIMEOUT = "timeout"
    ENV_FAULT = "env_fault"
    POLICY_FAULT = "policy_fault"
    GRADER_FAULT = "grader_fault"

    @property
    def is_valid(self) -> bool:
        """Only valid episodes are trained on or counted in a denominator: a fault is never a zero reward."""
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
    """Made elsewhere, by a policy that is no checkpoint of ours."""
    SUPERSEDED = "superseded"
    """Rolled out for updates that a resumed stage made again: kept, and neither trained on nor counted."""


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
    """What one action did, as Slime-OSWorld names it."""

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
    """One observation and the action answering it."""

    step_index: int
    screenshot_sha256: str
    """The exact bytes the model saw (after resizing), stored as a blob under this name."""
    screenshot_width: int
    screenshot_height: int
    screenshot_format: str
    screenshot_num_bytes: int
    observation_text: str
    response_text: str
    action: Mapping[str, Any] | None
    """The parsed tool-call arguments; None where nothing could be parsed."""
    command: str | None
    """What went to the desktop: a pyautogui call, or WAIT, DONE, FAIL."""
    signals: StepSignals
    policy_version: int
    """Weight version that began this turn: the number of updates behind it."""
    prompt_num_tokens: int
    response_num_tokens: int
    model_s: float
    step_s: float


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Raw success and shaped reward are never mixed: `task` is the grader's score, `shaped` is what trains."""

    task: float
    partial: float = 0.0
    penalty: float = 0.0
    shaped: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    """The terms of `partial` (each 0..1, before its weight) and of `penalty`, by name."""


class ContextMode(StrEnum):
    """What of an episode the policy has before it when it answers."""

    APPEND = "append"
    """Everything: the episode is one growing sequence."""
    WINDOW = "window"
    """The task and the last screenshots: each turn is a sequence of its own."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One forward pass as the sampler saw it: a whole episode in `append` mode, one turn in `window` mode."""

    token_ids: tuple[int, ...]
    """Image placeholders expanded."""
    response_mask: tuple[int, ...]
    """1 where the policy sampled the token."""
    sampled_logprobs: tuple[float, ...]
    """Aligned with token_ids, 0.0 outside the mask; as protocols.GenerateResult.logprobs."""
    policy_versions: tuple[int, ...]
    """Aligned with token_ids: how many updates had produced the weights that sampled it; -1 outside the mask."""
    image_steps: tuple[int, ...]
    """Whose steps' screenshots stand at the placeholders, in order."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What the parity probe of a policy engine found: how far the log-probabilities that it reports of fixed
    conversations are from those of the checkpoint."""

    num_tokens: int
    mean_diff: float
    """|engine - checkpoint| of a sampled token's log-probability, in nats."""
    max_diff: float


@dataclass(frozen=True, kw_only=True)
class Episode:
    episode_id: str
    """Deterministic (stage, update, group, sample, attempt), so that a rerun replaces and never duplicates."""
    task_id: str
    task_digest: str
    purpose: EpisodePurpose
    checkpoint_id: str
    """The checkpoint that played it; in training the one that is being trained."""
    engine: str
    sampling: SamplingParams
    outcome: Outcome
    error: str | None = None
    """One sentence where the outcome is a fault, a timeout or tampering."""
    reward: Reward | None = None
    """None exactly where there is no grader's score: timeouts and faults."""
    steps: tuple[Step, ...] = ()
    context_mode: ContextMode = ContextMode.APPEND
    sequences: tuple[TokenSequence, ...] = ()
    """What the sampler saw and said; empty where the engine deals in text alone."""
    image_num_tokens: int | None = None
    """Image placeholders in all sequences; None where they were not counted."""
    advantage: float | None = None
    """As its update trained it; 0 where its group had no signal. None outside training, for a fault, and in a group
    that was dropped."""
    group_id: str | None = None
    seed: int = 0
    attempt: int = 0
    earlier_faults: tuple[str, ...] = ()
    """How the attempts before this one ended, one sentence each, the replica named."""
    domain: str = ""
    """Of the task: two tasks of different domains may have one id. Empty where it is unknown."""
    suite: str = ""
    """Of an evaluation: where its tasks come from, a built-in suite, osworld, or a suite of the user's."""
    suite_name: str = ""
    """Of an evaluation: the suite as commands name it."""
    stage: str = ""
    """Of `checkpoint_id`, a Stage; empty where it is no checkpoint of ours."""
    weights_id: str = ""
    """The weights that began it: a checkpoint's id, of a stage that is being trained that of its parent or of the
    milestone after so many updates, whether or not one was kept. Empty where no turn was sampled."""
    weights_update: int | None = None
    """Updates of the stage behind them; None outside training."""
    parity: Parity | None = None
    """Of its engine, probed before the first episode of its session; None where it was not."""
    replica_id: str = ""
    provider: str = ""
    image_digest: str = ""
    grader_version: str = ""
    processor_digest: str = ""
    """Of the tokenizer, the image processor's settings and the chat template: what made ids of text and pixels."""
    source_dataset: str = ""
    licence: str = ""
    """Both of an imported episode."""
    stage_key: str = ""
    """Key of the stage run that made it (a checkpoint id being trained, or an eval key)."""
    update: int = -1
    """The update this episode's group trains, from 0; -1 outside training."""
    max_turns: int = 0
    """The step budget it ran under; 0 where it is unknown."""
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
        """Of all sequences; in `window` mode what stands in several windows counts in each."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def oldest_policy_version(self) -> int | None:
        """Of the weights that sampled any of its turns; None before the first."""
        return min((step.policy_version for step in self.steps), default=None)
