"""What every request passes first: the host it names, the token where one is set, and headers that let a page load and
run nothing but our own."""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from pydantic import SecretStr
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "osworld_viewer"
PARAMETER = "token"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
MAX_FORM_BYTES = 8 * 1024


class Guard:
    """A browser that has shown the token gets a cookie, which is no token and ends with this process. Without a token
    only names of this machine are answered, so that no page of another site can ask through a name of its own."""

    def __init__(
        self, app: ASGIApp, *, token: SecretStr | None, names: tuple[str, ...], ask: Callable[[str, str], str]
    ) -> None:
        """`names`: hosts that are answered without a token. `ask`: the page that asks for the token, given what was
        wrong and where to go on."""
        self._app, self._names, self._ask = app, {name.lower() for name in names}, ask
        # Digests have one length, so not even the token's length can be measured.
        self._token_digest = None if token is None else _digest(token.get_secret_value().encode())
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = await self._refusal(scope, receive)
        if answer is not None:
            await answer(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        """What is answered instead of the page; None where the request may pass."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token_digest is None:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if _without_port(host) not in self._names:
                return Response("this viewer answers on its own address alone", 421, media_type="text/plain")
            return None
        if scope["path"].startswith("/static/"):
            return None
        if scope["path"] == "/login" and scope["method"] == "POST":
            form = dict(parse_qsl((await _read_form(receive)).decode("utf-8", "replace")))
            return self._answer(form.get(PARAMETER, ""), form.get("to", "/"))
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == PARAMETER), None)
        rest = urlencode([(name, value) for name, value in query if name != PARAMETER])
        here = quote(scope["path"]) + (f"?{rest}" if rest else "")
        if given is not None:
            return self._answer(given, here)
        return None if self._is_known(headers) else HTMLResponse(self._ask("", here), 401)

    def _is_known(self, headers: Mapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and self._is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(
            _digest(cookie.value.encode()), _digest(self._session.encode())
        )

    def _is_token(self, given: bytes) -> bool:
        return self._token_digest is not None and hmac.compare_digest(_digest(given), self._token_digest)

    def _answer(self, given: str, to: str) -> Response:
        """The way on with a cookie, by an address without the token; or the question again."""
        to = to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
        if not self._is_token(given.strip().encode()):
            return HTMLResponse(self._ask("The viewer refused this token.", to), 401)
        answer = RedirectResponse(to, 303)
        answer.set_cookie(COOKIE, self._session, httponly=True, samesite="lax", path="/")
        return answer


async def _read_form(receive: Receive) -> bytes:
    body = b""
    while len(body) <= MAX_FORM_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return body
    return b""


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            more.append((b"cache-control", b"no-store"))
            message["headers"] = [*message["headers"], *((name, value) for name, value in more if name not in present)]
        await send(message)

    return sending


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
