"""Importers: demonstrations and attempts made elsewhere, each into a folder of its own under `imports/`, with source
and licence kept. The union build reads these folders as further sources."""

from osworld_pipeline.datasets.importers.folder import ImportOptions, ImportSummary

__all__ = ["ImportOptions", "ImportSummary"]
