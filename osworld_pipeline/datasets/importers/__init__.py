"""Importers: demonstrations and attempts from other systems, each in its own folder under `imports/` with source and
licence. The union build reads these folders as further sources."""

from osworld_pipeline.datasets.importers.folder import ImportOptions, ImportSummary

__all__ = ["ImportOptions", "ImportSummary"]
