"""The trainer's metrics that the plots of a training run use, and their names there."""

LOSS_METRICS = ("loss", "grad_norm", "learning_rate", "kl", "entropy", "clip_fraction", "ratio_mean", "importance_mean")
CHECK_METRICS = ("trainer_sampler_logprob_diff", "trainer_sampler_logprob_diff_stale")
STALENESS_METRICS = ("staleness_mean", "staleness_max", "group_staleness_max")
BUSY_METRICS = ("environments_busy", "engine_busy", "trainer_busy")
TIME_METRICS = ("rollout_s", "score_s", "forward_s", "optimizer_s")
SPEED_METRICS = ("tokens_per_s", "padding_share")
REPLAY_METRICS = ("replay_coverage", "replay_verified_coverage")
REPORTED_METRICS = (
    *LOSS_METRICS,
    *CHECK_METRICS,
    *STALENESS_METRICS,
    *BUSY_METRICS,
    *TIME_METRICS,
    *SPEED_METRICS,
    *REPLAY_METRICS,
)
"""The metrics that the plots read from MLflow."""
SHARES = {"clip_fraction", "padding_share", *BUSY_METRICS, *REPLAY_METRICS}
UNITS = {
    "loss": "loss",
    "kl": "nats",
    "entropy": "nats",
    "clip_fraction": "share",
    "grad_norm": "norm",
    "learning_rate": "rate",
    "ratio_mean": "ratio",
    "importance_mean": "weight",
    "tokens_per_s": "tokens a second",
    "padding_share": "share of a pass",
    "trainer_sampler_logprob_diff": "nats",
    "success_rate": "share of valid episodes",
    "task_reward_mean": "reward",
    "rollout task reward": "reward",
    "rollout shaped reward": "reward",
}
"""Units of the vertical axis, by metric."""
WORDS = {
    "kl": "KL to the reference",
    "clip_fraction": "share of ratios clipped",
    "ratio_mean": "mean ratio",
    "importance_mean": "mean importance weight",
    "grad_norm": "gradient norm",
    "trainer_sampler_logprob_diff": "fresh tokens",
    "trainer_sampler_logprob_diff_stale": "stale tokens",
    "staleness_mean": "token, mean",
    "staleness_max": "token, oldest",
    "group_staleness_max": "group, oldest",
    "environments_busy": "environments",
    "engine_busy": "engine",
    "trainer_busy": "trainer",
    "rollout_s": "rollouts",
    "score_s": "scoring",
    "forward_s": "passes",
    "optimizer_s": "optimiser",
    "tokens_per_s": "tokens a second",
    "replay_coverage": "demonstrated",
    "replay_verified_coverage": "demonstrated and verified",
}
