"""The figures of a program and of its rollout actors, for Prometheus."""
