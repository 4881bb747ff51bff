"""Model families, written for serving."""
