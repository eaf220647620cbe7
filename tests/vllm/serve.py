"""Run a command beside a policy and a PRM on vLLM: ``python -m tests.vllm.serve [OPTIONS] COMMAND…``.

The command finds the servers by its environment, and by ``{engine}`` in its words, which is the URL of the policy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm.servers import POLICY, Servers, Vllm, running

_BY_PRIORITY = ("--scheduling-policy", "priority")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the larger bundled policy")
    parser.add_argument("--apart", action="store_true", help="servers on one half of the cores, the command on others")
    parser.add_argument("--priorities", action="store_true", help="the policy's server orders requests by priority")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    model = POLICY.with_name("policy-large") if asked.large else POLICY
    with tempfile.TemporaryDirectory(prefix="reasoner-vllm-") as folder:
        servers = Servers(
            Vllm.policy(Path(folder) / "policy.log", *(_BY_PRIORITY if asked.priorities else ()), model=model),
            Vllm.prm(Path(folder) / "prm.log", last=True),
        )
        if asked.apart:
            os.sched_setaffinity(0, cores[:half])
        with running(servers.policy, servers.last):
            if asked.apart:
                os.sched_setaffinity(0, cores[half:])
            command = [word.replace("{engine}", servers.policy.url) for word in asked.command]
            settings = _name_engine(servers) if asked.priorities else servers.settings
            return subprocess.run(command, env=os.environ | settings, check=False).returncode


def _name_engine(servers: Servers) -> dict[str, str]:
    """Return the environment of a service for which ``reasoner.toml`` would name the policy's server."""
    policy = {
        "url": servers.policy.url,
        "models": ["policy"],
        "tokenizer": str(servers.policy.model),
        "obeys_priorities": True,
    }
    settings = {name: value for name, value in servers.settings.items() if not name.startswith("REASONER_ENGINE")}
    return settings | {"REASONER_ENGINES": json.dumps({"vllm": policy})}


if __name__ == "__main__":
    sys.exit(main())
