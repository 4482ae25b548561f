"""A server's token, compared in constant time."""

import hashlib
import hmac


class Secret:
    """Compares a client's token with the server's."""

    def __init__(self, text: str) -> None:
        # Digests have equal lengths, so the secret's length cannot be measured.
        self._digest = _digest(text.encode())

    def is_same(self, given: bytes) -> bool:
        return hmac.compare_digest(_digest(given), self._digest)

    def is_in(self, authorization: bytes) -> bool:
        """Whether `authorization`, the value of that header, has this secret as its bearer token."""
        return self.is_same(bearer_of(authorization))


def bearer_of(authorization: bytes) -> bytes:
    """The bearer token in the value of an Authorization header; empty if there is none."""
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
