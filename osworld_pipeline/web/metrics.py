"""The trainer's metrics that the plots of a training run show. To show another one, add it to a group."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str
    """In MLflow."""
    unit: str = ""
    """Label of the vertical axis, where the metric has its own plot."""
    words: str
    is_share: bool = False
    """0 to 1, shown in percent."""


def _metric(name: str, unit: str = "", words: str = "", *, is_share: bool = False) -> Metric:
    return Metric(name=name, unit=unit, words=words or name.replace("_", " "), is_share=is_share)


LOSS_METRICS = (
    _metric("loss", "loss"),
    _metric("grad_norm", "norm", "gradient norm"),
    _metric("learning_rate", "rate"),
    _metric("kl", "nats", "KL to the reference"),
    _metric("entropy", "nats"),
    _metric("clip_fraction", "share", "share of ratios clipped", is_share=True),
    _metric("ratio_mean", "ratio", "mean ratio"),
    _metric("importance_mean", "weight", "mean importance weight"),
)
CHECK_METRICS = (
    _metric("trainer_sampler_logprob_diff", "nats", "fresh tokens"),
    _metric("trainer_sampler_logprob_diff_stale", "nats", "stale tokens"),
)
STALENESS_METRICS = (
    _metric("staleness_mean", words="token, mean"),
    _metric("staleness_max", words="token, oldest"),
    _metric("group_staleness_max", words="group, oldest"),
)
BUSY_METRICS = (
    _metric("environments_busy", words="environments", is_share=True),
    _metric("engine_busy", words="engine", is_share=True),
    _metric("trainer_busy", words="trainer", is_share=True),
)
TIME_METRICS = (
    _metric("rollout_s", words="rollouts"),
    _metric("score_s", words="scoring"),
    _metric("forward_s", words="passes"),
    _metric("optimizer_s", words="optimiser"),
)
SPEED_METRICS = (
    _metric("tokens_per_s", "tokens a second", "tokens a second"),
    _metric("padding_share", "share of a pass", is_share=True),
)
REPLAY_METRICS = (
    _metric("replay_coverage", words="demonstrated", is_share=True),
    _metric("replay_verified_coverage", words="demonstrated and verified", is_share=True),
)
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
UNITS = {metric.name: metric.unit for metric in REPORTED_METRICS if metric.unit} | {
    "success_rate": "share of valid episodes",
    "task_reward_mean": "reward",
    "rollout task reward": "reward",
    "rollout shaped reward": "reward",
}
"""Labels of the vertical axis, by metric."""
