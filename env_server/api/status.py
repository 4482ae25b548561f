"""Pages for a browser: the state and the screen of each replica, and the API. The pages contain no data; they request
data with the token. Single pictures cause no work on a desktop that has an episode; live screens are read from each
watched desktop, also during an episode (live.py)."""

import base64
import hashlib
import importlib.metadata
import time
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import RedirectResponse

from env_server.api.live import LiveScreens
from env_server.api.pictures import Pictures, picture_version
from env_server.driving.pyautogui_calls import action_points
from env_server.episodes.episode import Episode
from env_server.episodes.table import EpisodeEnd, EpisodeTable, UnknownEpisodeError
from env_server.replicas.replica import Replica
from env_server.settings import Settings
from osworld_pipeline.wire import desktops_page
from osworld_pipeline.wire.live_screens import LiveResponse
from osworld_pipeline.wire.status import AboutServer, EndedEpisode, ServerStatus, WatchedEpisode, WatchedReplica

NO_STORE = {"Cache-Control": "no-store"}
MAX_TEXT = 600
"""Characters of an instruction, action or note on the page."""
_STATUS_PAGE = Path(__file__).with_name("status_page")
_DOCS_PAGE = Path(__file__).with_name("docs_page")


def status_router(episodes: EpisodeTable, settings: Settings) -> APIRouter:
    router = APIRouter(include_in_schema=False)
    started_at = time.monotonic()
    pictures, screens = Pictures(), LiveScreens(episodes.pool)
    page, headers = make_page(_STATUS_PAGE, needs_token=settings.token is not None, shows_desktops=True)
    docs_page, docs_headers = make_page(_DOCS_PAGE, needs_token=settings.token is not None)

    @router.get("/")
    async def root() -> Response:
        return RedirectResponse("status", status_code=307)

    @router.get("/status")
    async def status() -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/docs")
    async def docs() -> Response:
        return Response(docs_page, media_type="text/html; charset=utf-8", headers=docs_headers)

    @router.get("/status.json")
    async def status_data() -> ServerStatus:
        by_replica = {episode.replica_id: episode for episode in episodes}
        return ServerStatus(
            server=_about_server(episodes, settings, time.monotonic() - started_at),
            num_free=episodes.pool.num_free,
            num_waiting=episodes.pool.num_waiting,
            num_opened=episodes.num_opened,
            num_live=len(episodes),
            outcomes={str(outcome): count for outcome, count in episodes.outcomes.items()},
            replicas=tuple(
                _about(replica, by_replica.get(replica.replica_id), episodes.last_ends.get(replica.replica_id))
                for replica in episodes.pool.replicas
            ),
        )

    @router.get("/status/replicas/{replica_id}/picture")
    async def picture(replica_id: str, width: Annotated[int, Query(ge=64, le=1920)] = 480) -> Response:
        replica = next((found for found in episodes.pool.replicas if found.replica_id == replica_id), None)
        if replica is None:
            raise UnknownEpisodeError(f"there is no replica {replica_id[:64]!r} on this env server")
        episode = next((found for found in episodes if found.replica_id == replica_id), None)
        image = await pictures.of(replica, episode, width)
        if image is None:
            return Response(status_code=204)
        return Response(image, media_type="image/jpeg", headers=NO_STORE)

    @router.get("/status/live")
    async def live(
        replica: Annotated[list[str], Query(max_length=1024)],
        width: Annotated[int, Query(ge=64, le=1920)] = 480,
    ) -> Response:
        """Frames of these replicas as they change, see LiveScreens."""
        screens.need_room()
        return LiveResponse(screens.stream(replica, width))

    return router


def make_page(folder: Path, *, needs_token: bool, shows_desktops: bool = False) -> tuple[bytes, dict[str, str]]:
    """The page of that folder as one document, and headers that allow no other script, style or source."""
    style = (folder / "page.css").read_text()
    script = "\n".join(path.read_text() for path in sorted(folder.glob("*.js")))
    html = (folder / "page.html").read_text()
    if shows_desktops:
        style, script = f"{desktops_page.style()}\n{style}", f"{desktops_page.script()}\n{script}"
        html = html.replace("{{desktops}}", desktops_page.markup((folder / "person.html").read_text()))
    html = html.replace("{{style}}", style).replace("{{script}}", script)
    html = html.replace("{{needs_token}}", "true" if needs_token else "false")
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return html.encode(), headers


def _source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _about_server(episodes: EpisodeTable, settings: Settings, uptime_s: float) -> AboutServer:
    pool = episodes.pool
    return AboutServer(
        version=importlib.metadata.version("osworld-pipeline"),
        provider=pool.provider.name,
        details=pool.provider.details,
        image_digest=pool.provider.image_digest[:12],
        grader_version=episodes.drivers.grader_version,
        screen=f"{settings.screen_width}x{settings.screen_height}",
        is_draining=pool.is_draining,
        allows_takeover=settings.allow_takeover,
        viewer_url=settings.viewer_url,
        uptime_s=round(uptime_s),
    )


def _about(replica: Replica, episode: Episode | None, last: EpisodeEnd | None) -> WatchedReplica:
    return WatchedReplica(
        id=replica.replica_id,
        state=replica.state,
        since_s=round(time.monotonic() - replica.state_since),
        num_served=replica.num_served,
        num_failures=replica.num_failures,
        last_error=replica.last_error,
        picture=picture_version(replica, episode),
        episode=None if episode is None else _about_episode(episode),
        last=None if last is None else _about_end(last),
    )


def _about_episode(episode: Episode) -> WatchedEpisode:
    shown_action = episode.last_input or episode.last_action or ""
    return WatchedEpisode(
        id=episode.episode_id,
        record_id=episode.record_id,
        task_id=episode.plan.task.task_id,
        instruction=episode.plan.task.instruction[:MAX_TEXT],
        num_steps=episode.num_steps,
        action=shown_action[:MAX_TEXT],
        points=action_points(shown_action),
        note=episode.note[:MAX_TEXT],
        reward=episode.reward,
        num_person_inputs=episode.num_person_inputs,
        is_demonstration=episode.demonstration is not None,
        client_id=episode.client_id,
        is_busy=episode.is_busy,
        age_s=round(time.monotonic() - episode.opened_at),
    )


def _about_end(last: EpisodeEnd) -> EndedEpisode:
    return EndedEpisode(
        task_id=last.task_id,
        record_id=last.record_id,
        outcome=last.outcome,
        num_steps=last.num_steps,
        reward=last.reward,
    )
