"""The library used by the Dagster assets. Only definitions.py imports Dagster."""
