"""Checkpoints: what is in them, how they are written while training goes on, and how they are read."""
