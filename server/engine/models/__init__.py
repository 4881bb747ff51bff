"""Model families, written for serving, one short file each."""
