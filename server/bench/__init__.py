"""Benchmarks that users run: `outrider bench`."""
