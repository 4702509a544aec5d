"""Forms of answers that crash, stall or outgrow what compiles them, for every field that takes one.

Each function makes the fields of a request from one number, which says how large it is. Whether it
is kept or refused is not said here: only that nobody else may notice.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

Fields = dict[str, Any]


def json_schema(schema: Any) -> Fields:
    """OpenAI's wrapping of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def of_schema(schema: Any) -> Fields:
    """A chat's fields with this schema."""
    return {"response_format": json_schema(schema)}


# --- schemas -------------------------------------------------------------------------------------


def chained_references(count: int) -> Fields:
    """Each definition refers to the next."""
    links = {
        f"a{n}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{n + 1}"}}}
        for n in range(count)
    }
    return of_schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "string"}}})


def circular_references(count: int) -> Fields:
    """A ring without any type, and a tree whose every branch is the whole."""
    ring = {f"a{n}": {"$ref": f"#/$defs/a{(n + 1) % count}"} for n in range(count)}
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}] * min(count, 50)}}
    schema = {"anyOf": [{"$ref": "#/$defs/a0"}, {"$ref": "#/$defs/tree"}, {"$ref": "#"}]}
    return of_schema({**schema, "$defs": {**ring, "tree": tree}})


def foreign_references(count: int) -> Fields:
    """What must never be fetched."""
    names = ("http://127.0.0.1:9/x", "file:///etc/passwd", "#/$defs/none", "../..", "a" * count)
    return of_schema({"allOf": [{"$ref": name} for name in names]})


def pattern_properties(count: int) -> Fields:
    """Every pair of patterns is compared."""
    patterns = {f"^p{n:04d}x[a-z]*$": {"type": "integer"} for n in range(count)}
    return of_schema({"type": "object", "patternProperties": patterns})


def heavy_patterns(count: int) -> Fields:
    """A few patterns, each of them an automaton of many states."""
    patterns = {f".*{n}.{{{count % 60}}}$": {"pattern": f"(x+x+)+{n}"} for n in range(5)}
    text = {"type": "string", "pattern": f"^(a?){{{count}}}a{{{count}}}$", "format": "email"}
    return of_schema({"type": "object", "properties": {"a": text}, "patternProperties": patterns})


def crossed(count: int) -> Fields:
    """Every combination of alternatives becomes a rule: a few hundred bytes, tens of MiB."""
    parts = [
        {"anyOf": [{"properties": {f"a{n}": {"const": m}}} for m in range(3)]} for n in range(count)
    ]
    return of_schema({"allOf": parts})


def doubled(count: int) -> Fields:
    """Each definition uses the next one twice, in an alternative: two to the power of many."""
    links = {
        f"a{n}": {"oneOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"not": {"$ref": f"#/$defs/a{n + 1}"}}]}
        for n in range(count)
    }
    return of_schema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "null"}}})


def many_properties(count: int, salt: int = 0) -> Fields:
    """An honest schema, only large."""
    names = [f"property_{salt}_{n}" for n in range(count)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "maxLength": 40} for name in names},
        "required": names[::2],
        "additionalProperties": False,
    }
    return of_schema(schema)


def nested_arrays(depth: int) -> Fields:
    """Lists of lists."""
    schema: Fields = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return of_schema(schema)


def nested_choices(depth: int) -> Fields:
    """Alternatives of alternatives."""
    schema: Fields = {"type": "string"}
    for n in range(depth):
        schema = {("anyOf", "allOf", "oneOf")[n % 3]: [schema, {"maxLength": n}]}
    return of_schema(schema)


def huge_enum(count: int) -> Fields:
    """So many values."""
    return of_schema({"enum": [f"{n * 7919 % 104729} of {count}" for n in range(count)]})


def huge_bounds(count: int) -> Fields:
    """Numbers that are small to write and large to keep."""
    power = 10 ** (count % 400)
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "minItems": count, "maxItems": power, "items": {}},
            "b": {"type": "string", "minLength": count, "maxLength": power},
            "c": {"type": "integer", "minimum": -power, "maximum": power, "multipleOf": 7},
            "d": {"type": "number", "multipleOf": 1e-300},
        },
        "minProperties": count,
    }
    return of_schema(schema)


