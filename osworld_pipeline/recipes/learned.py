"""What of a recipe decides the weights of a stage, and what only changes how long it takes."""

from collections.abc import Mapping
from typing import Any

from osworld_pipeline.domain.checkpoint import Stage

_GSPO = ("gspo", "replay", "rollout", "trainer", "agent", "reward", "desktop")
SECTIONS: dict[Stage, tuple[str, ...]] = {
    Stage.BASE: ("model",),
    Stage.EXTERNAL: (),
    Stage.SFT: ("sft", "trainer", "agent"),
    Stage.FLYWHEEL: ("flywheel", "sft", "trainer", "agent", "desktop"),
    Stage.GSPO_PHASE1: _GSPO,
    Stage.GSPO_PHASE2: _GSPO,
}
"""What of a recipe a stage's weights depend on, beside the parent and the data."""

_TOKENIZER: Mapping[str, tuple[str, ...]] = {
    "agent": ("dialect", "coordinate_space", "system_prompt"),
    "suite": ("name", "seed", "families", "num_train"),
    "desktop": ("screen_width", "screen_height"),
}
"""What the tokenizer of a tiny model is learned from (runs/base/make_base.py); a published model has its own."""

NOT_LEARNED: Mapping[str, tuple[str, ...]] = {
    # Where desktops are and how many of them work: how long it takes.
    "desktop": ("num_replicas", "server_urls", "request_timeout_s"),
    # How weights are held and saved: how long it takes, and what can be resumed.
    "trainer": (
        "max_tokens_per_batch",
        "batching",
        "activation_checkpointing",
        "num_processes",
        "cpu_offload",
        "context_parallel",
        "num_threads",
        "save_every",
        "keep_last",
        "keep_every",
    ),
    "sft": ("save_every",),
    "gspo": ("micro_batch_size",),
    "rollout": ("max_concurrent_episodes", "reported_rewards", "max_held_updates", "held_pause_s"),
    # How much is verified, and how, changes what is known of the demonstrations; where that decides what is learned,
    # the digest of the data changes, as it does for what is imported.
    "replay": ("verify", "verification_sample", "num_verification_attempts", "import_file"),
    # Which evaluations there are, not how one goes.
    "evaluation": ("suites",),
    # How far the flywheel goes on: a round is the same round, whether or not another follows.
    "flywheel": ("num_rounds", "min_gain"),
}
"""Keys that change what a run costs and not what is learned, so that they are in no id."""


def learned_by(stage: Stage, dumped: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that decide what `stage` makes. `dumped`: a whole recipe as JSON."""
    params = {name: learned_keys(name, dumped[name]) for name in SECTIONS[stage]}
    if stage is Stage.BASE and dumped["model"]["kind"] == "tiny":
        params |= {name: {key: dumped[name][key] for key in keys} for name, keys in _TOKENIZER.items()}
    if stage is Stage.FLYWHEEL:
        params["sft"].pop("num_updates")  # a round has its own
    other = {Stage.GSPO_PHASE1: "phase2", Stage.GSPO_PHASE2: "phase1"}.get(stage)
    if other is not None:
        params["gspo"].pop(other)
    return params


def learned_keys(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in NOT_LEARNED.get(section, ())}
