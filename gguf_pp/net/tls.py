"""TLS contexts from files: version 1.3 and nothing older, both ends being ours."""

import ssl
from pathlib import Path

from gguf_pp.errors import ConfigError


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """For a worker that shows `cert` (PEM, with its chain), whose private key is `key` (PEM).

    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        # Of an encrypted key nobody could be asked the password.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except OSError as exc:  # of which SSLError is one
        raise ConfigError(
            f"--tls-cert {cert}, --tls-key {key}: {_reason(exc)}",
            hint="both are PEM files, the key is not encrypted and belongs to the certificate",
        ) from exc
    return context


def client_context(ca: Path) -> ssl.SSLContext:
    """For a client that believes what `ca` (PEM) signed, or is, for the name it dials.

    Raises ConfigError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(ca)
    except OSError as exc:
        raise ConfigError(
            f"--tls-ca {ca}: {_reason(exc)}", hint="a PEM file with certificates"
        ) from exc
    return context


def _reason(exc: OSError) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or "no PEM file").replace("_", " ").lower()
    return exc.strerror or str(exc)
