"""Paged KV cache: block pool, prefix cache, block tables."""
