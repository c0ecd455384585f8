"""Pages of the site that do not lie in docs/: a hook of MkDocs, named in mkdocs.yml.

CONTRIBUTING.md, CHANGELOG.md, CITATION.cff and model_cards/ lie beside docs/. The page of the commands has the help of
their parsers, the page of recipes has a shipped recipe with its comments.
"""

import contextlib
import importlib
import io
import pathlib
import re
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import whatwhere_cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
ANALYSES = ("frequencies", "deltas", "maps")
BESIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and the files beside them."""
    for path in (*map(ROOT.joinpath, BESIDE), *sorted((ROOT / "model_cards").rglob("*"))):
        if path.is_file():
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "reference/commands.md", content=commands()))
    files.append(File.generated(config, "reference/recipes.md", content=recipes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Gives links that lead out of docs/ the place of their target in the site."""
    if page.file.src_uri in BESIDE:
        return re.sub(r"\]\(docs/", "](", markdown)
    return re.sub(r"\]\(\.\./(?=model_cards/|CONTRIBUTING|CHANGELOG|CITATION)", "](", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Gives links of notebooks to other pages their place in the site, as MkDocs does only in Markdown files."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def in_site(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1])
        if target is None:
            raise PluginError(f"{page.file.src_uri} has a link to {match[1]!r}, which is not a page.")
        return f'href="{target.url_relative_to(page.file)}'

    return re.sub(r'href="([^":#]+\.(?:md|ipynb))', in_site, html)


def commands() -> str:
    """Returns the page of the commands, with the help of each parser."""
    lines = ["# Commands", "", "```text", whatwhere_cli.help_text(), "```"]
    for _, name, _, _, module in whatwhere_cli.COMMANDS:
        lines += ["", f"## {name}"]
        main = importlib.import_module(f"whatwhere.scripts.{module}").main
        for kind in ([], *([one] for one in ANALYSES if name == "analysis")):
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
                main([*kind, "--help"])
            lines += ["", "```text", text.getvalue().rstrip(), "```"]
    return "\n".join(lines)


def recipes() -> str:
    """Returns the page of recipes."""
    folder = ROOT / "scripts" / "recipes"
    names = ", ".join(f"`{path.stem}`" for path in sorted(folder.glob("*.yaml")))
    text = (folder / "demo_rope.yaml").read_text(encoding="utf-8")
    lines = ["# Recipes", "", f"The shipped recipes: {names}.", "", "`demo_rope`, with a comment on every key:", ""]
    return "\n".join([*lines, "```yaml", text.rstrip(), "```"])
