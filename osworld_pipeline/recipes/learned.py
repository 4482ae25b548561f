"""Distinguishes the keys of a recipe that determine the weights of a stage from those that only change its duration."""

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
"""The sections that a stage's weights depend on, in addition to the parent and the data."""

_TOKENIZER: Mapping[str, tuple[str, ...]] = {
    "agent": ("dialect", "coordinate_space", "system_prompt"),
    "suite": ("name", "seed", "families", "num_train"),
    "desktop": ("screen_width", "screen_height"),
}
"""The keys that determine the tokenizer of a tiny model (runs/base/make_base.py); a published model has its own."""

NOT_LEARNED: Mapping[str, tuple[str, ...]] = {
    # Location and number of the desktops: only the duration changes.
    "desktop": ("num_replicas", "server_urls", "request_timeout_s"),
    # How weights are held and saved: only duration and resumption change.
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
    # Verification changes the known rewards of demonstrations. If that affects training, the digest of the data
    # changes, like for imports.
    "replay": ("verify", "verification_sample", "num_verification_attempts", "import_file"),
    # The set of evaluations, not the settings of one.
    "evaluation": ("suites",),
    # Number of rounds of the flywheel: a round does not depend on later ones.
    "flywheel": ("num_rounds", "min_gain"),
}
"""Keys that change the cost of a run but not its result, so they are in no id."""


def learned_by(stage: Stage, dumped: Mapping[str, Any]) -> dict[str, Any]:
    """The sections that determine the result of `stage`. `dumped`: a whole recipe as JSON."""
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
