"""What lies on disk: where a model is, its configuration, tokenizer and tensor headers. Imports no torch."""
