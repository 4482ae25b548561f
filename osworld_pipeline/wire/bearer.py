"""A server's token, compared in constant time."""

import hashlib
import hmac


class Secret:
    """Compares what a client sends with what the server knows."""

    def __init__(self, text: str) -> None:
        # Digests have one length, so not even the secret's length can be measured.
        self._digest = _digest(text.encode())

    def is_same(self, given: bytes) -> bool:
        return hmac.compare_digest(_digest(given), self._digest)

    def is_in(self, authorization: bytes) -> bool:
        """As a bearer token in the header of that name."""
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and self.is_same(token.strip())


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()
