"""``reasoner serve``, ``api``, ``worker`` and ``engine``: the roles, with options of the same names as settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from api.cli.options import Model, expand_options, load_with
from workers.config.model_folders import check_models
from workers.config.settings import Settings
from workers.config.types import ConfigError
from workers.processes.quiet_imports import end_quietly


def _load(values: dict[str, Any]) -> Settings:
    """Load the settings with the options that are given, of which ``adapter`` lists NAME=FOLDER."""
    models: dict[str, dict[str, str]] = {}
    for value in values.pop("adapter") or ():
        name, _, folder = value.partition("=")
        if not (name and folder):
            raise ConfigError(f"--adapter {value!r} must be NAME=FOLDER, such as judge=runs/judge")
        if name in models:
            raise ConfigError(f"--adapter {name}=… is given twice")
        models[name] = {"adapter": folder}
    return load_with(**values, models=models or None)


def _create_option(setting: str, *flags: str) -> Any:
    """Return an option of the same meaning as a setting."""
    name = setting.removeprefix("engine_").replace("_", "-")
    return typer.Option(*(flags or (f"--{name}",)), help=Settings.model_fields[setting].description)


Prm = Annotated[str | None, typer.Option(help="The verifier: a bundled model, a model folder, or NAME=FOLDER.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; one beyond loopback needs API keys.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on.")]


@dataclass(frozen=True, slots=True)
class CommonEngineOptions:
    """Settings of an engine that ``reasoner serve`` has too."""

    engine_threads: Annotated[int | None, _create_option("engine_threads")] = None
    engine_device: Annotated[str | None, _create_option("engine_device")] = None
    engine_kv_dtype: Annotated[str | None, _create_option("engine_kv_dtype")] = None
    engine_gpu_memory_utilization: Annotated[float | None, _create_option("engine_gpu_memory_utilization")] = None
    engine_cache_disk: Annotated[str | None, _create_option("engine_cache_disk")] = None
    engine_cache_disk_gb: Annotated[float | None, _create_option("engine_cache_disk_gb")] = None
    engine_cache_host_gb: Annotated[float | None, _create_option("engine_cache_host_gb")] = None
    draft: Annotated[str | None, _create_option("draft")] = None
    probe: Annotated[str | None, _create_option("probe")] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER",
            help="A LoRA adapter of the model, a folder that PEFT has saved, to serve as a model of its own; several "
            "may be given.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class EngineOptions(CommonEngineOptions):
    """Settings of an engine that are options of ``reasoner engine``."""

    draft_length: Annotated[int | None, _create_option("draft_length")] = None
    engine_dtype: Annotated[str | None, _create_option("engine_dtype")] = None
    engine_kv_tokens: Annotated[int | None, _create_option("engine_kv_tokens")] = None
    engine_state_slots: Annotated[int | None, _create_option("engine_state_slots")] = None
    engine_max_running: Annotated[int | None, _create_option("engine_max_running")] = None
    engine_max_waiting: Annotated[int | None, _create_option("engine_max_waiting")] = None
    engine_step_tokens: Annotated[int | None, _create_option("engine_step_tokens")] = None
    engine_lease_share: Annotated[float | None, _create_option("engine_lease_share")] = None
    engine_lease_seconds: Annotated[float | None, _create_option("engine_lease_seconds")] = None
    engine_deterministic: Annotated[
        bool | None, _create_option("engine_deterministic", "--deterministic/--no-deterministic")
    ] = None
    engine_strict_config: Annotated[
        bool | None, _create_option("engine_strict_config", "--strict-config/--no-strict-config")
    ] = None


@expand_options
def serve(
    engine: CommonEngineOptions, model: Model = None, prm: Prm = None, host: Host = None, port: Port = None
) -> None:
    """Run the API, a worker and an engine on this machine, with an embedded broker unless one is configured."""
    with end_quietly():
        from api.roles.serve import serve as run

    options = asdict(engine)
    settings = _load({"model": model, "prm": prm, "host": host, "port": port, **options})
    given = [name for name, value in options.items() if value not in (None, [])]
    if given and settings.engine_url:
        flags = ", ".join("--" + name.removeprefix("engine_").replace("_", "-") for name in given)
        raise ConfigError(
            f"{flags}: the engines are configured elsewhere (engine_url {', '.join(settings.engine_url)}): "
            "give the option to 'reasoner engine', or leave engine_url out"
        )
    run(settings)


def api(host: Host = None, port: Port = None) -> None:
    """Run the HTTP API alone."""
    with end_quietly():
        from api.roles.serve import run_api

    settings = load_with(host=host, port=port)
    check_models(settings)
    run_api(settings)


def worker(
    queues: Annotated[str | None, _create_option("queues")] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=1024, help="Jobs that it runs at the same time.")] = None,
) -> None:
    """Run a worker alone: it takes jobs from the broker and searches on the engines.

    The priority of a job is its queue: one worker with "--queues interactive" and one with "--queues batch,webhooks"
    keep slots for each.
    """
    with end_quietly():
        from api.roles.serve import run_worker

    settings = load_with(queues=queues, concurrency=slots)
    check_models(settings)
    run_worker(settings)


@expand_options
def engine(
    options: EngineOptions,
    model: Model = None,
    prm: Prm = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Compare the logits of a model (bundled, a folder or a GGUF file) with those of transformers "
            "instead. Exit status 1 if they differ by more than rounding explains.",
        ),
    ] = None,
) -> None:
    """Run an inference engine alone, with the policy and the verifier. It listens on REASONER_ENGINE_URL.

    The default is http://127.0.0.1:8100; http://HOST:PORT and unix:///PATH are possible. Ctrl-C ends it.
    """
    if check is not None:
        if model or prm or any(value not in (None, []) for value in asdict(options).values()):
            raise typer.BadParameter("--check takes no other option: it computes on the CPU")
        with end_quietly():
            from api.roles.check_model import check_model

        check_model(check)
        return
    with end_quietly():
        from api.roles.serve import run_engine

    run_engine(_load({"model": model, "prm": prm, **asdict(options)}))
