"""An S3-compatible object store: a bucket by its URL, and the note of the one that a state folder belongs to."""

from osworld_pipeline.object_store.bucket import Bucket, open_bucket
from osworld_pipeline.object_store.note import RemoteNote, read_note, write_note

__all__ = ["Bucket", "RemoteNote", "open_bucket", "read_note", "write_note"]
