"""Checkpoints on disk: where they are, what they say about themselves, and their tokenizer. Never imports torch."""
