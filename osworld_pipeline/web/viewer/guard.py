"""Checks of every request: its origin, the token if one is set, and the size and pace of its body. Response headers let
a page load and run only our own files."""

import secrets
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from pydantic import SecretStr
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from osworld_pipeline.wire.bearer import Secret
from osworld_pipeline.wire.bodies import BodyLimits
from osworld_pipeline.wire.cross_site import is_from_here, is_own_page

COOKIE = "osworld_viewer"
PARAMETER = "token"
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
_FOREIGN = (
    "this viewer has no token, so it answers only requests from this machine to a loopback address, and none from "
    "pages of other sites; start it with a token to reach it by other names"
)


class Guard:
    """A browser that has sent the token gets a session cookie, which is not the token and expires with this process.
    Without a token only requests from this machine (wire/cross_site.py) and links of other pages are answered."""

    def __init__(
        self, app: ASGIApp, *, token: SecretStr | None, body: BodyLimits, ask: Callable[[str, str], str]
    ) -> None:
        """`ask`: makes the page that asks for the token, from an error message and the address to continue at."""
        self._app, self._body, self._ask = app, body, ask
        self._token = None if token is None else Secret(token.get_secret_value())
        self._cookie = secrets.token_urlsafe(32)
        self._session = Secret(self._cookie)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            answer = self._refusal(scope, headers)
            body = b"" if answer is not None else await self._body.read(headers, receive)
        except HTTPException as error:
            answer, body = _plain(error.detail, error.status_code), b""
        if answer is None and self._token is not None and _is_login(scope):
            form = dict(parse_qsl(body.decode("utf-8", "replace")))
            answer = self._answer(form.get(PARAMETER, ""), form.get("to", "/"))
        # The body has been read, so the page's `receive` waits only for the end of the connection.
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Response | None:
        """The response instead of the page, before any of the body is read; None if the request is allowed."""
        if self._token is None:
            return None if is_from_here(headers, allows_links=True) else _plain(_FOREIGN, 403)
        if scope["path"].startswith("/static/") or _is_login(scope):
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = next((value for name, value in query if name == PARAMETER), None)
        rest = urlencode([(name, value) for name, value in query if name != PARAMETER])
        here = quote(scope["path"]) + (f"?{rest}" if rest else "")
        if given is not None:
            return self._answer(given, here)
        return None if self._is_known(headers) else HTMLResponse(self._ask("", here), 401)

    def _is_known(self, headers: Mapping[bytes, bytes]) -> bool:
        """Recognises a browser by its token, or by the cookie. A browser adds the cookie to requests of other pages
        too, so these are refused."""
        if self._is_token_in(headers):
            return True
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
        except CookieError:
            return False
        return (
            cookie is not None
            and self._session.is_same(cookie.value.encode())
            and is_own_page(headers, allows_links=True)
        )

    def _is_token_in(self, headers: Mapping[bytes, bytes]) -> bool:
        return self._token is not None and self._token.is_in(headers.get(b"authorization", b""))

    def _answer(self, given: str, to: str) -> Response:
        """A redirect with a cookie to the address without the token; or the login page again."""
        to = to if to.startswith("/") and not to.startswith(("//", "/\\")) else "/"
        if self._token is None or not self._token.is_same(given.strip().encode()):
            return HTMLResponse(self._ask("The viewer refused this token.", to), 401)
        answer = RedirectResponse(to, 303)
        answer.set_cookie(COOKIE, self._cookie, httponly=True, samesite="lax", path="/")
        return answer


def _is_login(scope: Scope) -> bool:
    return scope["path"] == "/login" and scope["method"] == "POST"


def _plain(sentence: str, status: int) -> Response:
    """The connection is closed afterwards, because the body has not been read."""
    return Response(sentence, status, {"Connection": "close"}, media_type="text/plain")


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            present = {name.lower() for name, _ in message["headers"]}
            more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            more.append((b"cache-control", b"no-store"))
            message["headers"] = [*message["headers"], *((name, value) for name, value in more if name not in present)]
        await send(message)

    return sending
