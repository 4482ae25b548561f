"""The commands that run Dagster jobs in their own process, with progress bars: train, evaluate, backfill, collect."""
