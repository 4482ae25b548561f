"""Implements /setup/download_file: downloads a URL into a file, if the desktop has a network."""

import os
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

MAX_BYTES = 512 * 1024 * 1024
TIMEOUT_S = 60.0
"""Limit of the connection and of every piece; the host limits the total time."""
_PIECE_BYTES = 1024 * 1024


def fetch(url: str, path: Path) -> str | None:
    """Writes the content of `url` to `path`, completely or not at all; returns an error message or None."""
    if urlsplit(url).scheme not in ("http", "https"):
        return f"{url!r} is not a web address"
    # Imported here, because the imports would slow the start of every desktop.
    import http.client
    import urllib.request

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".download-")
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310
            while piece := answer.read(_PIECE_BYTES):
                if file.tell() + len(piece) > MAX_BYTES:
                    return f"{url} is larger than {MAX_BYTES} bytes"
                file.write(piece)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url} cannot be downloaded: {error}"
    finally:
        Path(temporary).unlink(missing_ok=True)
    return None
