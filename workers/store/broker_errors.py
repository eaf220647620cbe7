"""Errors of a broker that cannot do its work, with the reason in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from redis import exceptions

BROKER_DOWN: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.InvalidResponse)
"""Exceptions of a store while the broker cannot be reached, or refuses what it usually does (``BrokerRefused``)."""
WRITE_PROBE: Final = ("SET", "reasoner:probe", "1", "EX", "60")
"""A command that succeeds if the broker can work: one that is full, or a replica, still answers PING."""

_LOGIN_REFUSED = "the broker refuses the login of REASONER_REDIS_URL"
_IS_CLUSTER = "the broker is a cluster, which is not supported: give the URL of a single primary"
_CHANGED_ROLE = "the broker cannot write: it has just become a replica"
_UNKNOWN_COMMAND = "the broker does not know a command that is needed: use Redis 6.2 or newer, or Valkey"
_NO_SUCH_DATABASE = "the broker has no database of the number in REASONER_REDIS_URL"
_REASONS: Final = {
    "OOM": "the broker cannot write: its memory is full (maxmemory)",
    "MISCONF": "the broker cannot write: saving to its disk fails (see its log)",
    "READONLY": "the broker cannot write: it is a read-only replica",
    "NOREPLICAS": "the broker cannot write: too few of its replicas are connected",
    "MASTERDOWN": "the broker cannot answer: it is a replica that has lost its primary",
    "CLUSTERDOWN": "the broker cannot answer: its cluster is down",
    "LOADING": "the broker cannot answer: it is loading its data",
    "BUSY": "the broker cannot answer: it is busy with a script",
    "UNKILLABLE": "the broker cannot answer: it is busy with a script",
    "UNBLOCKED": _CHANGED_ROLE,
    "REDIRECT": _CHANGED_ROLE,
    "NOAUTH": _LOGIN_REFUSED,
    "WRONGPASS": _LOGIN_REFUSED,
    "NOPERM": "the broker denies its user a command or key that is needed: see its ACL LOG",
    "DENIED": "the broker answers its own machine alone (protected mode): give it a password",
    "MOVED": _IS_CLUSTER,
    "ASK": _IS_CLUSTER,
    "TRYAGAIN": _IS_CLUSTER,
    "CROSSSLOT": _IS_CLUSTER,
}
"""Reason by the code of an error."""
_TEXTS: Final = {
    "invalid password": _LOGIN_REFUSED,
    "without any password configured": _LOGIN_REFUSED,
    "no password is set": _LOGIN_REFUSED,
    "for 'auth' command": _LOGIN_REFUSED,
    "max number of clients": "the broker cannot answer: it has too many connections",
    "db index": _NO_SUCH_DATABASE,
    "unknown command": _UNKNOWN_COMMAND,
}
"""Reason by a part of the message (in small letters) of an error without a code."""
_DISK_FULL = "the broker cannot write: disk full"
_CODE = re.compile(r"(?:^|: -)([A-Z]{3,}) ")
"""The code of an error; before version 7, Redis puts that of a script's command into the message."""


class BrokerRefused(exceptions.ConnectionError):
    """The broker answers that it cannot do its work. The message says why, without a part of the answer."""


def find_refusal(error: exceptions.RedisError) -> BrokerRefused | None:
    """Return the exception for an error that the state of the broker explains; ``None`` for any other."""
    text = str(error)
    codes = [error.status_code, *_CODE.findall(text)]
    if "MISCONF" in codes and "No space left" in text:
        return BrokerRefused(_DISK_FULL)
    reasons = [_REASONS[code] for code in codes if code in _REASONS]
    reasons += [reason for part, reason in _TEXTS.items() if part in text.lower()]
    return BrokerRefused(reasons[0]) if reasons else None


def describe_outage(error: Exception) -> str:
    """Return why the broker cannot be used, for one of ``BROKER_DOWN``."""
    refusal = error if isinstance(error, BrokerRefused) else error.__context__  # wrapped while connecting
    match error:
        case _ if isinstance(refusal, BrokerRefused):
            return str(refusal)
        case exceptions.TimeoutError():
            return "the job store cannot be reached (its broker does not answer in time)"
        case exceptions.InvalidResponse():
            return "what answers at the broker's address does not speak the protocol of Redis"
        case _ if "certificate verify failed" in str(error).lower():
            return f"the broker's certificate is refused: {_read_verify_message(str(error))}"
        case _:
            return "the job store cannot be reached (its broker does not answer)"


def _read_verify_message(text: str) -> str:
    return text.partition("certificate verify failed: ")[2].rpartition(" (_ssl.c")[0] or "it cannot be verified"


def read_eviction_policy(memory: Mapping[str, Any]) -> str | None:
    """Return ``maxmemory-policy`` from the answer to ``INFO memory``."""
    policy = memory.get("maxmemory_policy")
    return None if policy is None else str(policy)


def describe_eviction(policy: str | None) -> str | None:
    """Return the warning about a broker that deletes what it should keep; ``None`` for ``noeviction``."""
    if policy is None or policy == "noeviction":
        return None
    return f"the broker may delete jobs when its memory is full (maxmemory-policy {policy}): set noeviction"
