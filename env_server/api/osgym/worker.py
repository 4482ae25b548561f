"""A worker in OSGym's sense: its own VM numbers over the server's episodes, and a share of its desktops.

Its client sends a request again until the request succeeds. A repeated request therefore succeeds where that is
possible: a finished episode is answered again, and a refused action that is repeated becomes wait(). A lost VM stays
lost, and each answer names the reason."""

import asyncio
import itertools
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from env_server.api.osgym.calls import OsgymAction, read_osgym_action
from env_server.episodes.episode import Episode
from env_server.episodes.outcomes import StepResult
from env_server.episodes.table import EpisodeTable, UnknownEpisodeError
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import (
    ActionParseError,
    EvaluatorError,
    NoCapacityError,
    ReplicaError,
    TamperingError,
)
from osworld_pipeline.wire import EnvConfig

SHARE_POLL_S = 0.05
MAX_ENDED = 10_000
MAX_KEPT_REPLIES = 8
"""A small number, because each kept answer holds a screenshot, and clients repeat a request soon."""
_ENV_CONFIG = EnvConfig(require_a11y_tree=False, image_format="png")


class UnknownVmError(UnknownEpisodeError):
    """There is no live VM with that number at this worker."""


@dataclass(frozen=True, kw_only=True)
class OsgymReply:
    """The answer to a step."""

    observation: Observation
    is_finish: bool
    reward: float
    message: str = ""
    """Why the action was run as wait(), or why the episode ended."""


