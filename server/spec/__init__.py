"""Speculative decoding: the draft's own settings, its setup, the proposers, and what became of the drafts."""
