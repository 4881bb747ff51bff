"""Backends that compute the experts of a mixture-of-experts layer."""
