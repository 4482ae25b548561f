"""The instance of `init --postgres` in a real Postgres, which runs for these tests alone."""

from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from resources.instance_report import report
from tests.integration.postgres_server import make_project, running_postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running_postgres() as number:
        yield number


@pytest.fixture
def home(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_project(tmp_path, port, monkeypatch)
    return tmp_path


@dg.asset(pool="catalog")
def table() -> dg.MaterializeResult:
    return dg.MaterializeResult(metadata={"num_rows": 3})


def test_runs_events_and_pool_limits_are_stored_in_postgres(home: Path) -> None:
    assert report(home)["is_new"], "a report makes no table"
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for pool, limit in (("desktops", 2), ("catalog", 1), ("desktops", 4)):  # one limit is set again, as users do
            instance.event_log_storage.set_concurrency_slots(pool, limit)
        assert dg.materialize([table], instance=instance).success
    with dg.DagsterInstance.from_config(str(home)) as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey("table"))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.metadata["num_rows"].value == 3
        claim = instance.event_log_storage.claim_concurrency_slot
        assert claim("catalog", "run-1", "step").is_claimed
        assert not claim("catalog", "run-2", "step").is_claimed, "the catalog has one writer"
        assert all(claim("desktops", f"run-{number}", "step").is_claimed for number in range(4))
        for run_id in ("run-1", "run-2", *(f"run-{number}" for number in range(4))):
            instance.event_log_storage.free_concurrency_slots_for_run(run_id)
    reported = report(home)
    assert (reported["storage"], reported["limits"]) == ("DagsterPostgresStorage", {"catalog": 1, "desktops": 4})
    assert not list(home.rglob("*.db")), "nothing in a file"
