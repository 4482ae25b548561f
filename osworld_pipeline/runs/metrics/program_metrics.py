"""The metrics of one process that runs a program or a part of it. They follow from what the program reports, from its
episodes, and at a scrape from its live state."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.process_collector import ProcessCollector

from osworld_pipeline.domain.episode import Episode, Outcome
from osworld_pipeline.runs.messages import Message, Metrics, Progress, Warned
from osworld_pipeline.runs.metrics.live_state import LiveState
from osworld_pipeline.wire import metric_families as families

METERED = ("_busy", "_busy_overall")
"""Suffixes of update metrics that are not exported here: the meters are read at every scrape instead."""


class ProgramMetrics:
    """Has its own registry. Its methods may be called from any thread; `text` is called from another one."""

    def __init__(self, program: str, *, checkpoint: str = "") -> None:
        """`checkpoint`: the one that the program makes; empty if it makes none."""
        self._registry = registry = CollectorRegistry()
        self._program = program
        families.PROGRAM.meter(registry).labels(program, checkpoint).set(1)
        self._ended = families.EPISODES_ENDED.meter(registry)
        self._retries = families.EPISODE_RETRIES.meter(registry)
        self._steps = families.STEPS.meter(registry)
        self._parse_failures = families.PARSE_FAILURES.meter(registry)
        tokens = families.TOKENS.meter(registry)
        self._prompt_tokens, self._sampled_tokens = tokens.labels("prompt"), tokens.labels("sampled")
        self._model_s, self._step_s = (one.meter(registry) for one in (families.MODEL_SECONDS, families.STEP_SECONDS))
        self._parts_s = {
            "reset": families.RESET_SECONDS.meter(registry),
            "evaluate": families.EVALUATE_SECONDS.meter(registry),
        }
        self._done, self._total = families.PROGRESS_DONE.meter(registry), families.PROGRESS_PLANNED.meter(registry)
        self._warnings = families.WARNINGS.meter(registry)
        self._updates = families.UPDATES.meter(registry)
        staleness = families.STALENESS.meter(registry)
        self._of_update: Mapping[str, Callable[[float], None]] = {
            "update_s": families.UPDATE_SECONDS.meter(registry).set,
            "rollout_s": families.ROLLOUT_SECONDS.meter(registry).set,
            "group_staleness_mean": staleness.labels("mean").set,
            "group_staleness_max": staleness.labels("max").set,
            "handover_s": families.HANDOVER_SECONDS.meter(registry).observe,
            "handover_bytes": families.HANDOVER_BYTES.meter(registry).inc,
        }
        """Metrics of an update that have a name of their own here."""
        self._further = families.UPDATE_METRIC.meter(registry)
        self.live = LiveState()
        registry.register(self.live)
        ProcessCollector(registry=registry)

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)

    def on_message(self, message: Message) -> None:
        """Takes note of what the program reports."""
        if isinstance(message, Progress):
            stage = message.stage or self._program
            self._done.labels(stage).set(message.done)
            self._total.labels(stage).set(message.total)
        elif isinstance(message, Warned):
            self._warnings.inc()
        elif isinstance(message, Metrics):
            self._on_update(message)

    def on_episode(self, episode: Episode) -> None:
        """An episode is over."""
        self.on_end(episode.outcome, str(episode.purpose), num_steps=len(episode.steps))
        self._retries.inc(episode.attempt)
        self._parse_failures.inc(sum(not step.signals.action_parsed for step in episode.steps))
        self._prompt_tokens.inc(sum(step.prompt_num_tokens for step in episode.steps))
        self._sampled_tokens.inc(sum(step.response_num_tokens for step in episode.steps))
        for step in episode.steps:
            self._model_s.observe(step.model_s)
            self._step_s.observe(step.step_s)
        for part, histogram in self._parts_s.items():
            if seconds := episode.times_s.get(part):  # 0 if the episode did not reach this part
                histogram.observe(seconds)

    def on_end(self, outcome: Outcome, purpose: str, *, num_steps: int) -> None:
        """An episode, or a playback, is over."""
        for one in Outcome:  # so that the first of a kind is an increase too
            self._ended.labels(one, purpose)
        self._ended.labels(outcome, purpose).inc()
        self._steps.inc(num_steps)

    def _on_update(self, message: Metrics) -> None:
        if message.update:
            self._updates.set(message.update)
        for name, value in message.metrics.items():
            if name in self._of_update:
                self._of_update[name](value)
            elif not name.endswith(METERED):
                self._further.labels(name).set(value)