def few_keywords(count: int) -> Fields:
    """Keywords that schemas rarely have."""
    branch = {"properties": {f"p{n}": {"type": "string"} for n in range(count % 500)}}
    schema = {
        "if": branch,
        "then": {"not": branch},
        "else": {"unevaluatedProperties": branch},
        "dependentSchemas": {"a": branch},
        "propertyNames": {"pattern": f".{{{count}}}"},
        "contains": branch,
        "prefixItems": [branch] * 5,
    }
    return of_schema(schema)


def anything_everywhere(count: int) -> Fields:
    """Many places that allow any JSON, in three bytes each."""
    return of_schema({"type": "array", "prefixItems": [{}] * count})


def definitions_of_no_kind(count: int) -> Fields:
    """The same, with no place where a definition of ours could stand."""
    return of_schema({"prefixItems": [{}] * count, "$defs": []})


def nested_identities(count: int) -> Fields:
    """The same, where references would be looked up elsewhere."""
    properties = {"a": {"$id": "http://127.0.0.1:9/a", "type": "string"}}
    return of_schema({"properties": properties, "prefixItems": [{}] * count})


# --- expressions and grammars --------------------------------------------------------------------


def repetition(count: int) -> Fields:
    """Counted, twice."""
    return {"guided_regex": f"((a|b){{0,{count}}}c){{0,{count}}}"}


def nested_quantifiers(depth: int) -> Fields:
    """Stars of stars."""
    depth %= 20_000
    return {"guided_regex": "(" * depth + "a*b?" + ")*" * depth}


def exploding_regex(count: int) -> Fields:
    """As many states as two to the power of `count`."""
    return {"guided_regex": f".*a.{{{count}}}b.*|.*b.{{{count}}}a.*"}


def intersections(count: int) -> Fields:
    """Alternatives with all letters of all scripts, whatever their case."""
    part = rf"(?i)[\p{{L}}\p{{N}}]{{3,{count % 1000 + 3}}}"
    return {"guided_regex": "|".join(f"{part}{n}" for n in range(min(count, 300)))}


def chained_rules(count: int) -> Fields:
    """Each rule is the next one."""
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(count))
    return {"guided_grammar": f'start: r0\n{rules}\nr{count}: "x"\n'}


def ambiguous(_: int) -> Fields:
    """The parser keeps every reading."""
    return {"guided_grammar": 'start: s\ns: s s s | s s | "a"\n'}


def left_recursion(count: int) -> Fields:
    """Each rule begins with itself."""
    rules = "\n".join(f'r{n}: r{n} r{(n + 1) % count} | "a"' for n in range(count))
    return {"guided_grammar": f"start: r0\n{rules}\n"}


def nothing_at_all(count: int) -> Fields:
    """Rules that match the empty text in many ways."""
    rules = "\n".join(
        f'r{n}: r{(n + 1) % count}? r{(n * 7 + 3) % count}* | ""' for n in range(count)
    )
    return {"guided_grammar": f"start: r0\n{rules}\n"}


def lark_inside(count: int) -> Fields:
    """Schemas and expressions inside a grammar."""
    inner = json.dumps({"type": "array", "items": {"enum": list(range(count % 2000))}})
    rules = "\n".join(f"r{n}: %json {inner}\nT{n}: /(a*)*{n}/" for n in range(min(count, 20)))
    return {"guided_grammar": f"start: r0 T0{{1,{count}}}\n{rules}\n%ignore /[ ]+/\n"}


def gbnf_recursion(count: int) -> Fields:
    """GBNF whose rules begin with each other."""
    rules = "\n".join(f'r{n} ::= r{(n + 1) % count} "a" | r{n} | "b"' for n in range(count))
    return {"grammar": f"root ::= r0\n{rules}\n"}


def gbnf_repetition(count: int) -> Fields:
    """GBNF's counts, one in the other."""
    return {"grammar": f"root ::= ((([a-z]{{{count}}}){{{count}}})? [^\\x00-\\U0010FFFF]*){{9,}}\n"}


