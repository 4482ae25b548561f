"""The server's own API, /v1."""
