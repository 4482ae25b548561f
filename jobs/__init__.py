"""The Dagster jobs, with their sensors and schedules."""
