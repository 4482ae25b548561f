"""Shares of busy time: the tests set the clock, so that every figure can be calculated by hand."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from group_samples import SAMPLING

from osworld_pipeline.protocols import GenerateRequest, GenerateResult
from osworld_pipeline.rollout.utilisation import BusyMeter, BusyReading, MeteredEngine, Utilisation


class HandClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_share_is_busy_unit_seconds_over_all_unit_seconds() -> None:
    clock = HandClock()
    meter = BusyMeter(4, clock=clock)
    with meter.busy():
        clock.now += 2
        with meter.busy():
            clock.now += 3
    clock.now += 5
    # 2 s of one unit and 3 s of two in 10 s of four: 8 / 40.
    assert meter.shares() == (pytest.approx(0.2), pytest.approx(0.2))
    with meter.busy():
        clock.now += 10
    assert meter.shares() == (pytest.approx(0.25), pytest.approx(18 / 80))
    assert meter.shares()[0] == 0.0, "no time has passed"


def test_more_requests_than_units_count_as_all_units_busy() -> None:
    clock = HandClock()
    meter = BusyMeter(2, clock=clock)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(meter.busy())
        clock.now += 1
    clock.now += 1
    assert meter.shares()[1] == pytest.approx(0.5)


def test_reading_a_meter_does_not_change_its_shares() -> None:
    clock = HandClock()
    meter = BusyMeter(2, clock=clock)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(meter.busy())
        clock.now += 4
        assert meter.read() == BusyReading(capacity=2, num_busy=3, unit_s=pytest.approx(8))
        assert meter.read() == BusyReading(capacity=2, num_busy=3, unit_s=pytest.approx(8))
    clock.now += 4
    assert meter.read() == BusyReading(capacity=2, num_busy=0, unit_s=pytest.approx(8))
    assert meter.shares() == (pytest.approx(0.5), pytest.approx(0.5))


def test_figures_are_named_after_their_component() -> None:
    clock = HandClock()
    utilisation = Utilisation(
        environments=BusyMeter(2, clock=clock), engine=BusyMeter(1, clock=clock), trainer=BusyMeter(1, clock=clock)
    )
    with utilisation.environments.busy(), utilisation.trainer.busy():
        clock.now += 1
    clock.now += 3
    assert utilisation.metrics() == {
        "environments_busy": pytest.approx(0.125),
        "environments_busy_overall": pytest.approx(0.125),
        "engine_busy": 0.0,
        "engine_busy_overall": 0.0,
        "trainer_busy": pytest.approx(0.25),
        "trainer_busy_overall": pytest.approx(0.25),
    }


class SlowEngine:
    name = "slow"
    uses_chat_api = False
    policy_version = 4

    def __init__(self, clock: HandClock) -> None:
        self.loaded: list[tuple[Path, int]] = []
        self.forgotten: list[str] = []
        self.is_closed = False
        self._clock = clock

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(0)
        self._clock.now += 1
        return GenerateResult(text="t", policy_version=4, finish_reason="stop")

    async def load_weights(self, path: Path, *, policy_version: int) -> None:
        self.loaded.append((path, policy_version))

    async def forget(self, episode_id: str) -> None:
        self.forgotten.append(episode_id)

    async def health(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


async def test_a_metered_engine_behaves_as_its_engine_and_measures_the_busy_time(tmp_path: Path) -> None:
    clock = HandClock()
    meter, engine = BusyMeter(1, clock=clock), SlowEngine(clock)
    metered = MeteredEngine(engine, meter)
    assert (metered.name, metered.uses_chat_api, metered.policy_version) == ("slow", False, 4)
    requests = [metered.generate(GenerateRequest(sampling=SAMPLING)) for _ in range(2)]
    assert [result.text for result in await asyncio.gather(*requests)] == ["t", "t"]
    clock.now += 2
    assert meter.shares()[1] == pytest.approx(0.5), "two at once are one busy engine"
    await metered.load_weights(tmp_path, policy_version=5)
    await metered.forget("e")
    await metered.health()
    await metered.close()
    assert (engine.loaded, engine.forgotten, engine.is_closed) == ([(tmp_path, 5)], ["e"], True)
