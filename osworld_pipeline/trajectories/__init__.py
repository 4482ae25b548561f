"""The trajectory store: Parquet parts and image blobs."""

from osworld_pipeline.trajectories.blobs import BlobStore
from osworld_pipeline.trajectories.store import TrajectoryStore

__all__ = ["BlobStore", "TrajectoryStore"]
