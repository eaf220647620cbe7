"""A broker behind TLS: certificates made by openssl, and a server that decrypts and passes everything on."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, as files. Its own authority if ``authority`` is None."""

    file: Path
    key: Path


def make_certificate(folder: Path, name: str, authority: Certificate | None = None) -> Certificate:
    """Make a certificate for ``localhost`` and 127.0.0.1, or for the host ``name`` if that has a dot."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    hosts = f"DNS:{name}" if "." in name else "DNS:localhost,IP:127.0.0.1"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(made.file)]
    if authority is not None:
        command += ["-CA", str(authority.file), "-CAkey", str(authority.key), "-addext", "basicConstraints=CA:FALSE"]
        command += ["-addext", f"subjectAltName={hosts}"]
    subprocess.run(command, check=True, capture_output=True)
    return made


class TlsFront:
    """Listens with TLS on a port of its own and connects each client to a Unix socket."""

    def __init__(self, certificate: Certificate, backend: Path, client_authority: Path | None = None) -> None:
        self.received = b""
        """All that clients sent, decrypted."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate.file, certificate.key)
        if client_authority is not None:
            self._context.verify_mode = ssl.CERT_REQUIRED
            self._context.load_verify_locations(client_authority)
        self._backend = backend
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
            encrypted = self._context.wrap_socket(client, server_side=True)
            server.connect(str(self._backend))
            answers = threading.Thread(target=_copy, args=(server, encrypted), daemon=True)
            answers.start()
            while data := encrypted.recv(65536):
                self.received += data
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
            answers.join()
            encrypted.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tls_front(certificate: Certificate, backend: Path, client_authority: Path | None = None) -> Iterator[TlsFront]:
    """Run a front for the block."""
    front = TlsFront(certificate, backend, client_authority)
    try:
        yield front
    finally:
        front.close()
