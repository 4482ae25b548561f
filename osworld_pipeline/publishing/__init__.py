"""Publishes to a Hugging Face hub: datasets, checkpoints and results, each with a card that states licences, hashes and
lineage."""
