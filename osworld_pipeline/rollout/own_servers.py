"""The env servers that programs of a state have started for themselves, as the viewer on the same host finds them. Each
has a token of its own, in a file that only its user can read."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import SecretStr

from osworld_pipeline.process_files import files_of_this_host, process_file

ONLY_ITS_USER = 0o600


def own_server_file(folder: Path, url: str, token: str) -> AbstractContextManager[Path]:
    """Raises StoreError: the file cannot be written."""
    return process_file(folder, "env-server", json.dumps({"url": url, "token": token}).encode(), mode=ONLY_ITS_USER)


def own_servers(folder: Path) -> Mapping[str, SecretStr]:
    """The token of each server by its URL. Files of another user are left out."""
    found = dict[str, SecretStr]()
    for path in files_of_this_host(folder):
        try:
            server = json.loads(path.read_bytes())
        except OSError:  # it has just ended, or belongs to another user
            continue
        found[server["url"]] = SecretStr(server["token"])
    return found