@dataclass(kw_only=True)
class _Vm:
    episode_id: str
    client_id: str
    refused: str | None = None
    """The last action, if it was refused."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class OsgymWorker:
    """`max_vms` is the most desktops that it holds at a time; None means no limit but the pool's."""

    def __init__(
        self,
        episodes: EpisodeTable,
        *,
        name: str,
        max_vms: int | None = None,
        pause_s: float = 2.0,
        queue_timeout_s: float = 60.0,
    ) -> None:
        self.name = name
        self._episodes, self._max_vms = episodes, max_vms
        self._pause_s, self._queue_timeout_s = pause_s, queue_timeout_s
        # Starts at a random number, so that after a restart a client of the old server cannot act on a new client's VM.
        self._numbers = itertools.count(1000 * secrets.randbelow(1_000_000) + 1)
        self._vms: dict[int, _Vm] = {}
        self._ended: OrderedDict[int, str] = OrderedDict()
        """VM -> why it is gone"""
        self._replies: OrderedDict[int, tuple[str, OsgymReply]] = OrderedDict()
        """VM -> the action that finished it, and its answer"""
        self._num_opening = 0
        self._turn = asyncio.Lock()

    async def reset(
        self, task_config: Mapping[str, Any], *, timeout_s: float, client_id: str
    ) -> tuple[int, Observation]:
        """The number of a new VM, which is closed when it is not used for `timeout_s`. Other VMs are not affected.

        Raises:
            TaskError: the task was refused.
            NoCapacityError: no desktop became free in time, in the pool or in this worker's share.
            SetupError, ReplicaError: the desktop could not be set up; it has been returned to the pool.
        """
        async with self._room():
            episode, observation = await self._episodes.open(
                task_config, _ENV_CONFIG, client_id=f"{self.name}/{client_id}"
            )
            episode.idle_ttl_s = timeout_s
            vm_id = next(self._numbers)
            self._vms[vm_id] = _Vm(episode_id=episode.episode_id, client_id=client_id)
        return vm_id, observation

    async def step(self, vm_id: int, action: str, *, number: int | None = None) -> OsgymReply:
        """After a finishing action the episode is graded and its desktop returned. An episode whose policy has disabled
        its desktop is also finished, with a reward of 0.

        Raises:
            ActionParseError: refused; nothing was executed. Sent again, the same action becomes wait().
            EvaluatorError, ReplicaError: there is no reward; the VM is gone.
            UnknownVmError: the VM is gone, with the reason.
        """
        vm = self._vms.get(vm_id)
        async with vm.lock if vm is not None else nullcontext():
            finishing, last_reply = self._replies.get(vm_id, (None, None))
            if last_reply is not None and finishing == action:
                return last_reply
            async with self._using(vm_id) as (vm, episode):
                try:
                    reply = await self._step(vm, episode, action, number)
                except TamperingError as error:
                    reply = OsgymReply(
                        observation=episode.observation, is_finish=True, reward=0.0, message=f"tampering: {error}"
                    )
            if reply.is_finish:
                self._replies[vm_id] = (action, reply)
                await self._end(vm_id, "its episode is finished")
            return reply

    async def screenshot(self, vm_id: int) -> bytes:
        """A new screenshot, PNG. ReplicaError, UnknownVmError: the VM is gone."""
        async with self._using(vm_id) as (_, episode):
            return (await episode.look()).screenshot

    async def shutdown(self, vm_id: int) -> None:
        """Closing twice is no error; UnknownVmError for a number that never existed."""
        if vm_id in self._vms:
            await self._end(vm_id, "it was shut down")
        elif vm_id not in self._ended:
            self._find(vm_id)

    async def shutdown_all(self, client_id: str) -> None:
        """Closes all VMs of this client at this worker."""
        for vm_id in [vm_id for vm_id, vm in self._vms.items() if vm.client_id == client_id]:
            await self.shutdown(vm_id)

    def num_live(self) -> int:
        """VMs that hold a desktop, or are being opened."""
        live = {episode.episode_id for episode in self._episodes}
        return self._num_opening + sum(vm.episode_id in live for vm in self._vms.values())

    async def _step(self, vm: _Vm, episode: Episode, action: str, number: int | None) -> OsgymReply:
        try:
            parsed = read_osgym_action(action)
            result = await self._carry_out(episode, parsed, number)
        except ActionParseError as error:
            if vm.refused != action:
                vm.refused = action
                raise
            vm.refused = None
            waited = await episode.step("WAIT", pause_s=self._pause_s)
            return OsgymReply(observation=waited.observation, is_finish=False, reward=0.0, message=str(error))
        vm.refused = None
        reward = await episode.own_reward() if parsed.is_final else 0.0
        return OsgymReply(observation=result.observation, is_finish=parsed.is_final, reward=reward)

    async def _carry_out(self, episode: Episode, action: OsgymAction, number: int | None) -> StepResult:
        result: StepResult | None = None
        for part in filter(None, (action.calls, action.ending)):
            result = await episode.step(part, pause_s=self._pause_s, number=number)
            number = None
        assert result is not None, "an action is a call or an ending"
        return result

    @asynccontextmanager
    async def _room(self) -> AsyncIterator[None]:
        """First come, first served among this worker's resets."""
        try:
            async with asyncio.timeout(self._queue_timeout_s), self._turn:
                # Episodes end in many ways, without a notification.
                while self._max_vms is not None and self.num_live() >= self._max_vms:  # noqa: ASYNC110
                    await asyncio.sleep(SHARE_POLL_S)
                self._num_opening += 1
        except TimeoutError as error:
            raise NoCapacityError(
                f"the {self._max_vms} VMs of {self.name} did not become free within {self._queue_timeout_s:g} s; "
                "shut down VMs that are not needed, or use another port"
            ) from error
        try:
            yield
        finally:
            self._num_opening -= 1

    @asynccontextmanager
    async def _using(self, vm_id: int) -> AsyncIterator[tuple[_Vm, Episode]]:
        """A VM that is lost during the call is closed at once: it must not count against the share."""
        vm = self._find(vm_id)
        try:
            yield vm, self._episodes.find(vm.episode_id)
        except UnknownEpisodeError as error:
            await self._end(vm_id, str(error).removesuffix("; reset again"))
            raise UnknownVmError(f"VM {vm_id} is gone: {error}") from error
        except (ReplicaError, EvaluatorError) as error:
            await self._end(vm_id, str(error))
            raise

    def _find(self, vm_id: int) -> _Vm:
        vm = self._vms.get(vm_id)
        if vm is None:
            reason = self._ended.get(vm_id, "this worker never had it")
            raise UnknownVmError(f"there is no VM {vm_id} at {self.name}: {reason}; reset again")
        return vm

    async def _end(self, vm_id: int, reason: str) -> None:
        vm = self._vms.pop(vm_id, None)
        if vm is None:
            return
        self._ended[vm_id] = reason
        for kept, limit in ((self._ended, MAX_ENDED), (self._replies, MAX_KEPT_REPLIES)):
            while len(kept) > limit:
                kept.popitem(last=False)
        await self._episodes.close(vm.episode_id, reason)
