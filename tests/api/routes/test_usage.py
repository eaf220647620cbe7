"""``/v1/usage``: who sees whose tokens and cost."""

from __future__ import annotations

import httpx

from tests.api.conftest import serving
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings, load_settings

ADMIN = "a-key-of-many-characters"


async def test_an_owner_sees_its_own_usage_and_an_admin_that_of_all(settings: Settings) -> None:
    secured = load_settings(redis_url=settings.redis_url, data_dir=settings.data_dir, api_keys=ADMIN)
    async with serving(secured, ScriptedEngine()) as client:

        async def ask(key: str, path: str = "/v1/usage") -> httpx.Response:
            return await client.get(path, headers={"Authorization": f"Bearer {key}"})

        keys = {}
        for owner in ("ann", "bob"):
            made = await client.post(
                "/v1/keys", json={"name": owner, "owner": owner}, headers={"Authorization": f"Bearer {ADMIN}"}
            )
            keys[owner] = made.json()["key"]
            headers = {"Authorization": f"Bearer {keys[owner]}"}
            job = (await client.post("/v1/jobs", json={"problem": "1 + 1?"}, headers=headers)).json()["id"]
            await client.post(f"/v1/jobs/{job}/cancel", headers=headers)
        assert [row["owner"] for row in (await ask(ADMIN)).json()["data"]] == ["ann", "bob"]
        assert [row["owner"] for row in (await ask(keys["bob"])).json()["data"]] == ["bob"]
        for query in ("days=0", "days=101", "day=3"):
            assert (await ask(ADMIN, f"/v1/usage?{query}")).status_code == 422
