"""Logits processors, the sampler and its counter-based random numbers."""
