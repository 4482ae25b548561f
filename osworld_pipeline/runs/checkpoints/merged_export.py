"""Exports an adapter checkpoint as a plain Hugging Face folder, with the rounding error of the merge."""

from dataclasses import dataclass
from pathlib import Path

from osworld_pipeline.datasets.exporters.folder import export_folder, write_manifest
from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.runs.checkpoints.registry import register_checkpoint

LARGE_ERROR = 0.01
"""A larger rounding error causes a warning."""


@dataclass(frozen=True, kw_only=True)
class MergedExport:
    source: Path
    dtype: str
    rounding_error: float
    num_layers: int

    @property
    def is_far_off(self) -> bool:
        return self.rounding_error > LARGE_ERROR


def export_merged(state: StateDir, checkpoint: str, output: Path, *, dtype: str, replace: bool) -> MergedExport:
    """`checkpoint`: a folder, or the id of a checkpoint in the state folder.

    Raises:
        TableError: there is no such checkpoint.
        StoreError: it has no adapter, its base is missing or differs, or `output` exists already or cannot be written.
    """
    from osworld_pipeline.training.weights.merging import write_merged
    from osworld_pipeline.training.weights.weights_digest import weights_digest

    source = Path(checkpoint).expanduser()
    if not source.is_dir():
        source = state.root / register_checkpoint(state, checkpoint).path
    with export_folder(output, replace=replace) as temp:
        merged = write_merged(source, temp, dtype=dtype)
        content = {
            "checkpoint": source.name,
            "weights_digest": weights_digest(source),
            "base_digest": merged.base_digest,
            "dtype": dtype,
            "rounding_error": merged.rounding_error,
        }
        write_manifest(temp, "merged", content)
    return MergedExport(source=source, dtype=dtype, rounding_error=merged.rounding_error, num_layers=merged.num_layers)
