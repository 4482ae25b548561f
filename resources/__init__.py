"""Thin Dagster resources, each over one library class."""
