"""Addresses of servers in messages."""

from __future__ import annotations

from urllib.parse import urlsplit


def hide_login(url: str) -> str:
    """Return the URL without a user's name and password, for messages, logs and metrics."""
    login, at, _ = urlsplit(url).netloc.rpartition("@")
    return url.replace(login + at, "", 1)
