"""Static files of the dashboard: access, caching, and no content from other hosts."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import httpx

from api.routes.pages import DASHBOARD, DOCS
from tests.api.conftest import serving
from tests.scripted import ScriptedEngine
from workers.config.settings import Settings, load_settings


async def test_the_page_and_all_its_files_are_served_without_a_key(settings: Settings) -> None:
    locked = settings.model_copy(update={"api_keys": ("0123456789abcdef",)})
    locked = Settings.model_validate(locked.model_dump())
    async with serving(locked, ScriptedEngine()) as client:
        assert (await client.get("/v1/jobs")).status_code == 401
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        todo, seen = [f"/{path}" for path in named if path.startswith("dashboard/")], set[str]()
        while todo:
            path = todo.pop()
            if path in seen:
                continue
            seen.add(path)
            answer = await client.get(path)
            assert answer.status_code == 200, path
            if path.endswith(".js"):
                assert answer.headers["content-type"].startswith("text/javascript")
                todo += [urljoin(path, name) for name in re.findall(r'from "([^"]+)"', answer.text)]
        files = {path.relative_to(DASHBOARD) for path in DASHBOARD.rglob("*") if path.is_file()}
        assert {name.removeprefix("/dashboard/") for name in seen} == {str(path) for path in files} - {"index.html"}


async def test_unchanged_files_get_304(client: httpx.AsyncClient) -> None:
    first = await client.get("/dashboard/page.css")
    assert first.headers["cache-control"] == "no-cache"
    again = await client.get("/dashboard/page.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/dashboard/page.css", headers={"If-None-Match": '"other"'})
    assert (other.status_code, other.content) == (200, first.content)


async def test_no_other_files_are_served(client: httpx.AsyncClient) -> None:
    for path in ("/dashboard/", "/dashboard/none.js", "/dashboard/../app.py", "/dashboard/%2e%2e/app.py"):
        assert (await client.get(path)).status_code == 404, path


async def test_the_page_has_no_external_and_no_inline_scripts(client: httpx.AsyncClient) -> None:
    policy = (await client.get("/")).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for path in (path for path in DASHBOARD.rglob("*") if path.is_file()):
        text = path.read_text()
        hosts = set(re.findall(r"https?://[^\s\"')]+", text)) - {"https://…"}  # of a field's placeholder
        assert hosts <= {"http://www.w3.org/2000/svg"}, path
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    page = (DASHBOARD / "index.html").read_text()
    assert not re.findall(r"\sstyle=|\son\w+=|<script>|<style", page)


async def test_the_documentation_is_served_locally_without_a_key(settings: Settings) -> None:
    locked = load_settings(redis_url=settings.redis_url, api_keys="0123456789abcdef")
    async with serving(locked, ScriptedEngine()) as client:
        page = await client.get("/docs")
        named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert not [path for path in named if re.match(r"/|\w+:", path)]  # so that they work below any path
        for path in named:
            assert (await client.get(urljoin("/docs", path))).status_code == 200, path
        policy = page.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert not re.findall("unsafe|http|script-src|style-src", policy)
    assert {"LICENSE.txt", "NOTICE.txt", "swagger-ui-bundle.js.LICENSE.txt"} <= {
        path.name for path in (DOCS / "swagger_ui").iterdir()
    }
