# SPDX-License-Identifier: MIT OR Apache-2.0
"""Certificates for TLS on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

__all__ = ["certificates"]


def certificates(directory: Path) -> dict[str, Path]:
    """Writes an authority's certificate, and a certificate and key that the authority issued."""
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "leaf")}
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")])
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: x509.Name, key: str, extension: x509.ExtensionType) -> bytes:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(authority)
        builder = builder.public_key(keys[key].public_key()).serial_number(
            x509.random_serial_number()
        )
        builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(
            now + datetime.timedelta(1)
        )
        builder = builder.add_extension(extension, critical=True)
        return builder.sign(keys["ca"], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    leaf = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    texts = {
        "ca": certificate(authority, "ca", x509.BasicConstraints(ca=True, path_length=None)),
        "cert": certificate(x509.Name([]), "leaf", leaf),
        "key": keys["leaf"].private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    }
    for name, text in texts.items():
        (directory / f"{name}.pem").write_bytes(text)
    return {name: directory / f"{name}.pem" for name in texts}
