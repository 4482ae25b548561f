"""OSGym's worker ports: each is a worker with its own VM numbers and share of the desktops, all over one pool.

OSGym's own client sends no token, so on these ports the list of allowed addresses controls access; if a token is set as
well, both are required."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from starlette.types import ASGIApp

from env_server.api.guard import Guard
from env_server.api.osgym.routes import osgym_app
from env_server.episodes.table import EpisodeTable
from env_server.serving import ExtraListener, bind
from env_server.settings import Settings
from osworld_pipeline.wire.bodies import BodyLimits


@contextmanager
def osgym_listeners(settings: Settings) -> Iterator[list[ExtraListener]]:
    """One listener, bound, for each of OSGym's ports; none if no ports are configured.

    Raises:
        SettingsError: a port is in use, or may not be bound.
    """
    there = settings.model_copy(update={"host": settings.osgym.host})
    with ExitStack() as stack:
        yield [
            ExtraListener(listener=stack.enter_context(bind(there, port)), make_app=_app_maker(settings, port))
            for port in settings.osgym.ports
        ]


def _app_maker(settings: Settings, port: int) -> Callable[[EpisodeTable], ASGIApp]:
    def make_app(episodes: EpisodeTable) -> ASGIApp:
        return Guard(
            osgym_app(episodes, settings, port=port),
            token=settings.token.get_secret_value() if settings.token else None,
            body=BodyLimits(max_bytes=settings.max_body_bytes, slow_client_s=settings.slow_client_s),
            has_address_list=True,
        )

    return make_app
