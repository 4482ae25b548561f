"""Requests over HTTP: raw bytes on a connection, messages in JSON, and addresses of the viewer."""

import asyncio
import dataclasses
from urllib.parse import parse_qsl

from pydantic import ValidationError
from uvicorn.server import ServerState

from env_server.api.areal import ArealCreate, ArealStep
from env_server.api.osgym.routes import OsgymReset, OsgymStep
from env_server.api.v1.messages import OpenRequest, StepMessage
from fuzz.parser import Parser, text_of, wait_for
from osworld_pipeline.web.viewer.filters import EpisodeFilter
from osworld_pipeline.wire import ResetRequest, StepRequest
from osworld_pipeline.wire.connections import ConnectionLimits, bounded_config

MESSAGES = (ResetRequest, StepRequest, OpenRequest, StepMessage, ArealCreate, ArealStep, OsgymReset, OsgymStep)
LIMITS = ConnectionLimits(max_connections=8, slow_client_s=5.0, keep_alive_s=5.0)


class _Transport(asyncio.Transport):
    """Takes what a server writes to a client that never reads."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2), "socket": None})
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None: ...


async def _application(scope: dict, receive, send) -> None:
    """Reads the body and answers."""
    while (await receive()).get("more_body"):
        continue
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def _connection(data: bytes) -> None:
    """The bytes arrive in two pieces, cut at the place that the first byte says."""

    async def serve() -> bytes:
        config = bounded_config(_application, LIMITS, shutdown_grace_s=1, lifespan="off")
        config.load()
        state = ServerState()
        protocol = config.http_protocol_class(config=config, server_state=state, app_state={})
        transport = _Transport()
        protocol.connection_made(transport)
        cut = 1 + (data[0] if data else 0)
        for piece in (data[1:cut], data[cut:]):
            if piece and not transport.is_closed:
                protocol.data_received(piece)
                for _ in range(3):
                    await asyncio.sleep(0)
        protocol.connection_lost(None)
        await asyncio.gather(*state.tasks)
        return transport.written

    written = wait_for(serve())
    assert not written or written.startswith(b"HTTP/1.1 "), written[:80]


def _message(data: bytes) -> None:
    kind = MESSAGES[data[0] % len(MESSAGES)] if data else MESSAGES[0]
    kind.model_validate_json(data[1:]).model_dump_json()


def _filter(data: bytes) -> None:
    chosen = EpisodeFilter.from_query(parse_qsl(text_of(data), keep_blank_values=True))
    condition, values = chosen.condition()
    assert condition.count("?") == len(values)
    again = EpisodeFilter.from_query(parse_qsl(chosen.query(), keep_blank_values=True))
    assert again.query() == chosen.query()
    dataclasses.asdict(again)


_POST = b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"

PARSERS = [
    Parser(
        name="connection",
        read=_connection,
        seeds=(b"\x10" + _POST, b"\x40" + _POST + _POST, b"\x08" + _CHUNKED, b"\0GET / HTTP/1.0\r\n\r\n"),
        words=(
            "Expect: 100-continue\r\n",
            "Upgrade: websocket\r\n",
            "Connection: close\r\n",
            "Transfer-Encoding: chunked\r\n",
        ),
    ),
    Parser(
        name="message",
        read=_message,
        refusals=(ValidationError,),
        seeds=(
            b'\0{"task_config": {"id": "a"}}',
            b'\1{"episode_id": "a", "action": "WAIT", "pause": 0}',
            b'\2{"request_id": "a", "task_config": {}}',
            b'\3{"step": 1, "action": "DONE"}',
        ),
    ),
    Parser(
        name="viewer_address",
        read=_filter,
        seeds=(b"outcome=success&outcome=none&reward_min=0.5&page=3&sort=oldest&q=a", b"where=reward+%3E+0.5&group=g"),
    ),
]
