"""Upkeep of a state folder, and what must hold of it."""
