"""Outrider: an OpenAI-compatible LLM server whose speculative draft has its own settings."""

__version__ = "0.1.0"
