"""The sections for training: model, trainer, SFT, GSPO, replay, flywheel. The docstring under a key is its
documentation."""

from typing import Annotated, Literal

from pydantic import Field

from osworld_pipeline.recipes.section import NOT_LEARNED, Section

ImportanceForm = Literal[
    "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_reject"
]
Denominator = Literal["signal", "group", "batch"]
TurnWeight = Literal["turn", "token"]


class TinyModelSection(Section):
    """A Qwen3-VL of a few million parameters with random weights and a tokenizer of its own."""

    kind: Literal["tiny"]
    """This section is about a tiny model."""
    hidden_size: int = 128
    """Hidden size of the language model."""
    num_layers: int = 4
    """Layers of the language model."""
    vision_hidden_size: int = 96
    """Hidden size of the vision tower."""
    vision_depth: int = 2
    """Layers of the vision tower."""
    vocab_size: int = 2048
    """Maximum vocabulary size; the tokenizer is trained on the texts of the suite's training tasks."""
    copying_updates: int = Field(default=0, ge=0)
    """Updates that teach the random model to copy tokens from its context before it sees a task; 0 leaves it random.
    About 300 suffice for two layers."""
    seed: int = 0
    """Seed of the random weights and of the rows that teach copying."""


class PretrainedModelSection(Section):
    """A published Qwen3-VL: a local folder, or a hub id with its revision."""

    kind: Literal["pretrained"]
    """This section is about a published model."""
    path: str
    """A folder in Hugging Face format, or the model's id on its hub."""
    revision: str | None = None
    """Commit, branch or tag on the hub; None for its main branch."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the weights in forward passes; the optimiser's copies are float32."""


class LoraSection(Section):
    """Low-rank adapters instead of full fine-tuning; needs the extra `lora`. They are sampled, transferred and saved
    unmerged. A stage whose parent has an adapter continues with it, so rank, alpha and target_modules must be the
    parent's."""

    rank: int = Field(default=16, ge=1)
    """Rank of the two factors."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the adapter's input, only in SFT: GSPO compares its passes with the sampler's, which has no
    dropout."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Names of the language model's linear layers with an adapter."""


class TrainerSection(Section):
    """How weights are held, moved and saved, in both SFT and GSPO."""

    max_tokens_per_batch: Annotated[int, NOT_LEARNED] = Field(default=16_384, ge=128)
    """Token budget of one forward pass. A longer sequence is refused when it is collected, so the budget must not be
    below agent.max_context_tokens."""
    batching: Annotated[Literal["padded", "packed"], NOT_LEARNED] = "padded"
    """`packed`: sequences of a forward pass are concatenated without padding, and do not attend to each other."""
    train_vision: bool = False
    """Whether the vision tower is trained; if frozen, its outputs need no gradient and a sampler's cache stays
    valid."""
    activation_checkpointing: Annotated[bool, NOT_LEARNED] = True
    """Recomputes activations in the backward pass instead of keeping them."""
    lora: LoraSection | None = None
    """Adapters; absent: all weights are trained, and a parent with an adapter is refused."""
    num_processes: Annotated[int, NOT_LEARNED] = Field(default=1, ge=1)
    """Ranks under torchrun; above 1 the weights are sharded by FSDP2."""
    cpu_offload: Annotated[bool, NOT_LEARNED] = False
    """Whether FSDP2 keeps sharded weights and optimiser state in host memory."""
    context_parallel: Annotated[int, NOT_LEARNED] = Field(default=1, ge=1)
    """Must be 1: image tokens of one sequence cannot be split over ranks."""
    check_memory: bool = True
    """Whether a trainer on a GPU refuses at the start a recipe that cannot fit by its estimate (`osworld-pipeline
    doctor --role trainer --recipe NAME` prints it)."""
    num_threads: Annotated[int, NOT_LEARNED] = Field(default=0, ge=0)
    """Threads of torch on a CPU; 0 for all cores."""
    save_every: Annotated[int, NOT_LEARNED] = Field(default=1, ge=1)
    """GSPO updates between two checkpoints to resume from; `sft.save_every` is SFT's."""
    keep_last: Annotated[int, NOT_LEARNED] = Field(default=2, ge=1)
    """Number of kept checkpoints to resume from."""
    keep_every: Annotated[int, NOT_LEARNED] = Field(default=0, ge=0)
    """A checkpoint whose number of updates is a multiple of this is kept as a milestone, and evaluated like a finished
    one; 0 for none. Applies only to checkpoints that are saved."""


