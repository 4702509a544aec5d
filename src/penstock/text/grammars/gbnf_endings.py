"""Which rule of a GBNF grammar has no text of finite length.

A rule ends once its body does: all parts of a sequence, or one option of a choice. Each node counts
the parts that it still needs, so what follows from one ending is looked at once, however long the
rules are and in whatever order they refer to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text.grammars.gbnf import Choice, Node, Reference, Repeat, Sequence


@dataclass(slots=True, eq=False)
class _Goal:
    """A node that ends when `missing` more of its parts do."""

    missing: int
    parent: _Goal | None
    rule: str = ""  # the rule whose body it is, where it has no parent


def endless_rule(rules: dict[str, Node]) -> str | None:
    """The first rule that always needs itself; None when every one has an end."""
    waiting: dict[str, list[_Goal]] = {name: [] for name in rules}  # for the end of each rule
    ended: list[_Goal] = []  # a part of each has ended
    for name, body in rules.items():
        _plan(body, _Goal(1, None, name), waiting, ended)
    while ended:
        goal = ended.pop()
        goal.missing -= 1
        if goal.missing == 0:
            ended += waiting.pop(goal.rule) if goal.parent is None else [goal.parent]
    return next(iter(waiting), None)


def _plan(node: Node, goal: _Goal, waiting: dict[str, list[_Goal]], ended: list[_Goal]) -> None:
    """Goals for the node and all in it; `goal` is what its end counts for."""
    pending = [(node, goal)]
    while pending:
        node, goal = pending.pop()
        match node:
            case Reference(name):
                waiting[name].append(goal)
            case Sequence(items) if items:
                parts = _Goal(len(items), goal)
                pending += [(item, parts) for item in items]
            case Choice(options):
                either = _Goal(1, goal)
                pending += [(option, either) for option in options]
            case Repeat(item, least) if least > 0:
                pending.append((item, goal))
            case _:
                ended.append(goal)
