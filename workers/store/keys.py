"""API keys in Redis: whose they are, what they may do and for how long. Of a key itself only a hash is kept."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from reasoner.base_model import StrictModel
from workers.store.jobs import JobStore
from workers.store.redis_client import BROKER_DOWN

Scope = Literal["jobs:read", "jobs:write", "metrics:read", "admin"]
SCOPES: Final[frozenset[Scope]] = frozenset({"jobs:read", "jobs:write", "metrics:read", "admin"})
"""``admin`` sees the jobs of all owners and manages keys; the other scopes say what may be done."""

MAX_LIFETIME_SECONDS = 10 * 365 * 86_400
Owner = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]
_KEY = re.compile(r"rk_([0-9a-f]{16})_([0-9a-f]{64})")
"""A public part that finds the key, and 256 random bits that prove it: no slow hash is needed for those."""


class NoSuchKey(Exception):
    """There is no key with this id."""


class KeySpec(StrictModel):
    """What a new key is to be."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = Field(description="For people: where the key is used.")
    owner: Owner | None = Field(
        None,
        description="Whose jobs its jobs are; keys of one owner see the same jobs. Without it a key is on its own.",
    )
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=16)] = Field(["jobs:read", "jobs:write"])
    expires_in: Annotated[float, Field(gt=0, le=MAX_LIFETIME_SECONDS)] | None = Field(
        None, description="Seconds that the key is good for; without it until it is revoked."
    )


class Key(StrictModel):
    """A key as the API shows it: never the key itself. Times are seconds since the epoch."""

    id: str
    name: str
    owner: str
    scopes: list[Scope]
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def refusal(self) -> str | None:
        """Why the key is not good any more, if it is not."""
        if self.revoked_at is not None:
            return f"key {self.id} was revoked at {_moment(self.revoked_at)}"
        if self.expires_at is not None and self.expires_at <= time.time():
            return f"key {self.id} expired at {_moment(self.expires_at)}"
        return None


class NewKey(Key):
    """A key that was just made: the only answer that ever holds it."""

    key: str


class KeyStore:
    """The keys beside the jobs of a ``JobStore``."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    async def create(self, spec: KeySpec) -> NewKey:
        """Makes a key."""
        public, secret = secrets.token_hex(8), secrets.token_hex(32)
        now = time.time()
        fields: dict[str, str] = {
            "id": f"key_{public}",
            "name": spec.name,
            "owner": spec.owner or f"key_{public}",
            "scopes": " ".join(sorted(set(spec.scopes))),
            "created": f"{now:.3f}",
            "digest": _digest(secret),
        }
        if spec.expires_in is not None:
            fields["expires"] = f"{now + spec.expires_in:.3f}"
        await self._store.script("key_create", fields["id"], *(part for pair in fields.items() for part in pair))
        return NewKey(**_document(fields), key=f"rk_{public}_{secret}")

    async def has_any(self) -> bool:
        """Whether a key was ever made. A revoked one counts: nothing is opened by revoking the last."""
        return bool(await self._store.command("EXISTS", "reasoner:keys"))

    async def find(self, text: str) -> Key | None:
        """The key that a client sent, which may have expired or been revoked; ``None`` when it is none."""
        found = _KEY.fullmatch(text)
        if found is None:
            return None
        fields = await self._store.command("HGETALL", f"reasoner:key:key_{found[1]}")
        if not hmac.compare_digest(_digest(found[2]), fields.get("digest", "")):
            return None
        return Key(**_document(fields))

    async def get(self, key_id: str) -> Key:
        """Raises ``NoSuchKey``."""
        fields = await self._store.command("HGETALL", f"reasoner:key:{key_id}")
        if not fields:
            raise NoSuchKey(key_id)
        return Key(**_document(fields))

    async def list_keys(self, *, after: str | None, limit: int) -> list[Key]:
        """Newest first, from before the key ``after``. Raises ``NoSuchKey`` when there is none like that."""
        highest = "+inf"
        if after is not None:
            score = await self._store.command("ZSCORE", "reasoner:keys", after)
            if score is None:
                raise NoSuchKey(after)
            highest = f"({score:.0f}"
        ids = await self._store.command("ZREVRANGEBYSCORE", "reasoner:keys", highest, "-inf", "LIMIT", 0, limit)
        return [await self.get(key_id) for key_id in ids]

    async def revoke(self, key_id: str) -> Key:
        """Takes effect with the next request. A second time changes nothing. Raises ``NoSuchKey``."""
        if await self._store.script("key_revoke", key_id) == "gone":
            raise NoSuchKey(key_id)
        return await self.get(key_id)


def has_stored_keys(url: str) -> bool:
    """Whether the broker at ``url`` holds keys. ``False`` while it is away, which opens nothing."""

    async def ask() -> bool:
        store = JobStore(url)
        try:
            return await KeyStore(store).has_any()
        except BROKER_DOWN:
            return False
        finally:
            await store.close()

    return asyncio.run(ask())


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _document(fields: dict[str, str]) -> dict[str, Any]:
    return {
        "id": fields["id"],
        "name": fields["name"],
        "owner": fields["owner"],
        "scopes": fields["scopes"].split(),
        "created_at": float(fields["created"]),
        "expires_at": float(fields["expires"]) if "expires" in fields else None,
        "revoked_at": float(fields["revoked"]) if "revoked" in fields else None,
    }