class SftSection(Section):
    """Supervised fine-tuning on demonstrations."""

    num_updates: int = Field(ge=1)
    """Optimiser steps."""
    batch_size: int = Field(default=8, ge=1)
    """Demonstrations per update."""
    demonstrations_per_task: int | None = Field(default=None, ge=1)
    """Maximum number of demonstrations of each base task, in the order of their row ids; None for all."""
    task_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tasks whose demonstrations are used, drawn by seed and evenly over the families of a built-in suite
    or the domains; the others are only for reinforcement."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate, after the warm-up."""
    warmup_updates: int = 20
    """Updates of the linear warm-up."""
    final_lr_fraction: float = Field(default=0.1, ge=0, le=1)
    """Cosine decay ends at this share of the learning rate."""
    weight_decay: float = 0.01
    """Weight decay of AdamW, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm."""
    save_every: Annotated[int, NOT_LEARNED] = Field(default=100, ge=1)
    """Updates between two checkpoints to resume from."""
    seed: int = 0
    """Seed of the choice of tasks (`task_share`), the order of the demonstrations, and an adapter's initial weights and
    dropout."""


class GspoSharedSection(Section):
    """Slime-OSWorld's GSPO configuration; formulas in training/objective/ (loss.py, advantage.py)."""

    algorithm: Literal["gspo", "grpo"] = "gspo"
    """`gspo`: one ratio per sequence (arXiv 2507.18071); `grpo`: one per token (arXiv 2402.03300)."""
    advantage: Literal["mean_std", "mean", "leave_one_out"] = "mean_std"
    """Baseline and scale of a group's rewards: GRPO's, Dr. GRPO's (arXiv 2503.20783), or RLOO's (arXiv 2402.14740)."""
    length_norm: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Normalisation of the loss: mean over a sequence's tokens and then over sequences (GRPO, GSPO), mean over all
    tokens of the batch (DAPO, arXiv 2503.14476), or sum over tokens divided by max_response_tokens and the number of
    sequences (Dr. GRPO). With a mean or sum over tokens, gspo's term of a sequence counts once for each of its
    tokens."""
    group_size: int = Field(default=4, ge=2)
    """Episodes of a task in one group."""
    tasks_per_update: int = Field(default=4, ge=1)
    """Groups of an update."""
    learning_rate: float = Field(default=5e-7, gt=0)
    """Peak learning rate of AdamW in a phase."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates of the linear warm-up. Each phase starts with a new AdamW, whose first steps would otherwise have full
    size."""
    final_lr_fraction: float = Field(default=1.0, ge=0, le=1)
    """Cosine decay ends at this share of the learning rate, at the last update of a phase; 1 keeps it constant."""
    clip_low: float = Field(default=3.5e-4, gt=0)
    """The ratio is clipped below 1 minus this."""
    clip_high: float = Field(default=3.5e-4, gt=0)
    """The ratio is clipped above 1 plus this."""
    kl_coef: float = Field(default=0.01, ge=0)
    """Weight of the divergence from the phase's parent; 0 needs no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of the divergence, per token: k1 = log ratio, k2 = half its square, k3 = low variance."""
    entropy_coef: float = Field(default=1e-4, ge=0)
    """Weight of the entropy bonus."""
    old_logprobs: Literal["trainer", "sampler"] = "trainer"
    """Old log-probabilities, to which the ratio is taken: the trainer's own from before the update, or those that the
    sampler reported. The sampler's differ by its rounding, which a tight clip treats as a change of the policy."""
    importance: ImportanceForm = "token_truncate"
    """Importance weight for the difference between sampler and trainer, by its published form (docs/training.md,
    Importance weights)."""
    importance_low: float = Field(default=0.5, ge=0)
    """Lower bound of the ratio in the forms that mask or reject."""
    importance_high: float = Field(default=2.0, gt=0)
    """Upper bound of the ratio."""
    min_effective_share: float = Field(default=0.1, ge=0, le=1)
    """Trust region of stale samples: an update whose importance weights leave less than this effective share of the
    batch (Kish's effective sample size over the number of samples) is held, not made. 0 turns it off."""
    denominator: Denominator = "group"
    """Episodes in the denominator of the loss: those with an advantage; all valid ones of the trained groups; or also
    those of groups without signal, like slime without group filters. Episodes without an advantage add only KL and
    entropy terms (kl_coef, entropy_coef)."""
    turn_weight: TurnWeight = "turn"
    """How the sequences of an episode in `window` mode share its weight under length_norm `sequence_mean`: evenly, or
    by their response tokens, like slime."""
    beta1: float = 0.9
    """beta1 of AdamW."""
    beta2: float = 0.98
    """beta2 of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW, on matrices only."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this norm."""
    micro_batch_size: Annotated[int, NOT_LEARNED] = Field(default=4, ge=1)
    """Maximum number of sequences in one forward pass."""
    epochs_per_update: int = Field(default=1, ge=1)
    """Passes over a rollout batch; the clip matters from the second optimiser step on."""
    minibatches_per_update: int = Field(default=2, ge=1)
    """Optimiser steps of one pass."""
    max_logprob_diff: float = Field(default=0.02, gt=0)
    """Mean |trainer - sampler| log-probability, on tokens that the trainer's current weights sampled, above which an
    update is an error (float32: about 1e-5)."""
    max_env_attempts: int = Field(default=3, ge=1)
    """Attempts of one episode on fresh replicas before its outcome is a fault."""
    episode_timeout_s: float = Field(default=900.0, gt=0)
    """Time limit from the first observation to the last action."""
    turn_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit of one turn, model and desktop together."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Top-p of the sampling. Only 1: below it the distribution is truncated to a nucleus that the trainer does not
    know."""


class ReplaySection(Section):
    """Replay: which recorded success joins a group whose raw rewards are all below the threshold (Slime-OSWorld)."""

    threshold: float = Field(default=0.5, gt=0, le=1)
    """Minimum raw task reward of a success, for episodes of a group and for rows."""
    per_task: int = Field(default=10, ge=1)
    """Rows kept of each task id: by source rank, then by line, alternating with the newest successes if
    `include_online` is set."""
    weight: float = Field(default=1.0, ge=0)
    """Weight of an injected sequence in the loss."""
    strategy: Literal["uniform", "newest", "shortest", "recent_failure", "diverse"] = "uniform"
    """How a row is chosen among its task's rows (formulas in rollout/replay_strategies.py); `recent_failure` decides
    which failed groups come first."""
    max_injections: int | None = Field(default=None, ge=0)
    """Maximum per update; None: the number of failed groups."""
    include_online: bool = False
    """Whether successes of the phase's earlier updates, and of the stages before it, are rows too."""
    require_verified: bool = False
    """Whether a demonstration is used, also in SFT, only if re-executing it reached the threshold."""
    num_verification_attempts: Annotated[int, NOT_LEARNED] = Field(default=2, ge=1)
    """Re-executions of a demonstration before it is treated as failed; faults do not count."""
    verify: Annotated[Literal["none", "sample", "all"], NOT_LEARNED] = "sample"
    """Which demonstrations are re-executed; `sample`: the first `verification_sample`, where one of every task comes
    before a second one of any task."""
    verification_sample: Annotated[int, NOT_LEARNED] = Field(default=16, ge=1)
    """Number of demonstrations that `sample` re-executes."""
    import_file: Annotated[str | None, NOT_LEARNED] = None
    """A replay file in Slime-OSWorld's layout (osworld_replay_train.jsonl): one more source of the union."""


