"""A bucket with a prefix, as whole objects by key. Each request is retried within limits; a final failure is one
StoreError. Credentials, endpoint and region come from the environment (AWS_*)."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from osworld_pipeline.atomic_io import replacing
from osworld_pipeline.errors import DependencyError, StoreError

REQUEST_TIMEOUT = timedelta(seconds=60)
"""Timeout of one request; a large file needs many."""
CONNECT_TIMEOUT = timedelta(seconds=5)
MAX_RETRIES = 6
RETRY_TIMEOUT = timedelta(seconds=90)
CHUNK_BYTES = 8 << 20
LISTED = 1_000
"""Objects per response."""
CHUNKS_AT_ONCE = 4
"""Parallel requests for one uploaded file."""
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
)  # fmt: skip
_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>[^/\s?#][^\s?#]*?))?/?")


OnBytes = Callable[[int], None]


def _ignore(num_bytes: int) -> None:
    pass


class Found(NamedTuple):
    data: bytes
    version: str
    """The entity tag, for `replace`."""


class Listed(NamedTuple):
    key: str
    num_bytes: int
    modified: float
    """Unix time, by the store's clock."""


class OutdatedError(Exception):
    """The object is not the version that was to be replaced."""


class _Counted:
    """An open file that reports how many bytes are read."""

    def __init__(self, file: BinaryIO, on_bytes: OnBytes) -> None:
        self._file, self._on_bytes = file, on_bytes

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._on_bytes(len(data))
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class Bucket:
    """Safe for any number of threads; keys are relative to the URL's prefix."""

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store

    def read(self, key: str) -> Found | None:
        """A small object; None if it does not exist. Raises StoreError."""
        import obstore

        with self._explained(f"read {key}"):
            try:
                found = obstore.get(self._store, key)
                return Found(bytes(found.bytes()), str(found.meta["e_tag"] or ""))
            except FileNotFoundError:
                return None

    def replace(self, key: str, data: bytes, *, version: str | None) -> None:
        """Writes a small object if its version is still `version`; None: if it does not exist.

        Raises:
            OutdatedError: it has another version by now.
            StoreError: the store refused.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._explained(f"write {key}", but=(AlreadyExistsError, PreconditionError)):
                obstore.put(self._store, key, data, mode="create" if version is None else {"e_tag": version})
        except (AlreadyExistsError, PreconditionError) as error:
            # A retried request may find its own write, if only the response was lost.
            found = self.read(key)
            if found is None or found.data != data:
                raise OutdatedError(key) from error

    def size(self, key: str) -> int | None:
        """Size in bytes; None if there is no such object. Raises StoreError."""
        import obstore

        with self._explained(f"look for {key}"):
            try:
                return int(obstore.head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def upload(self, file: BinaryIO, key: str, *, on_bytes: OnBytes = _ignore) -> int:
        """Stores an open file under a key derived from its content; returns the bytes sent, 0 if it exists already.
        `on_bytes` is called with each number of bytes that are read, or that exist already. Raises StoreError."""
        import obstore

        num_bytes = os.fstat(file.fileno()).st_size
        if self.size(key) == num_bytes:
            on_bytes(num_bytes)
            return 0
        # An object appears atomically, even after many requests.
        with self._explained(f"upload {file.name}"):
            obstore.put(
                self._store,
                key,
                _Counted(file, on_bytes),  # pyright: ignore[reportArgumentType] - it has what obstore calls
                chunk_size=CHUNK_BYTES,
                max_concurrency=CHUNKS_AT_ONCE,
            )
        return num_bytes

    def download(self, key: str, path: Path, *, sha256: str, on_bytes: OnBytes = _ignore) -> bool:
        """Downloads an object to `path` atomically; False if there is no such object. `on_bytes` is called with each
        number of bytes that are received.

        Raises:
            StoreError: the store or the file system refused, or the content has another hash.
        """
        import obstore

        with self._explained(f"download {key}"):
            try:
                found = obstore.get(self._store, key)
            except FileNotFoundError:
                return False
            digest = hashlib.sha256()
            with replacing(path) as temp:
                with temp.open("wb") as file:
                    for chunk in found.stream(min_chunk_size=CHUNK_BYTES):
                        digest.update(chunk)
                        file.write(chunk)
                        on_bytes(len(chunk))
                if digest.hexdigest() != sha256:
                    raise StoreError(f"{self.url}/{key} is damaged (another SHA-256): push it again from its origin")
        return True

    def read_range(self, key: str, start: int, num_bytes: int) -> bytes | None:
        """A range of an object; None if there is no such object. Raises StoreError."""
        import obstore

        with self._explained(f"read {key}"):
            try:
                return bytes(obstore.get_range(self._store, key, start=start, length=num_bytes))
            except FileNotFoundError:
                return None

    def list(self, prefix: str = "") -> Iterator[Listed]:
        """The objects below `prefix`, which must end at a key separator, in no order. Raises StoreError."""
        import obstore

        found = iter(obstore.list(self._store, prefix or None, chunk_size=LISTED))
        while True:
            with self._explained("list its objects"):
                batch = next(found, None)
            if batch is None:
                return
            for one in batch:
                yield Listed(str(one["path"]), int(one["size"]), one["last_modified"].timestamp())

    def remove(self, keys: Sequence[str]) -> None:
        """Deletes objects; missing ones are ignored. Raises StoreError."""
        import obstore

        if keys:
            with self._explained("remove objects"):
                obstore.delete(self._store, [*keys])

    @contextmanager
    def _explained(self, what: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except but:
            raise
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreError(
                f"{self.url} refused to {what}: check the credentials in the environment (AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY) and their permissions"
            ) from error
        except BaseError as error:
            text = str(error).strip().splitlines()[0][:300]
            raise StoreError(
                f"{self.url} could not {what}: {text}; try again; existing objects are not sent again"
            ) from error


def open_bucket(url: str) -> Bucket:
    """The bucket of `s3://BUCKET[/PREFIX]`; no request is made.

    Raises:
        StoreError: the URL has another form, or the environment has no credentials.
        DependencyError: obstore is not installed.
    """
    _need_credentials(url, os.environ)
    return _open(need_url(url))


def need_url(url: str) -> str:
    """The URL without a slash at its end. Raises StoreError."""
    if not _URL.fullmatch(url):
        raise StoreError(f"'{url}' is not the URL of an object store: write it as s3://BUCKET/PREFIX")
    return url.rstrip("/")


def _need_credentials(url: str, environment: Mapping[str, str]) -> None:
    if not any(environment.get(name) for name in CREDENTIALS):
        raise StoreError(
            f"{url} needs credentials in the environment: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and "
            "AWS_ENDPOINT_URL for a store that is not AWS's)"
        )


@lru_cache(maxsize=8)
def _open(url: str) -> Bucket:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise DependencyError("a state on an object store needs obstore: install the extra 's3'") from error
    match = _URL.fullmatch(url)
    assert match is not None
    store = S3Store(
        match["bucket"],
        prefix=match["prefix"],
        # A plain HTTP endpoint is only used if the environment names it.
        client_options={"allow_http": True, "timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT},
        retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
    )
    return Bucket(url, store)
