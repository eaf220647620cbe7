"""Workers and the API start quickly because they import no model code."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({"torch", "transformers", "triton"} & set(sys.modules)))
"""


@pytest.mark.parametrize("package", ["api", "workers"])
def test_no_module_of_the_package_loads_torch(package: str) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, package], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stderr
