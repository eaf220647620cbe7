"""The command line. Exit status: 0 success, 1 failure, 2 wrong usage, 128 + signal number (Ctrl-C: 130) interrupted."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Annotated, Any

import typer

from api.cli import batch, bench, calibrate, demo, eval, jobs, keys, quantize, select
from api.cli import prm as cli_prm
from api.cli.job_options import EXTRA
from api.cli.options import Model, expand_options, load_with
from reasoner.client import ServiceError
from reasoner.evaluation.suites.gym import PREFIX as GYM_PREFIX
from workers.config.model_folders import check_models
from workers.config.settings import Settings
from workers.config.types import ConfigError
from workers.processes.children import StartError
from workers.processes.shutdown import interruptible

app = typer.Typer(name="reasoner", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
app.command("solve", context_settings=EXTRA)(jobs.solve)
app.command("select")(select.select)
app.command("eval")(eval.evaluate_suite)
app.command("calibrate")(calibrate.calibrate_suite)
app.command("models")(jobs.list_models)
app.command("quantize")(quantize.quantize)
app.command("demo")(demo.demo)
app.add_typer(jobs.jobs, name="jobs", help="Submit, list, show, watch and cancel jobs of a running service.")
app.add_typer(
    batch.batch, name="batch", help="Submit, list, show, watch and cancel batches: many problems under one budget."
)
app.add_typer(keys.keys, name="keys", help="Make, list and revoke the API keys of a service.")
app.add_typer(cli_prm.prm, name="prm")
app.add_typer(bench.bench, name="bench")


def _option(setting: str, *flags: str) -> Any:
    """Return an option of the same meaning as a setting."""
    name = setting.removeprefix("engine_").replace("_", "-")
    return typer.Option(*(flags or (f"--{name}",)), help=Settings.model_fields[setting].description)


Prm = Annotated[str | None, typer.Option(help="The verifier: a bundled model, a model folder, or NAME=FOLDER.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; one beyond loopback needs API keys.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on.")]


@dataclass(frozen=True, slots=True)
class CommonEngineOptions:
    """Settings of an engine that ``reasoner serve`` has too."""

    engine_threads: Annotated[int | None, _option("engine_threads")] = None
    engine_device: Annotated[str | None, _option("engine_device")] = None
    engine_kv_dtype: Annotated[str | None, _option("engine_kv_dtype")] = None
    engine_gpu_memory_utilization: Annotated[float | None, _option("engine_gpu_memory_utilization")] = None
    draft: Annotated[str | None, _option("draft")] = None
    probe: Annotated[str | None, _option("probe")] = None


@dataclass(frozen=True, slots=True)
class EngineOptions(CommonEngineOptions):
    """Settings of an engine that are options of ``reasoner engine``."""

    draft_length: Annotated[int | None, _option("draft_length")] = None
    engine_dtype: Annotated[str | None, _option("engine_dtype")] = None
    engine_kv_tokens: Annotated[int | None, _option("engine_kv_tokens")] = None
    engine_max_running: Annotated[int | None, _option("engine_max_running")] = None
    engine_max_waiting: Annotated[int | None, _option("engine_max_waiting")] = None
    engine_step_tokens: Annotated[int | None, _option("engine_step_tokens")] = None
    engine_lease_share: Annotated[float | None, _option("engine_lease_share")] = None
    engine_lease_seconds: Annotated[float | None, _option("engine_lease_seconds")] = None
    engine_deterministic: Annotated[
        bool | None, _option("engine_deterministic", "--deterministic/--no-deterministic")
    ] = None
    engine_strict_config: Annotated[
        bool | None, _option("engine_strict_config", "--strict-config/--no-strict-config")
    ] = None


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
    _fix_hash_order()
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
    finally:
        _forget_interrupted_exec()


def _forget_interrupted_exec() -> None:
    """Keep the interpreter from ending by SIGINT, although the Ctrl-C was handled and the status is set.

    It does so if the last ``exec`` of a text was interrupted, as dataclasses run one for each class of an import.
    """
    exec("")


def _fix_hash_order() -> None:
    """Start this process again with fixed hashes, if it is to make problems of reasoning-gym.

    Some of its tasks draw from sets of texts, so that every process would have other problems for the same seed.
    """
    if sys.flags.hash_randomization and any(argument.startswith(GYM_PREFIX) for argument in sys.argv):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


@app.command()
@expand_options
def serve(
    engine: CommonEngineOptions, model: Model = None, prm: Prm = None, host: Host = None, port: Port = None
) -> None:
    """Run the API, a worker and an engine on this machine, with an embedded broker unless one is configured."""
    from api.roles.serve import serve as run

    options = asdict(engine)
    settings = load_with(model=model, prm=prm, host=host, port=port, **options)
    given = [name for name, value in options.items() if value is not None]
    if given and settings.engine_url:
        flags = ", ".join("--" + name.removeprefix("engine_").replace("_", "-") for name in given)
        raise ConfigError(
            f"{flags}: the engines are configured elsewhere (engine_url {', '.join(settings.engine_url)}): "
            "give the option to 'reasoner engine', or leave engine_url out"
        )
    run(settings)


@app.command()
def api(host: Host = None, port: Port = None) -> None:
    """Run the HTTP API alone."""
    from api.roles.serve import run_api

    settings = load_with(host=host, port=port)
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

    settings = load_with(queues=queues, concurrency=slots)
    check_models(settings)
    run_worker(settings)


@app.command()
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
        if model or prm or any(value is not None for value in asdict(options).values()):
            raise typer.BadParameter("--check takes no other option: it computes on the CPU")
        from api.roles.check_model import check_model

        check_model(check)
        return
    from api.roles.serve import run_engine

    run_engine(load_with(model=model, prm=prm, **asdict(options)))


if __name__ == "__main__":
    main()
