"""Warm desktops: the pool, its replicas, and the waiting line."""
