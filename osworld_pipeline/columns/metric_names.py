"""Names of metrics that version 0.1.0 stored under others, in MLflow, in checkpoints and in `updates.metrics`."""

EARLIER_NAMES = {
    "clipped_share": "clip_fraction",
    "first_step_clipped_share": "first_step_clip_fraction",
    "effective_share": "importance_effective_share",
    "task_reward": "task_reward_mean",
    "shaped_reward": "shaped_reward_mean",
}
_PRESENT_NAMES = {earlier: present for present, earlier in EARLIER_NAMES.items()}


def present_name(stored: str) -> str:
    return _PRESENT_NAMES.get(stored, stored)
