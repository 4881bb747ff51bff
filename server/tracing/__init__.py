"""A span per request, sent over OTLP. Imported only when an endpoint is given; needs the extra `otel`."""
