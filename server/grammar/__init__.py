"""Grammars that bind answers: how they are compiled, and within which limits. Both processes use it."""
