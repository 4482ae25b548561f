"""The endpoints of AReaL's OSWorld bridge, /envs ..., as its RemoteDesktopEnv calls them.

A session needs no desktop: its reset leases one, with the server's bounded wait; the next reset, the close or the idle
limit returns it. The client treats every status from 400 on as the end of its trajectory, closes the session and drops
its data. A fault therefore never becomes a reward in its training, and a refused action also ends the trajectory."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from env_server.api.answers import screenshot_answer
from env_server.api.faults import ERROR_ANSWERS
from env_server.api.opening import CLIENT_CLOSED_REQUEST, client_of, open_unless_gone
from env_server.api.quick_route import QuickRoute
from env_server.episodes.episode import Episode
from env_server.episodes.outcomes import StepOrderError
from env_server.episodes.table import EpisodeTable, Opened, UnknownEpisodeError
from osworld_pipeline.domain.observation import Observation
from osworld_pipeline.errors import ActionParseError, NoCapacityError, TaskError
from osworld_pipeline.wire import EnvConfig, Message

MAX_SESSIONS = 10_000
INFO: dict[str, dict[str, Any]] = {"DONE": {"done": True}, "FAIL": {"fail": True}}


class UnknownSessionError(UnknownEpisodeError):
    """There is no session with that id."""


class SessionOrderError(StepOrderError):
    """The session has no desktop yet."""


class ArealCreate(Message):
    """The arguments of DesktopEnv. `provider_name`, `path_to_vm`, `cache_dir` and `headless` are ignored: the server
    has its own settings for them."""

    provider_name: str | None = None
    path_to_vm: str | None = None
    action_space: str = "pyautogui"
    cache_dir: str | None = None
    screen_size: tuple[int, int] | None = None
    """(width, height); None means the server's size. A server with another size refuses with 409."""
    headless: bool = True
    os_type: str = "Ubuntu"
    require_a11y_tree: bool = False


class ArealSession(Message):
    session_id: str


class ArealReset(Message):
    task_config: dict[str, Any] | None = None


class ArealStep(Message):
    action: str | None = None
    """`pyautogui.f(...)` calls with literal arguments, or WAIT, DONE, FAIL."""
    pause: float = Field(default=0.0, ge=0.0, le=60.0)
    step: int | None = Field(default=None, ge=1)
    """An extension of AReaL's protocol: the number of this step, counted from 1; a step with a number may be sent
    again."""


class ArealObservation(Message):
    screenshot_b64: str
    accessibility_tree: str | None
    terminal: str | None
    instruction: str


class ArealObservationAnswer(Message):
    obs: ArealObservation


class ArealStepAnswer(ArealObservationAnswer):
    reward: float
    """Always 0, as in OSWorld's env.step; /evaluate returns the reward."""
    done: bool
    info: dict[str, Any]


class ArealReward(Message):
    reward: float


class ArealOk(Message):
    ok: bool = True


@dataclass(kw_only=True)
class _Session:
    env_config: EnvConfig
    episode_id: str | None = None
    last_used_at: float = field(default_factory=time.monotonic)
    num_calls: int = 0
    resetting: asyncio.Lock = field(default_factory=asyncio.Lock)


