"""The image and its compose files, for a container without root on a read-only file system."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernels.cpu.runtime.compile_cache import find_cache
from workers.config.settings import Settings

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
ROLES = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of the Dockerfile, preceded by those of its base stage."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.split()
            found[name] = list(found.get(base, []))
        elif word:
            found[name].append((word, rest))
    return found


STAGES = stages()
SERVICE = STAGES["service"]
ENGINES = ("engine-cpu", "engine-cuda")
ENV = dict(part.split("=", 1) for word, rest in SERVICE if word == "ENV" for part in shlex.split(rest))


def settings() -> set[str]:
    return {f"REASONER_{name.upper()}" for name in Settings.model_fields}


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return the mounted volumes by path."""
    return {target: source for source, target, *_ in (text.split(":") for text in service["volumes"])}


def list_packages(stage: str, command: str) -> set[str]:
    """Return the words of the instructions of a stage that run this command."""
    return {word for name, rest in STAGES[stage] if name == "RUN" and command in rest for word in rest.split()}


def test_the_default_build_is_the_service_and_no_user_is_root() -> None:
    assert list(STAGES)[-1] == "service"
    for stage in ("service", *ENGINES):
        assert [rest for word, rest in STAGES[stage] if word == "ENTRYPOINT"] == ['["reasoner"]']
    for stage in ("service", "test", *ENGINES):
        assert [rest for word, rest in STAGES[stage] if word == "USER"][-1] == "10001:10001"
    assert "--uid 10001" in next(rest for word, rest in SERVICE if word == "RUN")


def test_engines_alone_have_torch_and_the_compiler_that_triton_needs() -> None:
    for stage in ENGINES:
        assert {"gcc", "libc6-dev"} <= list_packages(stage, "apt-get install")
        assert '".[engine,otel]"' in list_packages(stage, "pip install")
    assert "https://download.pytorch.org/whl/cpu" in list_packages("engine-cpu", "pip install")
    assert list_packages("service", "apt-get install") == set()
    assert '".[otel,mcp]"' in list_packages("service", "pip install")


def test_compose_builds_each_role_from_its_target() -> None:
    targets = {name: role["build"]["target"] for name, role in ROLES.items()}
    assert targets == {"engine": "engine-cpu", "worker": "service", "api": "service"}
    assert set(targets.values()) | {"engine-cuda"} <= set(STAGES)
    added = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]["engine"]
    assert added["build"]["target"] == "engine-cuda"


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_a_service_has_a_limit_of_memory_and_a_log_that_is_rotated(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert set(service["logging"]["options"]) == {"max-size", "max-file"}


def test_uploaded_files_outlast_an_api_in_a_volume_owned_by_its_user() -> None:
    api = COMPOSE["services"]["api"]
    folder = api["environment"]["REASONER_FILES_DIR"]
    assert mounts(api)[folder] in COMPOSE["volumes"]
    assert f"install --directory --owner=reasoner --group=reasoner {folder}" in " ".join(
        rest for word, rest in SERVICE if word == "RUN"
    )


def test_the_test_image_has_make_and_runs_its_target() -> None:
    assert any("make" in rest.split() for word, rest in STAGES["test"] if word == "RUN" and "apt-get install" in rest)
    assert [rest for word, rest in STAGES["test"] if word == "CMD"] == ['["make", "test"]']


@pytest.mark.parametrize("name", sorted(ROLES))
def test_a_role_runs_read_only_and_its_variables_are_settings(name: str) -> None:
    role = ROLES[name]
    assert role["read_only"]
    assert role["tmpfs"] == ["/tmp"]
    named = set(role["environment"]) | set(ENV)
    assert {variable for variable in named if variable.startswith("REASONER_")} <= settings()
    assert mounts(role)["/models"] == "./models"
    assert Path(ENV["REASONER_DATA_DIR"]).is_relative_to("/tmp")


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_every_service_has_a_health_check_and_waits_for_a_ready_broker(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["healthcheck"]["test"]
    if "REASONER_REDIS_URL" in service.get("environment", {}):
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_a_restarted_engine_finds_its_kernels_in_a_volume_owned_by_its_user(tmp_path: Path) -> None:
    (made,) = (rest.split() for word, rest in STAGES["engine-cpu"] if word == "RUN" and rest.startswith("useradd"))
    home = made[made.index("--home-dir") + 1]
    assert "--create-home" in made  # a new volume gets its owner from the folder in the image
    volume = mounts(COMPOSE["services"]["engine"])[home]
    assert volume in COMPOSE["volumes"]
    assert Path(ENV["TRITON_CACHE_DIR"]).is_relative_to(home)

    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").touch()  # a file instead of a folder, so that nothing can be written there
    root = {name: value.replace(home, str(tmp_path / "volume")) for name, value in ENV.items()}
    kept = find_cache(root, package)
    assert kept is not None
    assert kept.is_relative_to(tmp_path / "volume")


def test_the_gpu_file_changes_only_the_engine_and_requests_a_gpu() -> None:
    added = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"]
    assert list(added) == ["engine"]
    (device,) = added["engine"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
