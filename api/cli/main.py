"""The command line. Exit status: 0 success, 1 failure, 2 wrong usage, 128 + signal number (Ctrl-C: 130) interrupted."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer

from api.cli import batch, bench, calibrate, demo, eval, jobs, keys, quantize
from api.cli import prm as cli_prm
from reasoner.client import ServiceError
from workers.config.model_folders import check_models
from workers.config.settings import Settings, load_settings
from workers.config.types import ConfigError
from workers.processes.children import StartError
from workers.processes.shutdown import interruptible

app = typer.Typer(
    name="reasoner",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("solve", context_settings=jobs.EXTRA)(jobs.solve)
app.command("eval")(eval.evaluate_suite)
app.command("calibrate")(calibrate.calibrate_suite)
app.command("quantize")(quantize.quantize)
app.command("demo")(demo.demo)
app.add_typer(jobs.jobs, name="jobs", help="Submit, list, show, watch and cancel jobs of a running service.")
app.add_typer(
    batch.batch, name="batch", help="Submit, list, show, watch and cancel batches: many problems under one budget."
)
app.add_typer(keys.keys, name="keys", help="Make, list and revoke the API keys of a service.")
app.add_typer(cli_prm.prm, name="prm")
app.add_typer(bench.bench, name="bench")

Model = Annotated[str | None, typer.Option(help="A bundled model, a model folder, or NAME=FOLDER.")]
Prm = Annotated[str | None, typer.Option(help="The verifier: a bundled model, a model folder, or NAME=FOLDER.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; one beyond loopback needs API keys.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on.")]


def _option(setting: str) -> Any:
    return typer.Option(help=Settings.model_fields[setting].description)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"reasoner {version('reasoner')}")
        raise typer.Exit


@app.callback()
def options(
    shows_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reasoner: better answers from the model that you have, by searching longer, within a budget."""


def main() -> None:
    """Entry point. Errors of the configuration, the service and files become one line, without a traceback.

    Ctrl-C ends every command with status 130: no command swallows it.
    """
    try:
        with interruptible():
            app()
    except ConfigError as error:
        print(f"reasoner: {error}", file=sys.stderr)
        sys.exit(2)
    except StartError as error:
        print(f"reasoner: {error}", file=sys.stderr)
        sys.exit(1)
    except ServiceError as error:
        hint = " (--key, REASONER_API_KEY)" if error.status == 401 else ""
        print(f"reasoner: {error}{hint}", file=sys.stderr)
        sys.exit(2 if error.status == 422 else 1)
    except OSError as error:
        if error.filename is None:
            raise
        print(f"reasoner: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)


@app.command()
def serve(
    model: Model = None,
    prm: Prm = None,
    host: Host = None,
    port: Port = None,
    threads: Annotated[int | None, _option("engine_threads")] = None,
    device: Annotated[str | None, _option("engine_device")] = None,
    kv_dtype: Annotated[str | None, _option("engine_kv_dtype")] = None,
    draft: Annotated[str | None, _option("draft")] = None,
) -> None:
    """Run the API, a worker and an engine on this machine, with an embedded broker unless one is configured."""
    from api.roles.serve import serve as run

    engine_options = {"threads": threads, "device": device, "kv_dtype": kv_dtype, "draft": draft}
    settings = _settings(
        model=model,
        prm=prm,
        host=host,
        port=port,
        engine_threads=threads,
        engine_device=device,
        engine_kv_dtype=kv_dtype,
        draft=draft,
    )
    given = [f"--{name.replace('_', '-')}" for name, value in engine_options.items() if value is not None]
    if given and settings.engine_url:
        raise ConfigError(
            f"{', '.join(given)}: the engines are configured elsewhere (engine_url {', '.join(settings.engine_url)}): "
            "give the option to 'reasoner engine', or leave engine_url out"
        )
    run(settings)


@app.command()
def api(host: Host = None, port: Port = None) -> None:
    """Run the HTTP API alone."""
    from api.roles.serve import run_api

    settings = _settings(host=host, port=port)
    check_models(settings)
    run_api(settings)


@app.command()
def worker(
    queues: Annotated[str | None, _option("queues")] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=1024, help="Jobs that it runs at the same time.")] = None,
) -> None:
    """Run a worker alone: it takes jobs from the broker and searches on the engines.

    The priority of a job is its queue: one worker with "--queues interactive" and one with "--queues batch,webhooks"
    keep slots for each.
    """
    from api.roles.serve import run_worker

    settings = _settings(queues=queues, concurrency=slots)
    check_models(settings)
    run_worker(settings)


@app.command()
def engine(
    model: Model = None,
    prm: Prm = None,
    kv_tokens: Annotated[int | None, _option("engine_kv_tokens")] = None,
    max_running: Annotated[int | None, _option("engine_max_running")] = None,
    max_waiting: Annotated[int | None, _option("engine_max_waiting")] = None,
    step_tokens: Annotated[int | None, _option("engine_step_tokens")] = None,
    threads: Annotated[int | None, _option("engine_threads")] = None,
    lease_share: Annotated[float | None, _option("engine_lease_share")] = None,
    lease_seconds: Annotated[float | None, _option("engine_lease_seconds")] = None,
    device: Annotated[str | None, _option("engine_device")] = None,
    dtype: Annotated[str | None, _option("engine_dtype")] = None,
    kv_dtype: Annotated[str | None, _option("engine_kv_dtype")] = None,
    draft: Annotated[str | None, _option("draft")] = None,
    draft_length: Annotated[int | None, _option("draft_length")] = None,
    deterministic: Annotated[bool | None, _option("engine_deterministic")] = None,
) -> None:
    """Run an inference engine alone, with the policy and the verifier. It listens on REASONER_ENGINE_URL.

    The default is http://127.0.0.1:8100; http://HOST:PORT and unix:///PATH are possible. Ctrl-C ends it.
    """
    from api.roles.serve import run_engine

    run_engine(
        _settings(
            model=model,
            prm=prm,
            engine_kv_tokens=kv_tokens,
            engine_max_running=max_running,
            engine_max_waiting=max_waiting,
            engine_step_tokens=step_tokens,
            engine_threads=threads,
            engine_lease_share=lease_share,
            engine_lease_seconds=lease_seconds,
            engine_device=device,
            engine_dtype=dtype,
            engine_kv_dtype=kv_dtype,
            draft=draft,
            draft_length=draft_length,
            engine_deterministic=deterministic,
        )
    )


def _settings(**overrides: object) -> Settings:
    return load_settings(**{name: value for name, value in overrides.items() if value is not None})


if __name__ == "__main__":
    main()
