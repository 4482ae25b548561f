"""The Dagster jobs, and the commands that run them on this machine."""
