"""A check's report for the terminal and as one HTML file."""

from __future__ import annotations

from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rfstream.tools.check import Part, Report
from rfstream.tools.check_traits import Trait

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}
_HEADINGS = ("", "trait", "count", "what packing and training do", "where")
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .4rem .7rem; border-top: 1px solid #ddd; }
td:nth-child(3) { text-align: right; }
li, h2 { overflow-wrap: anywhere; }
ul { margin: 0; padding-left: 1rem; font-size: .9em; }
.error { color: #b00020; font-weight: 600; } .warning { color: #8a5a00; font-weight: 600; } .note { color: #2a5f8f; }
"""


def print_report(report: Report, console: Console) -> None:
    """Print a table for each part that has traits, and the summary."""
    for part in report.parts:
        if part.traits:
            console.print(_table(part))
    console.print(Text(report.summary()))


def html_report(report: Report) -> str:
    """The report as a document that needs no other file; whatever a dataset says is escaped."""
    parts = "\n".join(_section(part) for part in report.parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{escape(report.path)}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{escape(report.path)}</h1>\n<p>{escape(report.summary())}</p>\n{parts}\n</html>\n"
    )


def _table(part: Part) -> Table:
    # Text, not str: a file name must not be taken for markup.
    table = Table(*_HEADINGS, title=Text(f"{part.name} ({part.images:,} images)"), title_justify="left")
    for trait in part.traits:
        colour = _COLOURS[trait.severity]
        cells = (trait.name, f"{trait.count:,}", trait.effect, "\n".join(trait.examples))
        table.add_row(Text(trait.severity, style=colour), *map(Text, cells))
    return table


def _section(part: Part) -> str:
    title = f"<h2>{escape(part.name)}</h2>\n<p>{part.images:,} images</p>"
    if not part.traits:
        return f"{title}\n<p>Nothing is odd.</p>"
    headings = "".join(f"<th>{heading}</th>" for heading in _HEADINGS)
    rows = "\n".join(_row(trait) for trait in part.traits)
    return f"{title}\n<table>\n<tr>{headings}</tr>\n{rows}\n</table>"


def _row(trait: Trait) -> str:
    places = "".join(f"<li>{escape(example)}</li>" for example in trait.examples)
    return (
        f'<tr><td class="{trait.severity}">{trait.severity}</td><td>{trait.name}</td><td>{trait.count:,}</td>'
        f"<td>{escape(trait.effect)}</td><td><ul>{places}</ul></td></tr>"
    )
