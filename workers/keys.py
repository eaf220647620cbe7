"""What keys may do."""

from __future__ import annotations

from typing import Final, Literal

Scope = Literal["jobs:read", "jobs:write", "metrics:read", "admin"]
SCOPES: Final[frozenset[Scope]] = frozenset({"jobs:read", "jobs:write", "metrics:read", "admin"})
"""``admin`` sees the jobs of all owners and manages keys; the other scopes say what may be done."""
