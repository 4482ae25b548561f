"""The Grafana dashboard of programs and servers, against the metrics that these export."""

from collections.abc import Iterator

from dashboards import check_every_metric_is_shown, check_panels, check_questions, labels_in
from episode_samples import make_episode
from prometheus_client.core import Metric

from osworld_pipeline.rollout.env_fleet import EnvFleet
from osworld_pipeline.rollout.utilisation import BusyMeter
from osworld_pipeline.runs.messages import Metrics, Progress
from osworld_pipeline.runs.metrics.program_metrics import ProgramMetrics
from osworld_pipeline.wire import metric_families as families
from osworld_pipeline.wire.server_metrics import ServerMetrics

NAME = "training.json"


def of_a_program() -> str:
    """The metrics of a program, with a sample of each."""
    metrics = ProgramMetrics("train_gspo", checkpoint="c")
    metrics.on_episode(make_episode())
    metrics.on_message(Progress(done=1, total=2))
    metrics.on_message(Metrics(update=1, metrics={"loss": 0.5, "handover_bytes": 1.0}))
    fleet = EnvFleet(["http://a:1"], questions=None)  # type: ignore[arg-type]
    with metrics.live.watching_meter("trainer", BusyMeter(1)), metrics.live.fleets.watching(fleet):
        return metrics.text().decode()


async def of_a_server() -> str:
    """The metrics of a gateway after a request."""

    def readings() -> Iterator[Metric]:
        yield families.SANDBOXES.reading(1)
        yield families.QUOTA.reading(1)
        ends = families.SANDBOX_ENDS.reading()
        ends.add_metric(("started",), 1)
        yield ends

    async def app(scope: object, receive: object, send: object) -> None: ...

    metrics = ServerMetrics(readings)
    await metrics.observed(app)({"type": "http", "method": "GET", "path": "/"}, None, None)  # type: ignore[arg-type]
    return metrics.text().decode()


async def test_every_query_of_the_dashboard_names_a_metric_and_labels_that_a_process_exports() -> None:
    check_questions(NAME, labels_in(of_a_program()) | labels_in(await of_a_server()))


async def test_every_metric_of_programs_and_servers_is_shown() -> None:
    for text in (of_a_program(), await of_a_server()):
        check_every_metric_is_shown(NAME, text, prefix="osworld_")


async def test_every_declared_metric_is_exported_by_a_process() -> None:
    exported = {name.removesuffix("_total").removesuffix("_count") for name in labels_in(of_a_program())}
    exported |= {name.removesuffix("_total").removesuffix("_count") for name in labels_in(await of_a_server())}
    declared = {one.name for one in vars(families).values() if isinstance(one, families.Family)}
    assert {name for name in declared if not name.startswith("env_server_")} <= exported


def test_panels_do_not_overlap_and_have_numbers_and_titles_of_their_own() -> None:
    check_panels(NAME)
