"""Variables of the environment that look like settings and are none: a misspelt one would be ignored in silence."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from workers.config.explain import CONFIG_FILE
from workers.config.settings import Settings

PREFIX = "REASONER_"
CLIENT_VARIABLES = ("REASONER_URL", "REASONER_API_KEY")
"""Variables of the commands that talk to a service."""
_SERVICE_LINK = re.compile(r"REASONER(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?)")
"""Variables that Kubernetes sets for services whose names begin with "reasoner"."""


def describe_unknown_variables() -> list[str]:
    """Return a line for each unknown variable, with the known name that it resembles.

    They are named and not refused: the environment is shared with other programs, and a later version may know more.
    """
    known = [*CLIENT_VARIABLES, *(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)]
    named = _read_names()
    lines = []
    for variable in sorted(os.environ):
        name = variable.upper()
        if not name.startswith(PREFIX) or name in known or variable in named or _SERVICE_LINK.fullmatch(name):
            continue
        near = difflib.get_close_matches(name, known, 1, 0.75)
        hint = f"did you mean {near[0]}?" if near else "'reasoner' has no such setting"
        lines.append(f"the environment has {variable}, which is no setting and has no effect: {hint}")
    return lines


def _read_names() -> set[str]:
    """Return the variables that the configuration file names, such as that of an ``api_key_env``."""
    try:
        text = Path(CONFIG_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return set()
    return set(re.findall(rf"{PREFIX}\w+", text))
