"""Quantised weights: how checkpoints store them, and which modules of a checkpoint are stored so."""
