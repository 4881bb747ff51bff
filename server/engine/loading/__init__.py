"""Weights from files into parameter memory."""
