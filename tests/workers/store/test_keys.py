"""API keys in the store, on a real server."""

from __future__ import annotations

import asyncio
import hashlib

from workers.store.jobs import JobStore
from workers.store.keys import KeySpec, KeyStore, has_stored_keys


async def test_a_key_is_found_only_with_its_secret(store: JobStore) -> None:
    keys = KeyStore(store)
    made, other = await keys.create(KeySpec(name="a", owner="ann")), await keys.create(KeySpec(name="b"))
    _, public, secret = made.key.split("_")
    found = await keys.find(made.key)
    assert found is not None
    assert (found.id, found.owner) == (f"key_{public}", "ann")
    assert await store.command("HGET", f"reasoner:key:key_{public}", "digest") == (
        hashlib.sha256(secret.encode()).hexdigest()
    )
    for text in (f"rk_{public}_{other.key.split('_')[2]}", f"{made.key}0", made.key.upper(), made.key + "\n", ""):
        assert await keys.find(text) is None


async def test_concurrent_revocations_return_one_time(store: JobStore) -> None:
    keys = KeyStore(store)
    made = await keys.create(KeySpec(name="a"))
    revoked = await asyncio.gather(*(keys.revoke(made.id) for _ in range(5)))
    assert len({key.revoked_at for key in revoked}) == 1
    assert (await keys.revoke(made.id)).revoked_at == revoked[0].revoked_at is not None


def test_revoked_keys_count_as_stored_and_none_are_reported_while_the_store_is_away(url: str) -> None:
    assert not has_stored_keys(url)

    async def make() -> None:
        store = JobStore(url)
        made = await KeyStore(store).create(KeySpec(name="a"))
        await KeyStore(store).revoke(made.id)
        await store.close()

    asyncio.run(make())
    assert has_stored_keys(url)
    assert not has_stored_keys("unix:///nowhere.sock")
