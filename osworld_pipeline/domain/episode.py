"""An episode: one attempt at one task on one replica, a sequence of steps with one outcome."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from osworld_pipeline.domain.stored import NATS, NUM_BYTES, PIXELS, SECONDS, SHARE, TOKENS, UNIX_TIME, Stored


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    TRUNCATED = "truncated"
    TAMPERING = "tampering"
    """The policy disabled its desktop or interfered with the grader. This counts as a failure: if it were left out of
    training like a fault, a policy would learn to do it whenever it fails."""
    TOUCHED = "touched"
    """A person sent input to the desktop, so the end is not the policy's own."""
    TIMEOUT = "timeout"
    ENV_FAULT = "env_fault"
    POLICY_FAULT = "policy_fault"
    GRADER_FAULT = "grader_fault"

    @property
    def is_valid(self) -> bool:
        """Only valid episodes are trained on or counted in the lenient success rate: a fault is not a reward of zero,
        and a person's work is not the policy's."""
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
    temperature: Annotated[float, Stored("Sampling temperature.")]
    top_p: Annotated[float, Stored("Top-p of the sampling.", SHARE)] = 1.0
    max_new_tokens: Annotated[int, Stored("Limit of one response.", TOKENS, bits=32)] = 400
    stop: Annotated[
        tuple[str, ...],
        Stored(
            "Stop strings: a response ends after the first of these, which stays in it, or at the end-of-turn token."
        ),
    ] = ("</tool_call>",)
    seed: Annotated[int, Stored("Seed of the sampling.", name="sampling_seed")] = 0


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """The effects of one action, with Slime-OSWorld's names."""

    action_type: Annotated[str, Stored("left_click, type, key, scroll, wait, terminate, unknown, ...")]
    action_parsed: Annotated[bool, Stored("The response contained an action.")]
    action_executed: Annotated[bool, Stored("The desktop executed the action.")]
    action_error: Annotated[str | None, Stored("Why the action was not executed.")] = None
    target_element: Annotated[str | None, Stored("Target element that the action named.")] = None
    fallback_used: Annotated[bool, Stored("Only the fallback parser could parse the response.")] = False
    coordinate: tuple[int, int] | None = None
    a11y_grounded: Annotated[bool, Stored("The target was in the accessibility tree before the action.")] = False
    screen_diff: Annotated[
        float, Stored("Mean absolute difference of the 64x64 greyscale screenshots before and after.", SHARE)
    ] = 0.0
    screen_changed: Annotated[bool, Stored("screen_diff reached the threshold.")] = False
    screen_hash: Annotated[str, Stored("SHA-256 of the whole screenshot after the action.")] = ""
    a11y_delta: Annotated[float, Stored("Relative change of the tree's length.", SHARE)] = 0.0
    a11y_changed: Annotated[bool, Stored("The accessibility tree changed.")] = False
    terminal_changed: Annotated[bool, Stored("The terminal's text changed.")] = False


@dataclass(frozen=True, kw_only=True)
class Step:
    """One observation and the action taken."""

    step_index: Annotated[int, Stored("From 0, in order.", bits=32)]
    screenshot_sha256: Annotated[
        str,
        Stored("The blob with the exact bytes that the model saw (after resizing)."),
    ]
    screenshot_width: Annotated[int, Stored("Width of the screenshot that the model saw.", PIXELS, bits=32)]
    screenshot_height: Annotated[int, Stored("Height of the screenshot that the model saw.", PIXELS, bits=32)]
    screenshot_format: Annotated[str, Stored("png, jpeg or webp.")]
    screenshot_num_bytes: Annotated[int, Stored("Size of the blob; 0 if unknown.", NUM_BYTES)] = 0
    observation_text: Annotated[str, Stored("Text that the model read with the screenshot.")]
    response_text: Annotated[str, Stored("The model's response.")]
    action: Mapping[str, Any] | None
    """The parsed tool-call arguments; None if parsing failed."""
    command: Annotated[str | None, Stored("Command sent to the desktop: a pyautogui call, or WAIT, DONE, FAIL.")]
    signals: StepSignals
    policy_version: Annotated[
        int,
        Stored("Number of updates of the weights that sampled this turn; on-policy it is `update` - 1.", bits=32),
    ]
    prompt_num_tokens: Annotated[int, Stored("Prompt tokens of this turn.", TOKENS, bits=32)]
    response_num_tokens: Annotated[int, Stored("Response tokens of this turn.", TOKENS, bits=32)]
    model_s: Annotated[float, Stored("Time of the engine.", SECONDS)]
    step_s: Annotated[float, Stored("Time of the desktop.", SECONDS)]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Raw success and shaped reward are separate: `task` is the grader's score, `shaped` is used for training."""

    task: Annotated[
        float,
        Stored(
            "The grader's score; 0 for tampering; NULL if there is none. A fault is NULL, not 0.",
            SHARE,
            name="task_reward",
        ),
    ]
    partial: Annotated[float, Stored("Weighted sum of the partial terms.", SHARE, name="partial_reward")] = 0.0
    penalty: Annotated[float, Stored("Sum of the penalties.", SHARE)] = 0.0
    shaped: Annotated[
        float,
        Stored(
            "Reward used for training: task, partial and penalty, combined as `reward.shaping` says.",
            SHARE,
            name="shaped_reward",
        ),
    ] = 0.0
    parts: Annotated[
        Mapping[str, float],
        Stored(
            "The terms of partial_reward (before their weights) and of penalty, by name.", SHARE, name="reward_parts"
        ),
    ] = field(default_factory=dict)