class ArealSessions:
    """Sessions over the server's episodes. When a session is created, those without a live episode that were not used
    for `idle_ttl_s` are removed."""

    def __init__(self, episodes: EpisodeTable, *, idle_ttl_s: float) -> None:
        self._episodes, self._idle_ttl_s = episodes, idle_ttl_s
        self._sessions: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def create(self, env_config: EnvConfig) -> str:
        """
        Raises:
            TaskError, ScreenSizeError: this server has no such desktops.
            NoCapacityError: too many sessions are open.
        """
        self._episodes.check(env_config)
        self._forget_idle()
        if len(self._sessions) >= MAX_SESSIONS:
            raise NoCapacityError(f"{MAX_SESSIONS} sessions are open; close those that are not needed")
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = _Session(env_config=env_config)
        return session_id

    async def reset(self, session_id: str, message: ArealReset, request: Request) -> Opened | None:
        """None when the client hung up meanwhile.

        Raises:
            UnknownSessionError: the session does not exist, or was closed meanwhile.
            PipelineError: as EpisodeTable.open; the session may be reset again.
        """
        with self._using(session_id) as session:
            if message.task_config is None:
                raise TaskError("a reset needs a task_config; send OSWorld's task file")
            async with session.resetting:
                await self._give_back(session, "its session was reset")
                opened = await open_unless_gone(
                    self._episodes,
                    message.task_config,
                    session.env_config,
                    client_id=client_of(request),
                    request_id="",
                    request=request,
                )
                if opened is None:
                    return None
                session.episode_id = opened[0].episode_id
                if session_id not in self._sessions:
                    await self._give_back(session, "its session was closed")
                    self._find(session_id)
                return opened

    @contextmanager
    def episode(self, session_id: str) -> Iterator[Episode]:
        """
        Raises:
            UnknownSessionError, SessionOrderError: the session does not exist, or has not been reset yet.
            UnknownEpisodeError: its desktop is gone, with the reason; reset again.
        """
        with self._using(session_id) as session:
            if session.episode_id is None:
                raise SessionOrderError(f"session {session_id} has no desktop yet; reset it first")
            yield self._episodes.find(session.episode_id)

    async def close(self, session_id: str) -> None:
        """Closing a session twice, or one that never existed, is no error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await self._give_back(session, "its session was closed")

    async def _give_back(self, session: _Session, reason: str) -> None:
        episode_id, session.episode_id = session.episode_id, None
        if episode_id is not None:
            await self._episodes.close(episode_id, reason)

    def _find(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(
                f"there is no session {session_id[:64]!r}: it was closed, or it was not used for "
                f"{self._idle_ttl_s:g} s; create another"
            )
        return session

    @contextmanager
    def _using(self, session_id: str) -> Iterator[_Session]:
        session = self._find(session_id)
        session.num_calls += 1
        try:
            yield session
        finally:
            session.num_calls -= 1
            session.last_used_at = time.monotonic()

    def _forget_idle(self) -> None:
        now, live = time.monotonic(), {episode.episode_id for episode in self._episodes}
        for session_id, session in list(self._sessions.items()):
            is_idle = not session.num_calls and session.episode_id not in live
            if is_idle and now - session.last_used_at > self._idle_ttl_s:
                del self._sessions[session_id]


def areal_router(episodes: EpisodeTable, *, idle_ttl_s: float) -> APIRouter:
    router = APIRouter(route_class=QuickRoute, prefix="/envs", tags=["AReaL bridge"], responses=ERROR_ANSWERS)
    sessions = ArealSessions(episodes, idle_ttl_s=idle_ttl_s)

    @router.post("", summary="Open a session")
    async def create(message: ArealCreate) -> ArealSession:
        """Checks the request; leases no desktop."""
        config = EnvConfig(
            os_type=message.os_type,
            action_space=message.action_space,
            screen_size=message.screen_size,
            require_a11y_tree=message.require_a11y_tree,
        )
        return ArealSession(session_id=sessions.create(config))

    @router.post(
        "/{session_id}/reset", summary="Take a desktop and set a task up", response_model=ArealObservationAnswer
    )
    async def reset(session_id: str, message: ArealReset, request: Request) -> Response:
        """Returns the session's previous desktop first."""
        opened = await sessions.reset(session_id, message, request)
        if opened is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return await _answer(opened[1])

    @router.get("/{session_id}/obs", summary="What the desktop shows now", response_model=ArealObservationAnswer)
    async def obs(session_id: str) -> Response:
        with sessions.episode(session_id) as episode:
            return await _answer(await episode.look())

    @router.post("/{session_id}/step", summary="Act once", response_model=ArealStepAnswer)
    async def step(session_id: str, message: ArealStep) -> Response:
        if message.action is None:
            raise ActionParseError("missing 'action' in the body; send pyautogui calls, or WAIT, DONE or FAIL")
        with sessions.episode(session_id) as episode:
            result = await episode.step(message.action, pause_s=message.pause, number=message.step)
        touched = {"num_person_inputs": result.num_person_inputs} if result.num_person_inputs else {}
        info = INFO.get(result.action, {}) | touched
        return await _answer(result.observation, reward=0.0, done=result.is_done, info=info)

    @router.post("/{session_id}/evaluate", summary="Grade the episode")
    async def evaluate(session_id: str) -> ArealReward:
        """Graded once for the same last step; a repeated request gets the same answer. A touched episode is a 500."""
        with sessions.episode(session_id) as episode:
            return ArealReward(reward=await episode.own_reward())

    @router.post("/{session_id}/close", summary="Close the session")
    async def close(session_id: str) -> ArealOk:
        """Closing twice is no error."""
        await sessions.close(session_id)
        return ArealOk()

    return router


async def _answer(observation: Observation, **fields: Any) -> Response:
    def with_image(image: str) -> dict[str, Any]:
        obs = {
            "screenshot_b64": image,
            "accessibility_tree": observation.accessibility_tree,
            "terminal": observation.terminal,
            "instruction": observation.instruction,
        }
        return {"obs": obs, **fields}

    return await screenshot_answer(observation.screenshot, with_image)
