"""Checkpoints: their ids, what is registered, those made elsewhere."""
