"""Key and certificates that a client presents to its server."""

import os
import ssl

KEY_VARIABLE = "SHMSERVE_KEY"
_MAX_KEY_BYTES = 4096


class Secret(str):
    """Text without a repr: neither debug logs nor reports with local variables show the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(hidden)"


class Credentials:
    """Key for the server, and files for TLS.

    Attributes:
        key: key to send; "": none.
        ca: path of a PEM file with the authorities to trust; "": OpenSSL's, or the file named by
            the environment's SSL_CERT_FILE.
        cert: path of a PEM file with the client's certificate, if the server asks for certificates.
        cert_key: path of a PEM file with the key of `cert`; "": `cert` has both.
    """

    def __init__(
        self,
        key: str | None = None,
        key_file: str | os.PathLike[str] | None = None,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        cert_key: str | os.PathLike[str] | None = None,
    ) -> None:
        """Read the key: `key`, else the file's, else the environment's SHMSERVE_KEY. Raise
        ValueError if the key is malformed or its file cannot be read; the text has no key."""
        if key is None:
            key = _read_key(key_file) if key_file else Secret(os.environ.get(KEY_VARIABLE, ""))
        self.key = key = Secret(key.strip())
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            name = "key_file" if key_file else "key"
            raise ValueError(f"{name}: a key is one word of printable ASCII characters")
        self.ca, self.cert, self.cert_key = (
            os.fspath(path) if path else "" for path in (ca, cert, cert_key)
        )

    def context(self, protocol: str = "http/1.1") -> ssl.SSLContext:
        """Return the context for connections with TLS. `protocol`: name for ALPN. Raise ValueError
        if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as ex:
            raise ValueError(_unusable("ca", self.ca, ex, "a PEM file of certificates")) from None
        if self.cert:
            try:  # without a password here, OpenSSL asks the terminal for an encrypted key's
                context.load_cert_chain(self.cert, self.cert_key or None, password="")
            except OSError as ex:
                where = f"{self.cert}, {self.cert_key}" if self.cert_key else self.cert
                what = "a PEM certificate and its key without a password"
                raise ValueError(_unusable("cert", where, ex, what)) from None
        context.set_alpn_protocols([protocol])
        return context


def _read_key(path: str | os.PathLike[str]) -> Secret:
    try:
        with open(path, encoding="latin-1") as file:  # an error of decoding would have the bytes
            return Secret(file.read(_MAX_KEY_BYTES))
    except OSError as ex:
        raise ValueError(f"key_file: cannot be read: {os.fspath(path)}: {ex.strerror}") from None


def _unusable(name: str, path: str, ex: OSError, expected: str) -> str:
    """Return the sentence for files of TLS that cannot be used."""
    if isinstance(ex, ssl.SSLError):
        return f"{name}: {path} is not {expected}"
    return f"{name}: {path} cannot be read: {ex.strerror}"
