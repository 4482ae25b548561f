"""Model, loss, advantages, updates and checkpoints. Needs torch and transformers, except for modules that say so."""
