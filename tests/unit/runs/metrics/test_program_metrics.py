"""The figures of a program, worked out by hand from what it reports, its episodes and its live state."""

import itertools
import threading
import time
from dataclasses import replace

import pytest
from episode_samples import make_episode, make_step
from scraped import samples_of

from osworld_pipeline.domain.episode import Outcome
from osworld_pipeline.rollout.env_fleet import EnvFleet, EnvServer, ServerState
from osworld_pipeline.rollout.utilisation import BusyMeter
from osworld_pipeline.runs.messages import Info, Metrics, Progress, Warned
from osworld_pipeline.runs.metrics.program_metrics import ProgramMetrics


def figures(metrics: ProgramMetrics) -> dict[str, float]:
    return samples_of(metrics.text().decode())


def test_an_episode_is_counted_by_outcome_with_its_steps_tokens_and_times() -> None:
    metrics = ProgramMetrics("evaluate", checkpoint="sft-1")
    step = make_step()
    unread = make_step(1, signals=replace(step.signals, action_parsed=False), model_s=2.0, step_s=0.0)
    metrics.on_episode(make_episode(steps=(step, unread), attempt=2, times_s={"reset": 4.0, "evaluate": 0.0}))
    metrics.on_episode(make_episode("e1", outcome=Outcome.ENV_FAULT, reward=None, num_steps=0, times_s={}))
    found = figures(metrics)
    assert found["osworld_program sft-1 evaluate"] == 1
    assert found["osworld_episodes_ended_total success evaluate"] == 1
    assert found["osworld_episodes_ended_total env_fault evaluate"] == 1
    assert found["osworld_episodes_ended_total timeout evaluate"] == 0, "so that the first one is an increase"
    assert found["osworld_episode_retries_total"] == 2
    assert found["osworld_steps_total"] == 2
    assert found["osworld_parse_failures_total"] == 1
    assert found["osworld_tokens_total prompt"] == 600
    assert found["osworld_tokens_total sampled"] == 40
    assert (found["osworld_model_seconds_count"], found["osworld_model_seconds_sum"]) == (2, 2.25)
    assert found["osworld_model_seconds_bucket 0.25"] == 1
    assert found["osworld_step_seconds_sum"] == 0.5
    assert (found["osworld_reset_seconds_count"], found["osworld_reset_seconds_sum"]) == (1, 4.0)
    assert found["osworld_evaluate_seconds_count"] == 0, "it did not come to a grading"
    assert found["process_resident_memory_bytes"] > 0


def test_main_figures_of_an_update_have_their_own_metrics_and_the_others_share_one_metric() -> None:
    metrics = ProgramMetrics("train_gspo")
    reported = {
        "update_s": 2.0, "rollout_s": 5.0, "group_staleness_mean": 0.5, "group_staleness_max": 1.0, "handover_s": 0.3,
        "handover_bytes": 100.0, "loss": 0.25, "engine_busy": 0.9, "engine_busy_overall": 0.8,
    }  # fmt: skip
    metrics.on_message(Metrics(update=3, metrics=reported))
    metrics.on_message(Metrics(update=4, metrics={**reported, "loss": 0.5}))
    found = figures(metrics)
    assert found["osworld_updates"] == 4
    assert (found["osworld_update_seconds"], found["osworld_rollout_seconds"]) == (2.0, 5.0)
    assert (found["osworld_staleness_updates mean"], found["osworld_staleness_updates max"]) == (0.5, 1.0)
    assert (found["osworld_handover_seconds_count"], found["osworld_handover_bytes_total"]) == (2, 200)
    assert found["osworld_update_metric loss"] == 0.5
    assert [name for name in found if name.startswith("osworld_update_metric")] == ["osworld_update_metric loss"]


def test_rollouts_before_a_training_do_not_count_as_an_update() -> None:
    metrics = ProgramMetrics("flywheel")
    metrics.on_message(Metrics(update=0, metrics={"flywheel_success_rate": 0.5}))
    found = figures(metrics)
    assert (found["osworld_updates"], found["osworld_update_metric flywheel_success_rate"]) == (0, 0.5)


def test_progress_has_the_label_of_its_stage_or_else_of_the_program() -> None:
    metrics = ProgramMetrics("evaluate")
    metrics.on_message(Progress(done=1, total=9))
    metrics.on_message(Progress(done=3, total=4, stage="evaluate sft"))
    metrics.on_message(Warned(message="w"))
    metrics.on_message(Info(message="i"))
    found = figures(metrics)
    assert (found["osworld_progress_done evaluate"], found["osworld_progress_planned evaluate"]) == (1, 9)
    assert (found["osworld_progress_done evaluate sft"], found["osworld_progress_planned evaluate sft"]) == (3, 4)
    assert found["osworld_warnings_total"] == 1


def test_a_meter_is_read_at_any_time_and_its_seconds_remain_when_it_ends() -> None:
    now = [100.0]
    metrics = ProgramMetrics("evaluate")
    for _ in range(2):
        meter = BusyMeter(2, clock=lambda: now[0])
        with metrics.live.watching_meter("environments", meter), meter.busy():
            now[0] += 3
            found = figures(metrics)
            assert (found["osworld_busy environments"], found["osworld_capacity environments"]) == (1, 2)
    assert found["osworld_busy_seconds_total environments"] == pytest.approx(6)
    found = figures(metrics)
    assert found["osworld_busy_seconds_total environments"] == pytest.approx(6)
    assert (found["osworld_busy environments"], found["osworld_capacity environments"]) == (0, 0)


async def test_desktops_are_shown_by_server_as_the_client_sees_them() -> None:
    metrics = ProgramMetrics("collect")
    fleet = EnvFleet(["http://user:secret@a:1", "http://b:2"], questions=None)  # type: ignore[arg-type]
    one, other = fleet.servers
    one.state, one.num_replicas, one.free, one.num_in_use = ServerState.UP, 8, 3, 4
    other.state, other.num_waiting = ServerState.DOWN, 2
    with metrics.live.fleets.watching(fleet):
        text = metrics.text().decode()
    found = samples_of(text)
    assert "secret" not in text
    assert found["osworld_env_desktops http://a:1"] == 8
    assert found["osworld_env_desktops_free http://a:1"] == 3
    assert found["osworld_env_desktops_in_use http://a:1"] == 4
    assert found["osworld_env_resets_waiting http://b:2"] == 2
    assert (found["osworld_env_servers up"], found["osworld_env_servers down"]) == (1, 1)
    assert "osworld_env_desktops http://a:1" not in figures(metrics), "the client is closed"


def test_figures_may_be_read_while_meters_and_servers_come_and_go() -> None:
    metrics, is_over = ProgramMetrics("collect"), threading.Event()
    seconds: list[float] = []

    def read() -> None:
        while not is_over.is_set():
            seconds.append(figures(metrics).get("osworld_busy_seconds_total trainer", 0.0))

    reader = threading.Thread(target=read)
    reader.start()
    fleet = EnvFleet(["http://a:1"], questions=None)  # type: ignore[arg-type]
    deadline = time.monotonic() + 30
    for number in itertools.count():
        if len(seconds) >= 20 or time.monotonic() > deadline:
            break
        meter = BusyMeter(1)
        with metrics.live.watching_meter("trainer", meter), metrics.live.fleets.watching(fleet), meter.busy():
            fleet._servers[str(number)] = EnvServer(f"http://{number}")
            if number > 3:
                fleet._servers.pop(str(number - 3))
    is_over.set()
    reader.join()
    assert seconds == sorted(seconds), "busy seconds never fall"
    assert len(seconds) >= 20
