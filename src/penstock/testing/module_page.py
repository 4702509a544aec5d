"""docs/modules.md: one line for every module, from the first lines of their docstrings.

`python -m penstock.testing.module_page` writes the page; a test compares it.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
PAGE = SOURCE.parents[1] / "docs" / "modules.md"
_HEAD = """# Modules

What each module owns, by package; [architecture.md](architecture.md) says how they work together.
Written by `python -m penstock.testing.module_page` from the modules' own docstrings.
"""


def render() -> str:
    """The page as it should be."""
    lines = [_HEAD]
    folders = sorted({file.parent for file in SOURCE.rglob("*.py")})
    for folder in folders:
        files = [file for file in sorted(folder.glob("*.py")) if _summary(file)]
        if files:
            lines.append(f"## {'.'.join(folder.relative_to(SOURCE.parent).parts)}\n")
            lines.append("| module | what it owns |\n|---|---|")
            lines += [f"| `{_name(file)}` | {_summary(file)} |" for file in files]
            lines.append("")
    return "\n".join(lines)


def _name(file: Path) -> str:
    return "(the package)" if file.name == "__init__.py" else file.stem


def _summary(file: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    first = text.partition("\n\n")[0].replace("\n", " ")
    sentence, dot, _ = first.partition(". ")
    return (sentence + dot.strip()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
