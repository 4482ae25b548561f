"""Runs in desktop-env's own Python: uses only the standard library and desktop_env, nothing else of this project."""
