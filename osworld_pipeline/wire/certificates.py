"""The certificates that this process trusts."""

import os
import ssl
from functools import cache

import httpx


def trusted_certificates() -> ssl.SSLContext:
    """For `verify` of an httpx client, which otherwise reads them itself in 30 ms. They are read once."""
    return _read(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _read(file: str | None, folder: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context()
