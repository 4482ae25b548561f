"""Gathers what the HTML report shows: scores from the tables, curves from MLflow."""

from pathlib import Path

from osworld_pipeline.domain.state import StateDir
from osworld_pipeline.recipes import Recipe


def write_report(state: StateDir, recipe: Recipe, *, tracking_uri: str) -> Path:
    raise NotImplementedError
