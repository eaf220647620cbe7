"""Run a command beside a policy and a PRM on vLLM: ``python -m tests.vllm.serve [--large] COMMAND…``.

``--large``: the policy is the larger bundled one, with ten times the weights. The command finds the servers by its
environment, and by ``{engine}`` in its words, which is the URL of the policy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm.servers import POLICY, Servers, Vllm, running


def main(words: list[str]) -> int:
    model = POLICY
    if words[0] == "--large":
        words, model = words[1:], POLICY.with_name("policy-large")
    with tempfile.TemporaryDirectory(prefix="reasoner-vllm-") as folder:
        servers = Servers(
            Vllm.policy(Path(folder) / "policy.log", model=model), Vllm.prm(Path(folder) / "prm.log", last=True)
        )
        with running(servers.policy, servers.last):
            command = [word.replace("{engine}", servers.policy.url) for word in words]
            return subprocess.run(command, env=os.environ | servers.settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
