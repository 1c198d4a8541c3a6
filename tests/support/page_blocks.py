"""Code blocks of the pages, and the reasons why some are not run.

A block that cannot be run has an HTML comment on the line before its fence, which no reader sees:
`<!-- not run: REASON -->` or `<!-- run by: tests/FILE.py -->`, where another test runs it."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ("reference_commands.md", "reference_recipe.md")  # from the program, by support/reference_pages.py
OTHER_YAML = {"planning.md": "profile", "evaluation.md": "task"}  # what their YAML is; elsewhere it is a recipe
BLOCK = re.compile(r"^(?:<!-- (not run|run by): (.+?) -->\n\n?)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(gristmill|python|torchrun|make|pip|lm_eval) ")


@dataclass(frozen=True)
class Block:
    """A fenced block. exempt: (kind, reason) of its comment, or None; number: its place on the page, from 0."""

    page: str
    number: int
    language: str
    body: str
    exempt: tuple[str, str] | None

    @property
    def kind(self) -> str:
        """python, shell, recipe, profile, task, page, data, sql, or figure: a drawing or output, which nobody runs."""
        if self.language in ("", "sh", "bash"):
            return "shell" if any(COMMAND.match(line) for line in self.body.splitlines()) else "figure"
        if self.language == "yaml" and self.page in OTHER_YAML:
            return OTHER_YAML[self.page]
        return {"yaml": "recipe", "yml": "data", "toml": "data", "json": "data", "html": "page"}.get(
            self.language, self.language
        )

    @property
    def id(self) -> str:
        return f"{self.page}:{self.number}:{self.kind}"


def page_blocks(page: Path) -> list[Block]:
    """All blocks of a page in their order."""
    return [
        Block(page.name, number, language, body, (kind, reason) if kind else None)
        for number, (kind, reason, language, body) in enumerate(BLOCK.findall(page.read_text("utf-8")))
    ]


def all_blocks() -> list[Block]:
    """Blocks of the pages that people write."""
    return [block for page in PAGES if page.name not in GENERATED for block in page_blocks(page)]


def shell_lines(body: str) -> list[str]:
    """Commands of a block without comments, continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", body).splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]
