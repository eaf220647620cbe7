"""Run a command beside a policy and a PRM on vLLM: ``python -m tests.vllm.serve COMMAND…``.

The command finds them by its environment, and by ``{engine}`` in its words, which is the URL of the policy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.vllm.servers import Servers, Vllm, running


def main(words: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="reasoner-vllm-") as folder:
        servers = Servers(Vllm.policy(Path(folder) / "policy.log"), Vllm.prm(Path(folder) / "prm.log", last=True))
        with running(servers.policy, servers.last):
            command = [word.replace("{engine}", servers.policy.url) for word in words]
            return subprocess.run(command, env=os.environ | servers.settings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
