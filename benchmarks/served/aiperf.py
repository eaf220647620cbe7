"""AIPerf: one run at one load, and what it exports."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.process import BenchError
from benchmarks.served.servers import MODEL, place

INPUT_TOKENS, OUTPUT_TOKENS = 256, 64
SAMPLING = {"ignore_eos": True, "temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
EXPORT = "profile_export_aiperf.json"
_PROMPTS = 400
"""More than any level takes: a prompt that comes again would be in a cache of prefixes."""
_WARM_UPS = 2
_MORE_SECONDS = 240.0
"""Time that a run may take beside the measurement: the tool's start, the warm-up and the last answers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a good request meets, in ms: the time to its first token, and its mean time for each further one."""

    first_ms: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class Level:
    """What AIPerf reports about one server at one load. Times in ms, rates in 1/s."""

    server: str
    streams: int
    requests: int
    """Those that were answered; the figures below are theirs."""
    failed: int
    first_p50: float
    first_p99: float
    token_p50: float
    token_p99: float
    tokens_per_second: float
    goodput: float
    good_share: float
    prompt_tokens: float
    """Mean number that the server counts."""


@dataclass(frozen=True, slots=True)
class Tool:
    """The program, and what all its runs share."""

    program: Path
    tokenizer: Path
    seconds: int
    """Duration of a level; requests that are running at its end are awaited and count."""
    limits: Limits
    cores: Collection[int]

    def drive(self, server: str, url: str, streams: int, folder: Path) -> Level:
        """Return the figures of ``streams`` requests at once. Raises ``BenchError`` if the tool or a request fails."""
        try:
            with place(self.cores):
                ended = subprocess.run(
                    [str(self.program), "profile", *self._options(url, streams, folder)],
                    cwd=folder,
                    env=os.environ | {"NO_PROXY": "*"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=self.seconds + _MORE_SECONDS,
                    check=False,
                )
        except OSError as error:
            raise BenchError(f"AIPerf cannot be started: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"AIPerf did not end at {streams} streams of {server}") from error
        if ended.returncode != 0 or not (folder / EXPORT).exists():
            output = ended.stdout + ended.stderr
            raise BenchError(f"AIPerf failed at {streams} streams of {server}:\n{output[-2000:]}")
        return read_export(json.loads((folder / EXPORT).read_text()), server, streams)

    def find_version(self) -> str:
        """Return the tool's version. Raises ``BenchError`` if it does not run."""
        try:
            asked = [str(self.program), "--version"]
            return subprocess.run(
                asked, capture_output=True, text=True, timeout=_MORE_SECONDS, check=True
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            raise BenchError(f"AIPerf cannot be started: {error}") from error

    def _options(self, url: str, streams: int, folder: Path) -> list[str]:
        values = {
            "model": MODEL,
            "url": url,
            "endpoint-type": "completions",
            "tokenizer": str(self.tokenizer),
            "concurrency": str(streams),
            "isl": str(INPUT_TOKENS),
            "isl-stddev": "0",
            "osl": str(OUTPUT_TOKENS),
            "osl-stddev": "0",
            "extra-inputs": json.dumps(SAMPLING),
            "warmup-request-count": str(_WARM_UPS),
            "benchmark-duration": str(self.seconds),
            "num-dataset-entries": str(_PROMPTS),
            # The same prompts for all servers, and others at each level.
            "random-seed": str(streams),
            "goodput": f"time_to_first_token:{self.limits.first_ms:g} inter_token_latency:{self.limits.token_ms:g}",
            # llama-server closes one now and then that the tool is about to use again.
            "connection-reuse-strategy": "never",
            "workers-max": "1",
            "record-processors": "1",
            "artifact-dir": str(folder),
            "ui": "none",
        }
        given = [part for name, value in values.items() for part in (f"--{name}", value)]
        return [*given, "--streaming", "--use-server-token-count", "--no-server-metrics", "--no-gpu-telemetry"]


def read_export(export: dict[str, Any], server: str, streams: int) -> Level:
    """Return the figures of an export. Raises ``BenchError`` if answers have another length."""
    length = export["output_sequence_length"]
    if not length["min"] == length["max"] == OUTPUT_TOKENS:
        raise BenchError(
            f"answers have {length['min']:g} to {length['max']:g} tokens at {streams} streams of {server}, "
            f"not {OUTPUT_TOKENS}"
        )
    first, token = export["time_to_first_token"], export["inter_token_latency"]
    return Level(
        server=server,
        streams=streams,
        requests=int(export["request_count"]["avg"]),
        failed=sum(error["count"] for error in export["error_summary"]),
        first_p50=first["p50"],
        first_p99=first["p99"],
        token_p50=token["p50"],
        token_p99=token["p99"],
        tokens_per_second=export["output_token_throughput"]["avg"],
        goodput=export["goodput"]["avg"],
        good_share=export["good_request_fraction"]["avg"],
        prompt_tokens=export["input_sequence_length"]["avg"],
    )
