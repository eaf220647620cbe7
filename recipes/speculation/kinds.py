"""The kinds of heads that can be trained."""

from __future__ import annotations

from recipes.speculation.eagle3 import Eagle3
from recipes.speculation.heads import Eagle, Medusa

Head = Medusa | Eagle | Eagle3
HEADS: dict[str, type[Medusa] | type[Eagle] | type[Eagle3]] = {"medusa": Medusa, "eagle": Eagle, "eagle3": Eagle3}
