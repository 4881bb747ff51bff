"""Every metric name, and collectors fed by plain stats structs."""
