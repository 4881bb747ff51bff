"""Attention backends: `torch` is the exact reference and the CPU's, `triton` is CUDA's."""
