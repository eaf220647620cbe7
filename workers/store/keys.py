"""API keys in Redis, with their owners, scopes and expiry. Only a hash of each key is stored."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import secrets
import time
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from reasoner.base_model import StrictModel
from workers.store.broker_errors import BROKER_DOWN
from workers.store.jobs import JobStore

Scope = Literal["jobs:read", "jobs:write", "metrics:read", "admin"]
SCOPES: Final[frozenset[Scope]] = frozenset({"jobs:read", "jobs:write", "metrics:read", "admin"})
"""``admin`` sees the jobs of all owners and manages keys; the other scopes allow single actions."""

MAX_LIFETIME_SECONDS = 10 * 365 * 86_400
Owner = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
ModelWord = Annotated[str, Field(min_length=1, max_length=256)]
_KEY = re.compile(r"rk_([0-9a-f]{16})_([0-9a-f]{64})")
"""A public part that identifies the key, and 256 random bits of secret, which need no slow hash."""


class NoSuchKey(Exception):
    """There is no key with this id."""


class KeySpec(StrictModel):
    """Properties of a new key."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="For people: where the key is used.")
    owner: Owner | None = Field(
        None,
        description="Whose jobs its jobs are; keys of one owner see the same jobs. Without it a key is on its own.",
    )
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=16)] = Field(["jobs:read", "jobs:write"])
    models: Annotated[list[ModelWord], Field(min_length=1, max_length=64)] | None = Field(
        None, description="The names and models that its jobs may give as a model; without them all."
    )
    expires_in: Annotated[float, Field(gt=0, le=MAX_LIFETIME_SECONDS)] | None = Field(
        None, description="Seconds that the key is good for; without it until it is revoked."
    )


class Key(StrictModel):
    """A key in the API's format, without its secret. Times are in seconds since the epoch."""

    id: str
    name: str
    owner: str
    scopes: list[Scope]
    models: list[str] | None = None
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def refusal(self) -> str | None:
        """Return why the key is no longer valid; ``None`` if it is valid."""
        if self.revoked_at is not None:
            return f"key {self.id} was revoked at {_format_time(self.revoked_at)}"
        if self.expires_at is not None and self.expires_at <= time.time():
            return f"key {self.id} expired at {_format_time(self.expires_at)}"
        return None


class NewKey(Key):
    """A new key: the only response that contains the key itself."""

    key: str


class KeyStore:
    """The API keys in the database of a ``JobStore``."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def create(self, spec: KeySpec) -> NewKey:
        """Create a key."""
        public, secret = secrets.token_hex(8), secrets.token_hex(32)
        now = time.time()
        fields: dict[str, str] = {
            "id": f"key_{public}",
            "name": spec.name,
            "owner": spec.owner or f"key_{public}",
            "scopes": " ".join(sorted(set(spec.scopes))),
            "created": f"{now:.3f}",
            "digest": _hash_secret(secret),
        }
        if spec.models is not None:
            fields["models"] = json.dumps(spec.models)
        if spec.expires_in is not None:
            fields["expires"] = f"{now + spec.expires_in:.3f}"
        await self._store.script("key_create", fields["id"], *(part for pair in fields.items() for part in pair))
        return NewKey(**_build_document(fields), key=f"rk_{public}_{secret}")

    async def has_any(self) -> bool:
        """Return True if any key was ever created, even if all are revoked: revoking the last key must not allow
        access.
        """
        return bool(await self._store.command("EXISTS", "reasoner:keys"))

    async def find(self, text: str) -> Key | None:
        """Return the key sent by a client, even if it has expired or was revoked; ``None`` if it is not valid."""
        match = _KEY.fullmatch(text)
        if match is None:
            return None
        fields = await self._store.command("HGETALL", f"reasoner:key:key_{match[1]}")
        if not hmac.compare_digest(_hash_secret(match[2]), fields.get("digest", "")):
            return None
        return Key(**_build_document(fields))

    async def get(self, key_id: str) -> Key:
        """Return the key. Raises ``NoSuchKey``."""
        fields = await self._store.command("HGETALL", f"reasoner:key:{key_id}")
        if not fields:
            raise NoSuchKey(key_id)
        return Key(**_build_document(fields))

    async def list_keys(self, *, after: str | None, limit: int) -> list[Key]:
        """Return keys from newest to oldest, beginning behind ``after``. Raises ``NoSuchKey`` without that key."""
        ids = await self._store.list_ids("reasoner:keys", after, limit)
        if ids is None:
            raise NoSuchKey(after)
        return [await self.get(key_id) for key_id in ids]

    async def revoke(self, key_id: str) -> Key:
        """Revoke a key from the next request on; one that is revoked stays as it is. Raises ``NoSuchKey``."""
        if await self._store.script("key_revoke", key_id) == "gone":
            raise NoSuchKey(key_id)
        return await self.get(key_id)


def has_stored_keys(url: str) -> bool:
    """Return True if the broker at ``url`` holds keys. While it is away, return False, which allows no access."""

    async def ask() -> bool:
        store = JobStore(url)
        try:
            return await KeyStore(store).has_any()
        except BROKER_DOWN:
            return False
        finally:
            await store.close()

    return asyncio.run(ask())


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _format_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _build_document(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "id": fields["id"],
        "name": fields["name"],
        "owner": fields["owner"],
        "scopes": fields["scopes"].split(),
        "models": json.loads(fields["models"]) if "models" in fields else None,
        "created_at": float(fields["created"]),
        "expires_at": float(fields["expires"]) if "expires" in fields else None,
        "revoked_at": float(fields["revoked"]) if "revoked" in fields else None,
    }
