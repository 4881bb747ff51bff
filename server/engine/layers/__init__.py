"""The pieces that models are put together from."""
