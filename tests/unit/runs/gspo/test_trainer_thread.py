"""The trainer's thread: weights are sent while nothing trains or an update only scores, never while they change."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from osworld_pipeline.domain.trajectory import Trajectory
from osworld_pipeline.errors import EngineError, TrainingError
from osworld_pipeline.rollout.engines.http_calls import TransientError
from osworld_pipeline.runs.gspo import trainer_thread
from osworld_pipeline.runs.gspo.trainer_thread import TrainerThread


class Trainer:
    """Scores as many passes as it is allowed, then takes a step."""

    def __init__(self) -> None:
        self.num_updates = 3
        self.passes = threading.Semaphore(0)
        self.has_canaries, self.may_step = threading.Event(), threading.Event()
        self.canaries: Sequence[Trajectory] | None = None

    def send_weights(self, consume: Any) -> None:
        consume([("w", self.num_updates)])

    def update(self, trajectories: Sequence[Trajectory], arrivals: Any) -> dict[str, float]:
        assert self.passes.acquire(timeout=10)
        if (consume := arrivals.due()) is not None:
            self._send(consume)
        while callable(arrived := arrivals.next()):
            self._send(arrived)
        self.canaries = arrived
        self.has_canaries.set()
        assert self.may_step.wait(10)
        self.num_updates += 1
        return {"loss": 0.0}

    def _send(self, consume: Any) -> None:
        with suppress(EngineError):
            self.send_weights(consume)


async def test_weights_are_sent_between_passes_and_no_longer_after_the_canaries() -> None:
    trainer: Any = Trainer()
    canaries: asyncio.Future[Sequence[Trajectory]] = asyncio.get_running_loop().create_future()
    received: list[Any] = []
    with TrainerThread() as thread:
        await thread.send(trainer, 3, received.extend)
        updating = asyncio.create_task(thread.update(trainer, [], canaries))
        await asyncio.sleep(0)
        sending = asyncio.create_task(thread.send(trainer, 3, received.extend))
        await asyncio.sleep(0.02)
        assert not sending.done(), "a pass goes on"
        trainer.passes.release()
        await sending
        await thread.send(trainer, 3, received.extend)
        assert received == [("w", 3)] * 3
        with pytest.raises(TransientError, match="no longer has the weights of update 2"):
            await thread.send(trainer, 2, received.extend)

        def refuse(weights: Any) -> None:
            raise EngineError("the server went away")

        with pytest.raises(EngineError, match="the server went away"):
            await thread.send(trainer, 3, refuse)
        canaries.set_result(("a canary",))  # type: ignore[arg-type]
        assert await asyncio.to_thread(trainer.has_canaries.wait, 10)
        with pytest.raises(TransientError, match="updating the weights"):
            await thread.send(trainer, 3, received.extend)
        trainer.may_step.set()
        assert await updating == {"loss": 0.0}
        await thread.send(trainer, 4, received.extend)
    assert received[-1] == ("w", 4)
    assert trainer.canaries == ("a canary",)


async def test_a_transfer_that_fails_ends_the_update_with_its_error() -> None:
    async def fail() -> Sequence[Trajectory]:
        raise EngineError("no server took the weights")

    trainer: Any = Trainer()
    trainer.passes.release()
    with TrainerThread() as thread, pytest.raises(EngineError, match="no server took the weights"):
        await thread.update(trainer, [], fail())
    assert trainer.num_updates == 3


async def test_a_cancelled_update_ends_and_a_send_that_waits_for_it_fails() -> None:
    trainer: Any = Trainer()
    never: asyncio.Future[Sequence[Trajectory]] = asyncio.get_running_loop().create_future()
    with TrainerThread() as thread:
        updating = asyncio.create_task(thread.update(trainer, [], never))
        await asyncio.sleep(0)
        sending = asyncio.create_task(thread.send(trainer, 3, print))
        await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        with pytest.raises(TransientError, match="updating the weights"):
            await sending
        trainer.passes.release()
    assert trainer.num_updates == 3, "no step was taken"


async def test_an_update_whose_weights_do_not_arrive_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_thread, "ARRIVAL_TIMEOUT_S", 0.05)
    trainer: Any = Trainer()
    trainer.passes.release()
    never: asyncio.Future[Sequence[Trajectory]] = asyncio.get_running_loop().create_future()
    with TrainerThread() as thread, pytest.raises(TrainingError, match="weights of update 3 did not reach"):
        await thread.update(trainer, [], never)
