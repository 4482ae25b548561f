"""The HTTP APIs of the env server; each implements one client's protocol over the same episodes."""
