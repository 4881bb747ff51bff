"""Models to try the server with, made from the embedded one."""