def gbnf_depth(count: int) -> Fields:
    """Parentheses."""
    return {"grammar": "root ::= " + "(" * count + '"a"' + ")" * count + "\n"}


def gbnf_rules(count: int) -> Fields:
    """One rule after another."""
    return {
        "grammar": "root ::= r0\n" + "".join(f'r{n} ::= "{n}" r{n + 1}\n' for n in range(count))
    }


def gbnf_blanks(count: int) -> Fields:
    """Blanks, and no repetition after all."""
    return {"grammar": "root ::= a{" + " " * count + '\na ::= "a"\n'}


def gbnf_backwards(count: int) -> Fields:
    """A long rule that needs all others, which become known from the last to the first."""
    others = [f"r{n}::=a r{n + 1}\n" for n in range(count)]
    names = "z " * (60 * count) + " ".join(f"r{n}" for n in range(count, -1, -1))
    return {"grammar": f"root::={names}\nz::=a\n{''.join(others)}r{count}::=a\na::=.\n"}


def choices(count: int) -> Fields:
    """Long texts that differ at their ends."""
    return {"guided_choice": ["a" * (count % 3000) + str(n) for n in range(min(count, 1024))]}


# --- tools ---------------------------------------------------------------------------------------


def _tool(name: str, parameters: Any, **more: Any) -> Fields:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def _schema(fields: Fields) -> Any:
    return fields["response_format"]["json_schema"]["schema"]


def many_tools(count: int) -> Fields:
    """So many, one of which must be called."""
    tools = [_tool(f"tool_{n}", _schema(many_properties(3, n))) for n in range(count)]
    return {"tools": tools, "tool_choice": "required"}


def many_bad_tools(count: int) -> Fields:
    """Each of them is found to be bad by itself."""
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [_tool(f"t{n}", {**bad, "title": str(n)}) for n in range(count)]
    return {"tools": tools, "tool_choice": "required"}


def giant_tool(count: int) -> Fields:
    """One with a schema that no answer could have."""
    parameters = _schema(pattern_properties(count))
    named = {"type": "function", "function": {"name": "giant"}}
    return {"tools": [_tool("giant", parameters, strict=True)], "tool_choice": named}


def allowed_tools(count: int) -> Fields:
    """Many of which many are allowed, some more than once."""
    tools = many_tools(count)["tools"]
    names = [{"type": "function", "function": {"name": f"tool_{n % count}"}} for n in range(999)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": names}}
    return {"tools": tools, "tool_choice": choice}


# Each with the largest number that is worth trying.
GRAMMARS: dict[Callable[[int], Fields], int] = {
    chained_references: 1500,
    circular_references: 1000,
    foreign_references: 10_000,
    pattern_properties: 700,
    heavy_patterns: 2000,
    crossed: 9,
    doubled: 60,
    many_properties: 2500,
    nested_arrays: 120,
    nested_choices: 60,
    huge_enum: 6000,
    huge_bounds: 10**7,
    few_keywords: 10**5,
    anything_everywhere: 60_000,
    definitions_of_no_kind: 60_000,
    nested_identities: 60_000,
    repetition: 10**5,
    nested_quantifiers: 20_000,
    exploding_regex: 60,
    intersections: 1000,
    chained_rules: 5000,
    ambiguous: 1,
    left_recursion: 800,
    nothing_at_all: 500,
    lark_inside: 10**5,
    gbnf_recursion: 2000,
    gbnf_repetition: 10**5,
    gbnf_depth: 50_000,
    gbnf_rules: 5000,
    gbnf_blanks: 200_000,
    gbnf_backwards: 1400,
    choices: 3000,
    many_tools: 1000,
    many_bad_tools: 300,
    giant_tool: 700,
    allowed_tools: 100,
}


def any_grammar(random: Random) -> Fields:
    """One of them, of any size."""
    make = random.choice(list(GRAMMARS))
    return make(random.randint(1, GRAMMARS[make]))
