"""HTTPS from the files that the settings name."""

from __future__ import annotations

import ssl

from server.config import Settings
from server.errors import UserError


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """What HTTPS needs, None without --ssl-certfile.

    With --ssl-ca-certs only clients with a certificate of one of these authorities get in.

    Raises:
        UserError: a file cannot be read or does not hold what it should.
    """
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    files = f"--ssl-certfile {settings.ssl_certfile}"
    if settings.ssl_keyfile is not None:
        files += f", --ssl-keyfile {settings.ssl_keyfile}"
    try:
        # Without a password of its own OpenSSL would ask at the terminal.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="")
    except OSError as error:
        raise UserError(f"{files}: {_reason(error, 'no certificate with its private key, in PEM')}") from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except OSError as error:
            reason = _reason(error, "no certificates of authorities, in PEM")
            raise UserError(f"--ssl-ca-certs {settings.ssl_ca_certs}: {reason}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _reason(error: OSError, otherwise: str) -> str:
    """What is wrong with a file: `ssl.SSLError` is an OSError whose text means little to most people."""
    if isinstance(error, ssl.SSLError):
        return f"it holds {otherwise} ({error.reason or error})"
    return f"cannot be read: {error.strerror or error}"
