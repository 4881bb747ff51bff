"""Tools for this repository's maintainers and users; not part of the installed package."""
