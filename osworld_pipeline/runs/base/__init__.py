"""The base checkpoint."""
