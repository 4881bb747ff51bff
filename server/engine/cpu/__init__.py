"""Products and decoder layers for x86 CPUs, in C: weights stay in 4 or 8 bits, and a step is one call.

The C files in `source` are compiled for this very machine at the first start, which takes some seconds, and kept in the
user's cache folder.
"""
