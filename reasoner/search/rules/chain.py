"""The list of the rules. A new rule is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable

from reasoner.search.rules.constraint import make_constraint_rule
from reasoner.search.rules.continuation import make_continuation_rule
from reasoner.search.rules.limit import make_limit_rule
from reasoner.search.rules.monitor import make_monitor_rule
from reasoner.search.rules.repetition import make_repetition_rule
from reasoner.search.rules.rule import NewBranch, Rule
from reasoner.search.rules.steps import make_step_end_rule
from reasoner.search.rules.thinking import make_thinking_rule
from reasoner.search.rules.tool_call import make_tool_call_rule

RULES: tuple[Callable[[NewBranch], Rule | None], ...] = (
    make_thinking_rule,
    make_tool_call_rule,
    make_step_end_rule,
    make_limit_rule,
    make_repetition_rule,
    make_monitor_rule,
    make_constraint_rule,
    make_continuation_rule,
)
"""Functions that make a branch's rules, in the order in which these are asked; ``None`` where one does not apply."""


def make_rules(new: NewBranch) -> tuple[Rule, ...]:
    """Return the rules of a branch."""
    made = (make(new) for make in RULES)
    return tuple(rule for rule in made if rule is not None)
