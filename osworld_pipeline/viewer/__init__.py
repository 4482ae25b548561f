"""The trajectory viewer: a small web server over the store, read-only, for people who want to see what a policy did."""

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8765
MLFLOW_URL = "http://127.0.0.1:5000"
DAGSTER_URL = "http://127.0.0.1:3000"
"""Where people see them."""
