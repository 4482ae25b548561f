"""The trajectory viewer: a small read-only web server over the store, for people who inspect episodes."""

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8765
MLFLOW_URL = "http://127.0.0.1:5000"
DAGSTER_URL = "http://127.0.0.1:3000"
"""Default addresses for links."""
