"""The trajectory store: Parquet parts and image blobs."""

from osworld_pipeline.store.blobs import BlobStore
from osworld_pipeline.store.trajectories import TrajectoryStore

__all__ = ["BlobStore", "TrajectoryStore"]
