"""The viewer's pages and their resources. No request changes the store."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import PurePath
from typing import Any

import duckdb
import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from osworld_pipeline.domain.shown_commands import pipeline_line
from osworld_pipeline.errors import PipelineError
from osworld_pipeline.evaluation.changes import Training
from osworld_pipeline.evaluation.effect import RULE
from osworld_pipeline.tables.catalog import first_line
from osworld_pipeline.tables.checkpoints import read_checkpoints
from osworld_pipeline.web.pages import STATIC_TYPES, render, static_file
from osworld_pipeline.web.viewer.blobs import read_picture
from osworld_pipeline.web.viewer.comparing import compare, list_evaluated
from osworld_pipeline.web.viewer.episode import Episodes
from osworld_pipeline.web.viewer.evaluations import Evaluations
from osworld_pipeline.web.viewer.facets import list_episodes, neighbours
from osworld_pipeline.web.viewer.filters import FACETS, SORTS, SPANS, EpisodeFilter
from osworld_pipeline.web.viewer.groups import GROUPS_PAGE, list_groups, read_group
from osworld_pipeline.web.viewer.guard import POLICY, Guard
from osworld_pipeline.web.viewer.index import EpisodeIndex
from osworld_pipeline.web.viewer.live.pages import LivePages
from osworld_pipeline.web.viewer.overview import read_overview
from osworld_pipeline.web.viewer.questions import Questions
from osworld_pipeline.web.viewer.settings import BadQuestionError, NotFoundError, TooBusyError, ViewerSettings
from osworld_pipeline.web.viewer.tokens import tokens_by_step
from osworld_pipeline.wire import desktops_page
from osworld_pipeline.wire.bodies import BodyLimits
from osworld_pipeline.wire.waiting import while_connected

MAX_LANES = 16
MAX_FORM_BYTES = 8 * 1024
"""The form that asks for the token is the one request with a body."""
REPORT_INDEX = "index.html"
"""Index of all reports, written by `osworld-pipeline report` into the folder of reports."""
FOREVER = "private, max-age=31536000, immutable"
REPORT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'none'; sandbox"
LIVE_POLICY = POLICY.replace("img-src 'self'", "img-src 'self' blob:")
"""Live pictures arrive in a stream."""
PART_HEADER = "x-part"
"""Sent by a page that requests only its changing part."""
_HUNG_UP = Response(status_code=499)
"""The response to a client that has disconnected; it is not sent."""


def create_app(settings: ViewerSettings, is_ending: Callable[[], bool] = lambda: False) -> ASGIApp:
    """The whole application, guard included. `is_ending`: whether its server is asked to stop, which ends streams."""
    viewer = Viewer(settings, is_ending)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        warming = asyncio.create_task(viewer.warm_up())
        yield
        await warming
        await viewer.live.servers.close()
        await viewer.questions.processes.close()
        viewer.index.close()

    app = Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path, endpoint in viewer.routes().items()],
        exception_handlers=dict.fromkeys((PipelineError, duckdb.Error, HTTPException), viewer.answer_error),
        lifespan=lifespan,
    )

    def ask(problem: str, to: str) -> str:
        return render("viewer/login.html.jinja", problem=problem, to=to)

    body = BodyLimits(max_bytes=MAX_FORM_BYTES, slow_client_s=settings.slow_client_s)
    return Guard(app, token=settings.token, body=body, ask=ask)


class Viewer:
    """Shared state and endpoints of all pages. Endpoints run in threads, each with its own reader."""

    def __init__(self, settings: ViewerSettings, is_ending: Callable[[], bool]) -> None:
        self.settings = settings
        self.index = EpisodeIndex(settings.state)
        self.questions = Questions(settings.state, self.index, limit_s=settings.question_s)
        self.episodes = Episodes(settings.state, self.index)
        self.evaluations = Evaluations(settings.state, self.index)
        self.live = LivePages(settings, self.index, is_ending)

    def routes(self) -> Mapping[str, Callable[[Request], Response | Awaitable[Response]]]:
        return {
            "/": self.home,
            "/episodes": self.list_page,
            "/episode/{episode_id:path}": self.episode_page,
            "/side-by-side": self.side_by_side,
            "/groups": self.groups_page,
            "/group/{group_id:path}": self.group_page,
            "/compare": self.compare_page,
            "/reports/{name}": self.report,
            "/newer": self.newer,
            "/blob/{sha256}": self.blob,
            "/tokens/{episode_id:path}": self.tokens,
            "/observation/{step_index:int}/{episode_id:path}": self.observation,
            "/static/{name}": self.static,
            "/live": self.live_page,
            **self.live.routes(),
        }

    async def warm_up(self) -> None:
        """Read the store and the templates before the first request, which reports any error; then start the first
        process for SQL."""
        with suppress(PipelineError):
            await run_in_threadpool(self.home)
        await self.questions.processes.start_ahead()

    def home(self, _: Request | None = None) -> Response:
        self.index.refresh()
        with self.index.reading() as reader:
            overview = read_overview(reader, self.evaluations.names(reader))
        has_report = (self.settings.state.reports / REPORT_INDEX).is_file()
        return self._page("home.html.jinja", overview=overview, has_report=has_report)

    async def list_page(self, request: Request) -> Response:
        chosen = EpisodeFilter.from_query(request.query_params.multi_items())
        asked = await while_connected(request, self._ask(chosen))
        return _HUNG_UP if asked is None else await run_in_threadpool(self._list, request, chosen, *asked)

    async def _ask(self, chosen: EpisodeFilter) -> tuple[str, str]:
        """The table to list from, and the error in the condition; with an error it is the table of all episodes."""
        await run_in_threadpool(self.index.refresh)
        try:
            return await self.questions.source(chosen), ""
        except BadQuestionError as error:
            return "facts", str(error)

    def _list(self, request: Request, chosen: EpisodeFilter, source: str, problem: str) -> Response:
        with self.index.reading() as reader:
            listed = list_episodes(reader, chosen, source)
            names = self.evaluations.names(reader)
        is_part = request.headers.get(PART_HEADER) == "results"
        return self._page(
            "results.html.jinja" if is_part else "list.html.jinja",
            listed=listed, chosen=chosen, problem=problem, facets=FACETS, spans=SPANS, sorts=SORTS, names=names,
        )  # fmt: skip

    async def episode_page(self, request: Request) -> Response:
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "step"]
        chosen = EpisodeFilter.from_query(query)
        asked = await while_connected(request, self._ask(chosen))
        return _HUNG_UP if asked is None else await run_in_threadpool(self._episode, request, chosen, *asked)

    def _episode(self, request: Request, chosen: EpisodeFilter, source: str, problem: str) -> Response:
        episode_id: str = request.path_params["episode_id"]
        view = self.episodes.view(episode_id)
        with self.index.reading() as reader:
            names = self.evaluations.names(reader)
        before, after = (None, None) if problem else self._neighbours(chosen, source, episode_id)
        step = _step(request, len(view.steps))
        return self._page(
            "episode.html.jinja", view=view, current=step, before=before, after=after, chosen=chosen, names=names
        )

    def _neighbours(self, chosen: EpisodeFilter, source: str, episode_id: str) -> tuple[str | None, str | None]:
        """(None, None) if the search takes too long: the episode is still shown."""
        try:
            with self.index.reading() as reader:
                return neighbours(reader, chosen, source, episode_id)
        except BadQuestionError:
            return None, None

    def side_by_side(self, request: Request) -> Response:
        self.index.refresh()
        ids = list(dict.fromkeys(request.query_params.getlist("episode")))
        if not 1 <= len(ids) <= MAX_LANES:
            raise BadQuestionError(f"name 1 to {MAX_LANES} episodes: /side-by-side?episode=ID&episode=ID")
        views = [self.episodes.view(episode_id) for episode_id in ids]
        step = _step(request, max(len(view.steps) for view in views))
        return self._page("side_by_side.html.jinja", views=views, current=step)

    def groups_page(self, request: Request) -> Response:
        self.index.refresh()
        asked = {name: request.query_params.get(name, "") for name in ("run", "mlflow", "fate", "task")}
        page = request.query_params.get("page", "1")
        number = min(max(int(page), 1), 1_000_000) if page.isascii() and page.isdigit() and len(page) < 9 else 1
        with self.index.reading() as reader:
            rows, total = list_groups(reader, page=number, **asked)
        num_pages = max(1, -(-total // GROUPS_PAGE))
        return self._page("groups.html.jinja", rows=rows, total=total, asked=asked, page=number, num_pages=num_pages)

    def group_page(self, request: Request) -> Response:
        self.index.refresh()
        with self.index.reading() as reader:
            group = read_group(reader, request.path_params["group_id"])
        siblings = group.siblings[:MAX_LANES]
        views = [self.episodes.view(sibling["episode_id"]) for sibling in siblings]
        step = _step(request, max((len(view.steps) for view in views), default=0))
        return self._page("group.html.jinja", group=group, views=views, current=step)

    def compare_page(self, request: Request) -> Response:
        self.index.refresh()
        before, after, settings = (request.query_params.get(name, "") for name in ("a", "b", "settings"))
        with self.index.reading() as reader:
            names = self.evaluations.names(reader)
            evaluated = list_evaluated(reader, names)
            under = {
                name: [one.settings for one in evaluated if one.checkpoint_id == name]
                for name in (before, after)
                if name
            }
            common = [key for key in under.get(before, []) if key in under.get(after, [])]
            settings = settings if settings in common else next(iter(common), "")
            is_comparable = bool(before and after and common)
            compared = (
                compare(reader, before, after, settings, Training(read_checkpoints(self.settings.state)))
                if is_comparable
                else None
            )
        return self._page(
            "compare.html.jinja", evaluated=evaluated, compared=compared, a=before, b=after, settings=settings,
            common=common, under=under, names=names, rule=RULE,
        )  # fmt: skip

    def live_page(self, _: Request) -> Response:
        answer = self._page("live.html.jinja", desktops=desktops_page.markup())
        answer.headers["Content-Security-Policy"] = LIVE_POLICY
        return answer

    def report(self, request: Request) -> Response:
        name = request.path_params["name"]
        path = {path.name: path for path in self.settings.state.reports.glob("*.html")}.get(name)
        if path is None:
            advised = pipeline_line(self.settings.state, "report", "--all")
            raise NotFoundError(f"there is no report {name[:100]}: `{advised}` writes all reports")
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    def newer(self, _: Request) -> Response:
        """The current number of episodes and generation: open pages poll it for changes."""
        self.index.refresh()
        with self.index.reading() as reader:
            count = reader.rows("SELECT count(*) FROM facts")[0][0]
        return _json({"num_episodes": count, "generation": self.index.generation, "problem": self.index.problem})

    def blob(self, request: Request) -> Response:
        picture = read_picture(self.settings.state.blobs, request.path_params["sha256"])
        return Response(picture.data, media_type=picture.media_type, headers={"Cache-Control": FOREVER})

    def tokens(self, request: Request) -> Response:
        self.index.refresh()
        checkpoint_id, sequences = self.episodes.tokens(request.path_params["episode_id"])
        with self.index.reading() as reader:
            known = reader.one("SELECT path FROM checkpoints WHERE checkpoint_id = ?", [checkpoint_id])
        if known is None or not known["path"]:
            raise NotFoundError(f"checkpoint {checkpoint_id} has no folder in the tables: its tokenizer is not known")
        steps = tokens_by_step(sequences, self.settings.state.root / known["path"] / "tokenizer.json")
        return _json([[[token.text, round(token.logprob, 4)] for token in step] for step in steps])

    def observation(self, request: Request) -> Response:
        self.index.refresh()
        step_index, episode_id = request.path_params["step_index"], request.path_params["episode_id"]
        return PlainTextResponse(self.episodes.observation(episode_id, step_index))

    def static(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = static_file(name)
        if content is None:
            raise NotFoundError("there is no such file")
        return Response(content, media_type=STATIC_TYPES[PurePath(name).suffix], headers={"Cache-Control": FOREVER})

    def answer_error(self, request: Request, error: Exception) -> Response:
        """One sentence with the error and what to do, as a page, or as JSON for a script."""
        status = 500
        sentence = str(error)
        if isinstance(error, NotFoundError):
            status = 404
        elif isinstance(error, BadQuestionError):
            status = 422
        elif isinstance(error, TooBusyError):
            status = 503
        elif isinstance(error, HTTPException):
            status = error.status_code
            sentence = "the viewer is read-only" if status == 405 else f"there is no page at {request.url.path[:200]}"
        elif isinstance(error, duckdb.Error):
            sentence = f"the index of episodes could not be queried ({first_line(error)}): load the page again"
        if request.url.path.startswith(("/blob/", "/tokens/", "/observation/", "/static/", "/newer", "/live/")):
            return _json({"error": sentence}, status)
        return self._page("error.html.jinja", status=status, sentence=sentence)

    def _page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(render(f"viewer/{template}", status=status, **values, **self._shared()), status)

    def _shared(self) -> dict[str, Any]:
        with self.index.reading() as reader:
            count = reader.rows("SELECT count(*) FROM facts")[0][0]
        return {
            "state_folder": str(self.settings.state.root),
            "command": partial(pipeline_line, self.settings.state),
            "num_known": count,
            "generation": self.index.generation,
            "store_problem": self.index.problem,
            "mlflow_url": self.settings.mlflow_url.rstrip("/"),
            "dagster_url": self.settings.dagster_url.rstrip("/"),
        }


def _step(request: Request, num_steps: int) -> int:
    """The step from 0, of an address that counts from 1; limited to the episode."""
    text = request.query_params.get("step", "1")
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 1
    return min(max(number, 1), max(num_steps, 1)) - 1


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
