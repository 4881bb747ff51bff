"""Attention backends: `torch` is the exact reference."""
