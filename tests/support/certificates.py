"""Certificates for servers on this machine, signed by an authority that lives as long as a test."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """The authority's certificate, and the certificate and key of 127.0.0.1 and localhost."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _name("authority of a test")
    here = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = {
        "ca.pem": _begun(authority, authority, authority_key).add_extension(x509.BasicConstraints(True, None), True),
        "cert.pem": _begun(_name("localhost"), authority, key)
        .add_extension(here, False)
        .add_extension(x509.BasicConstraints(False, None), True),
    }
    for name, builder in made.items():
        signed = builder.sign(authority_key, hashes.SHA256())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )  # fmt: skip
    (folder / "key.pem").write_bytes(text)
    return folder / "ca.pem", folder / "cert.pem", folder / "key.pem"


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _begun(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
