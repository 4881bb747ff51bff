"""How a requested backend name becomes a backend: the same for attention and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from server.engine.attention.base import Unsupported
from server.errors import UserError


class Resolution(NamedTuple):
    """The outcome of resolving one request."""

    name: str
    why: str
    rejected: list[tuple[str, str]]
    """Candidates that cannot serve, in the order of preference, with the reason."""


def resolve(
    setting: str,
    requested: str | None,
    verdicts: Mapping[str, Unsupported | None],
    aliases: Mapping[str, str],
) -> Resolution:
    """Pick a backend.

    Args:
        setting: how the user names the choice, for errors.
        requested: a name in any case, an alias, "auto", or None when nothing was asked for.
        verdicts: every backend of this build, in order of preference, and whether it can serve the need.
        aliases: other spellings, in lower case.

    Raises:
        UserError: no such backend, the named one cannot serve, or none can.
    """
    rejected = [(name, verdict.reason) for name, verdict in verdicts.items() if verdict is not None]
    able = [name for name, verdict in verdicts.items() if verdict is None]
    would_work = f"what would work: {', '.join(['auto', *able])}" if able else "no backend of this build would work"
    if requested is None or requested.lower() == "auto":
        if not able:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
            raise UserError(f"{setting}: no backend can serve this model ({reasons})")
        why = "the first of the preference order that can serve"
        return Resolution(able[0], why if rejected else "the preferred one", rejected)
    name = aliases.get(requested.lower(), requested.lower())
    if name not in verdicts:
        raise UserError(
            f"{setting}: there is no backend {requested!r} in this build; it has {', '.join(verdicts)}; {would_work}"
        )
    verdict = verdicts[name]
    if verdict is not None:
        raise UserError(f"{setting}: {requested!r} cannot serve this model: {verdict.reason}; {would_work}")
    return Resolution(name, "asked for", rejected)
