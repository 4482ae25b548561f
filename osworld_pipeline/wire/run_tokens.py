"""The token of a run: what its programs send instead of the server's token. It names the run and expires, so a run
token that leaks from a job or a log of a node is of little use. It is made from the server's token by HMAC-SHA256, so
every server with that token accepts it and keeps no list."""

import base64
import hashlib
import hmac
import time

ENDED = "the token of this run has ended"
_KIND = "run1"
_CONTEXT = b"osworld-pipeline run token 1\n"
"""Domain separation: no other MAC with the same key covers a text that starts with this."""


def make_run_token(server_token: str, *, run: str, ends_at: float) -> str:
    """`run`: any text, for people. `ends_at`: Unix time."""
    claim = f"{_KIND}.{base64.urlsafe_b64encode(run.encode()).decode().rstrip('=')}.{int(ends_at)}"
    return f"{claim}.{_mac(server_token, claim)}"


def why_invalid(server_token: str, given: bytes, *, now: float | None = None) -> str | None:
    """Why a server with this token refuses the run token `given`. None: the server accepts it. Empty: `given` is not a
    run token made from this server's token."""
    parts = given.split(b".")
    if len(parts) != 4 or parts[0] != _KIND.encode():
        return ""
    claim = b".".join(parts[:3]).decode(errors="replace")
    if not hmac.compare_digest(_mac(server_token, claim).encode(), parts[3]):
        return ""
    ends_at = int(parts[2])  # a number: the claim is ours
    if ends_at <= (time.time() if now is None else now):
        return f"{ENDED}: launch the run again; it resumes with a new one"
    return None


def _mac(server_token: str, claim: str) -> str:
    return hmac.new(server_token.encode(), _CONTEXT + claim.encode(), hashlib.sha256).hexdigest()
