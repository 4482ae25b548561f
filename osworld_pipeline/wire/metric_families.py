"""Every Prometheus metric of this project: name, help and labels, once for all processes. The same quantity has the
same name in each. Label values come only from short lists, never from a request."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180)


@dataclass(frozen=True)
class Family:
    name: str
    text: str
    labels: tuple[str, ...] = ()


class CounterFamily(Family):
    """Its samples are named `{name}_total`."""

    def meter(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.text, self.labels, registry=registry)

    def reading(self, value: float | None = None) -> CounterMetricFamily:
        """For a count that something else keeps. `value`: without labels only."""
        return CounterMetricFamily(self.name, self.text, value=value, labels=None if value is not None else self.labels)


class GaugeFamily(Family):
    def meter(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.text, self.labels, registry=registry)

    def reading(self, value: float | None = None) -> GaugeMetricFamily:
        """As CounterFamily.reading."""
        return GaugeMetricFamily(self.name, self.text, value=value, labels=None if value is not None else self.labels)


class HistogramFamily(Family):
    def meter(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.text, self.labels, buckets=SECONDS, registry=registry)


# An env server.
SERVER_ENDED = CounterFamily("env_server_episodes_ended", "Episodes that are over, by outcome.", ("outcome",))
SERVER_STEPS = CounterFamily("env_server_steps", "Steps executed.")
SERVER_FAULTS = CounterFamily("env_server_failed_answers", "Answers that name a fault.", ("fault",))
SERVER_REQUESTS = CounterFamily("env_server_requests", "Requests answered.", ("method", "route", "status"))
SERVER_BYTES = CounterFamily("env_server_sent_bytes", "Bytes of answers' bodies.")
SERVER_STEP_SECONDS = HistogramFamily(
    "env_server_step_seconds", "Parts of a step: act (with its pause), observe, encode.", ("part",)
)
SERVER_RESET_SECONDS = HistogramFamily("env_server_reset_seconds", "A task's set-up on a fresh desktop.")
SERVER_EVALUATE_SECONDS = HistogramFamily("env_server_evaluate_seconds", "Grading.")
SERVER_QUEUE_SECONDS = HistogramFamily(
    "env_server_queue_seconds", "Waiting for a free replica, for requests that got one."
)
SERVER_OPENED = CounterFamily("env_server_episodes_opened", "Episodes that got a desktop.")
SERVER_LIVE = GaugeFamily("env_server_episodes_live", "Episodes open now.")
SERVER_CALLS = GaugeFamily("env_server_calls", "Calls in progress.")
SERVER_QUEUE = GaugeFamily("env_server_queue_length", "Clients' resets waiting.")
SERVER_REPLICAS = GaugeFamily("env_server_replicas", "Replicas by state.", ("state",))
SERVER_STARTS = CounterFamily("env_server_replica_starts", "Desktops started.")
SERVER_FAILURES = CounterFamily("env_server_replica_failures", "Desktops that failed to start or to reset, or died.")
SERVER_LEASES = CounterFamily("env_server_replica_leases", "Leases that are over.")

# A program, and its rollout actors.
PROGRAM = GaugeFamily(
    "osworld_program", "1, with the program's name and the checkpoint that it makes.", ("name", "checkpoint")
)
EPISODES_ENDED = CounterFamily(
    "osworld_episodes_ended", "Episodes that are over, by outcome and purpose.", ("outcome", "purpose")
)
EPISODE_RETRIES = CounterFamily("osworld_episode_retries", "Attempts that ended in a fault and were repeated.")
STEPS = CounterFamily("osworld_steps", "Steps of episodes that are over.")
PARSE_FAILURES = CounterFamily("osworld_parse_failures", "Responses without an action, of episodes that are over.")
TOKENS = CounterFamily("osworld_tokens", "Tokens of episodes that are over: of prompts, and sampled.", ("kind",))
MODEL_SECONDS = HistogramFamily("osworld_model_seconds", "Time of the policy engine for a response.")
STEP_SECONDS = HistogramFamily("osworld_step_seconds", "Time of the desktop for an action, as its client sees it.")
RESET_SECONDS = HistogramFamily("osworld_reset_seconds", "Time until an episode had its desktop, waits included.")
EVALUATE_SECONDS = HistogramFamily("osworld_evaluate_seconds", "Time of a grading, as the client sees it.")
BUSY_UNITS = GaugeFamily(
    "osworld_busy", "Busy at present: episodes, requests to the engine, updates; may exceed the capacity.", ("part",)
)
CAPACITY = GaugeFamily("osworld_capacity", "Units that can be busy: desktops, 1 engine, 1 trainer.", ("part",))
BUSY_SECONDS = CounterFamily(
    "osworld_busy_seconds",
    "Seconds in which units were busy; its rate divided by the capacity is the utilisation.",
    ("part",),
)
ENV_SERVERS = GaugeFamily("osworld_env_servers", "Env servers of the program by state.", ("state",))
ENV_DESKTOPS = GaugeFamily("osworld_env_desktops", "Desktops of an env server, as it reports them.", ("server",))
ENV_FREE = GaugeFamily(
    "osworld_env_desktops_free", "Free desktops of an env server, as its client estimates them.", ("server",)
)
ENV_IN_USE = GaugeFamily(
    "osworld_env_desktops_in_use", "Desktops of an env server that this process uses.", ("server",)
)
ENV_WAITING = GaugeFamily(
    "osworld_env_resets_waiting", "Resets of this process that wait at an env server.", ("server",)
)
GROUPS = GaugeFamily(
    "osworld_groups", "Groups of asynchronous rollouts: running, or waiting for their update.", ("state",)
)
PROGRESS_DONE = GaugeFamily("osworld_progress_done", "Parts of the work that are done.", ("stage",))
PROGRESS_PLANNED = GaugeFamily("osworld_progress_planned", "Parts of the whole work.", ("stage",))
UPDATES = GaugeFamily("osworld_updates", "Updates that the weights of this stage have had.")
UPDATE_SECONDS = GaugeFamily("osworld_update_seconds", "Time of the last reported update, without its rollouts.")
ROLLOUT_SECONDS = GaugeFamily("osworld_rollout_seconds", "Time until the last reported update had its groups.")
HANDOVER_SECONDS = HistogramFamily("osworld_handover_seconds", "Time until all engines had the weights of an update.")
HANDOVER_BYTES = CounterFamily(
    "osworld_handover_bytes", "Bytes of weights that left the trainer's process, once for all servers."
)
STALENESS = GaugeFamily(
    "osworld_staleness_updates", "Age of the trained groups of the last reported update.", ("statistic",)
)
UPDATE_METRIC = GaugeFamily(
    "osworld_update_metric", "Another metric of the last reported update, by its name in MLflow.", ("metric",)
)
WARNINGS = CounterFamily("osworld_warnings", "Warnings that the program reported.")

# A gateway, a receiver of weights, and a viewer.
REQUESTS = CounterFamily("osworld_http_requests", "Requests answered.", ("method", "route", "status"))
REQUEST_SECONDS = HistogramFamily("osworld_http_request_seconds", "Time until a request was answered.", ("route",))
SENT_BYTES = CounterFamily("osworld_http_sent_bytes", "Bytes of answers' bodies.", ("route",))
RECEIVED_BYTES = CounterFamily("osworld_http_received_bytes", "Bytes of requests' bodies.", ("route",))
SANDBOXES = GaugeFamily("osworld_gateway_sandboxes", "Sandboxes that clients have.")
QUOTA = GaugeFamily("osworld_gateway_quota", "Sandboxes that clients may have.")
SANDBOX_ENDS = CounterFamily(
    "osworld_gateway_starts", "Sandboxes: started, refused (quota), reaped (unused for too long, or died).", ("end",)
)
