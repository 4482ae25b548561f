"""Collection of episodes."""
