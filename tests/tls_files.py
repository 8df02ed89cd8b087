"""Certificates for tests, made with openssl: an authority and certificates signed by it."""

import subprocess
from pathlib import Path


def make_certificates(folder: Path, *names: str) -> Path:
    """In `folder`: ca.pem, and for each name NAME.pem and NAME.key. Returns the folder."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 insists
    openssl(
        *("req", "-x509", *key, *authority, "-keyout", "ca.key", "-out", "ca.pem"),
        *("-subj", "/CN=ca"),
    )
    extensions = ("subjectAltName=DNS:localhost,IP:127.0.0.1", "authorityKeyIdentifier=keyid")
    (folder / "ext").write_text("\n".join(extensions) + "\n")
    for name in names:
        openssl(
            "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-extfile", "ext", "-out", f"{name}.pem"),
        )
    return folder