class ContextMode(StrEnum):
    """The part of an episode in the policy's context."""

    APPEND = "append"
    """All of it: the episode is one growing sequence."""
    WINDOW = "window"
    """The task and the last screenshots: each turn is a separate sequence."""


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """One forward pass as the sampler saw it: a whole episode in `append` mode, one turn in `window` mode."""

    token_ids: Annotated[tuple[int, ...], Stored("Prompt and responses, with image placeholders expanded.", bits=32)]
    response_mask: Annotated[
        tuple[int, ...], Stored("1 if the policy sampled the token; aligned with token_ids.", bits=8)
    ]
    sampled_logprobs: Annotated[
        tuple[float, ...],
        Stored(
            "Log-probability of each token in softmax(logits / logprob_temperature) without the banned ids; "
            "0.0 outside the mask.",
            NATS,
        ),
    ]
    """See protocols.GenerateResult.logprobs."""
    policy_versions: Annotated[
        tuple[int, ...],
        Stored("Number of updates of the weights that sampled each token; -1 outside the mask.", bits=32),
    ]
    image_steps: Annotated[
        tuple[int, ...],
        Stored("Steps whose screenshots are at its image placeholders, in order.", bits=32),
    ]


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Result of the parity probe of a policy engine: the difference between its log-probabilities of fixed
    conversations and those of the checkpoint."""

    num_tokens: Annotated[
        int,
        Stored(
            "Tokens of the parity probe of its engine, before the first episode of its session; NULL: not probed, "
            "probed by rollout actors on sglang servers (see `updates`), or before version 8.",
            TOKENS,
            name="parity_num_tokens",
        ),
    ]
    mean_diff: Annotated[
        float,
        Stored(
            "Mean difference |engine - checkpoint| of the log-probabilities of those tokens.",
            NATS,
            name="parity_mean_diff",
        ),
    ]
    max_diff: Annotated[float, Stored("The largest of these differences.", NATS, name="parity_max_diff")]


@dataclass(frozen=True, kw_only=True)
class Episode:
    episode_id: Annotated[
        str, Stored("Deterministic id from stage, update, group, sample and attempt: a rerun replaces the row.")
    ]
    task_id: Annotated[str, Stored("The task that was attempted.")]
    domain: Annotated[
        str, Stored("Domain of the task; with task_id its identity; empty if unknown, NULL before version 6.")
    ] = ""
    task_digest: Annotated[str, Stored("SHA-256 of the task's config.")]
    purpose: Annotated[
        EpisodePurpose,
        Stored(
            "train, evaluate, demonstrate, import; superseded: rolled out for updates that a resumed stage made again."
        ),
    ]
    checkpoint_id: Annotated[
        str, Stored("Checkpoint of its policy: in training the one being trained, else the one that played.")
    ]
    stage: Annotated[
        str, Stored("Stage of checkpoint_id: gspo_phase1, sft, ...; empty if it is not ours, NULL before version 6.")
    ] = ""
    stage_key: Annotated[
        str, Stored("Key of the stage run: the checkpoint being trained, or the evaluation's key.")
    ] = ""
    update: Annotated[
        int,
        Stored(
            "The update that its group trains, from 1; -1 outside training. `-u0007` in an id is the number of "
            "previous updates: update 8.",
            bits=32,
        ),
    ] = -1
    """The number starts at 0 in memory and in the files."""
    group_id: Annotated[str | None, Stored("Its rollout group; NULL outside training.")] = None
    seed: Annotated[int, Stored("Distinguishes attempts at one task under one policy.")] = 0
    attempt: Annotated[int, Stored("0, increased by one for each attempt after a fault.", bits=32)] = 0
    suite: Annotated[
        str, Stored("Suite of an evaluation: the built-in suite of its tasks, osworld, or a user's suite.")
    ] = ""
    suite_name: Annotated[str, Stored("Suite of an evaluation as commands name it: heldout, osworld-chrome, ...")] = ""
    outcome: Annotated[
        Outcome,
        Stored("success, failure, truncated, tampering, touched, timeout, or a fault: env, policy or grader_fault."),
    ]
    error: Annotated[str | None, Stored("One sentence if the outcome is a fault, a timeout, tampering or touched.")] = (
        None
    )
    reward: Reward | None = None
    """None if and only if there is no grader's score that counts: timeouts, faults and touched episodes."""
    advantage: Annotated[
        float | None,
        Stored(
            "Advantage in its update; 0 if its group had no signal; NULL outside training, for faults and in "
            "dropped groups."
        ),
    ] = None
    num_person_inputs: Annotated[
        int,
        Stored(
            "Inputs that a person sent to its desktop; above 0 it is touched, unless it ended in a fault. NULL before "
            "version 11.",
            bits=32,
        ),
    ] = 0
    max_turns: Annotated[int, Stored("Its step budget; 0 if unknown.", bits=32)] = 0
    engine: Annotated[str, Stored("The policy engine: transformers, sglang, ...")]
    sampling: SamplingParams
    dialect: Annotated[
        str,
        Stored("How its actions are written: slime, pyautogui, ...; empty if unknown, NULL before version 9."),
    ] = ""
    coordinate_space: Annotated[
        str,
        Stored("Unit of the coordinates in its responses: model_pixels, unit or thousand; NULL before version 9."),
    ] = ""
    context_mode: Annotated[ContextMode, Stored("append: one growing sequence; window: each turn is a sequence.")] = (
        ContextMode.APPEND
    )
    processor_digest: Annotated[str, Stored("Digest of tokenizer, image processor and chat template.")] = ""
    weights_id: Annotated[
        str,
        Stored(
            "The weights at its start: a checkpoint; in training the parent, after 7 updates <checkpoint_id>-u0007, "
            "whether or not they were kept. Empty if no turn was sampled."
        ),
    ] = ""
    weights_update: Annotated[
        int | None,
        Stored("Number of updates of the training stage that produced these weights; NULL outside training.", bits=32),
    ] = None
    parity: Parity | None = None
    """Parity of its engine, probed before the first episode of its session; None if not probed."""
    steps: tuple[Step, ...] = ()
    sequences: tuple[TokenSequence, ...] = ()
    """Token sequences of the sampler; empty for engines that use text only."""
    image_num_tokens: Annotated[
        int | None, Stored("Image placeholders in its sequences; NULL without sequences.", TOKENS, name="image_tokens")
    ] = None
    earlier_faults: Annotated[
        tuple[str, ...], Stored("Faults of the earlier attempts, one sentence each, with the replica.")
    ] = ()
    replica_id: Annotated[str, Stored("The desktop it ran on.")] = ""
    provider: Annotated[str, Stored("Provider of the desktop: local, qemu, ...")] = ""
    image_digest: Annotated[str, Stored("Digest of the desktop's image.")] = ""
    grader_version: Annotated[str, Stored("Version of the evaluators.")] = ""
    source_dataset: Annotated[str, Stored("Name of the import, for an imported episode.")] = ""
    licence: Annotated[str, Stored("Licence of an imported episode.")] = ""
    started_at: Annotated[float, Stored("Start time.", UNIX_TIME)] = 0.0
    times_s: Annotated[Mapping[str, float], Stored("By part: reset, model, step, evaluate, total.", SECONDS)] = field(
        default_factory=dict
    )
    run_ids: Annotated[Mapping[str, str], Stored("Runs in Dagster and MLflow, by system.")] = field(
        default_factory=dict
    )

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
