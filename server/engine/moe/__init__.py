"""Mixture-of-experts backends: `torch` is the exact reference."""
