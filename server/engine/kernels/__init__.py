"""Triton kernels that layers and backends share. Its modules import triton: import them only where they are used."""
