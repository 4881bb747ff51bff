"""Trains drafts for speculative decoding: EAGLE-3 heads and MTP layers. See README.md."""
