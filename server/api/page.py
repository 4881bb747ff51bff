"""Pages that are part of the server: one file each, which loads nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def page_response(name: str) -> Response:
    """The page in `pages/`. It may run its own script, as it was shipped, and ask this server; nothing else."""
    text = files("server.api").joinpath("pages", name).read_text("utf-8")
    scripts = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    )
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Response(text, media_type="text/html", headers={"content-security-policy": policy})