class GspoPhaseSection(Section):
    """Settings of one phase."""

    num_updates: int = Field(ge=1)
    """Updates of the phase."""
    temperature: float = Field(gt=0)
    """Sampling temperature."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of this phase; None for gspo.learning_rate."""
    seed: int = 0
    """Seed of the choice of tasks, the sampling and the minibatches."""


class GspoSection(GspoSharedSection):
    """GSPO in two phases: the first explores, the second stabilises."""

    phase1: GspoPhaseSection
    """The exploring phase."""
    phase2: GspoPhaseSection
    """The stabilising phase."""


class FlywheelSection(Section):
    """Slime-OSWorld's on-policy distillation: rollouts, selection by raw task reward, and SFT on the selected ones,
    repeated."""

    num_rounds: Annotated[int, NOT_LEARNED] = Field(default=0, ge=0)
    """Maximum number of rounds; 0 for no flywheel."""
    samples_per_task: int = Field(default=4, ge=1)
    """Episodes of each training task in a round."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Training tasks of a round, chosen by seed; None for all."""
    temperature: float = Field(default=0.8, gt=0)
    """Sampling temperature."""
    threshold: float = Field(default=0.5, gt=0, le=1)
    """Minimum raw task reward for an episode to be kept; the shaped reward is ignored."""
    with_demonstrations: bool = True
    """Whether SFT also uses the demonstrations (a teacher's trajectories)."""
    num_updates: int = Field(default=100, ge=1)
    """SFT updates of a round; other settings are from [sft]."""
    min_gain: Annotated[float, NOT_LEARNED] = Field(default=0.0, ge=0, le=1)
    """A round whose success rate does not exceed the previous round's by more than this is the last and does not train;
    the flywheel's result is the checkpoint with the best rate."""
    seed: int = 0
    """Seed of the choice of tasks and the sampling."""
