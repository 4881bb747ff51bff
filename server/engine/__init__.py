"""The engine process: scheduling, KV cache, models, sampling."""
