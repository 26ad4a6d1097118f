"""What was measured last, into docs/performance.md: tables between its markers, and a plot.

    python benchmarks/report.py

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``, where NAME is a file of benchmarks/results/ without its
extension; ``NAME:sweep`` is its sweep over workers, ``NAME:plot`` a plot. One whose file is not there says so.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import typer
from common import RESULTS, cell, figure_text

DOCS = Path(__file__).resolve().parents[1] / "docs"
OURS = "rfstream-fused"
OURS_OF_RFDETR = "rfdetr-stream"
"""What RF-DETR's own loaders compare with: its augmentation is not that of the other rows."""
BOUND = "in-process"
RATE = "images/s"
Document = dict[str, Any]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(header)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def figures(document: Document) -> str:
    """Setting, and medians with ranges: a row a variant, a column a figure."""
    readings = document["readings"]
    names = list(dict.fromkeys(figure for values in readings.values() for figure in values))
    extra = {name: [] for name in readings}
    head = ["", *names]
    if workers := document.get("workers"):
        head.append("workers")
        extra = {name: [str(workers[name])] for name in readings}
    if OURS in readings and RATE in readings[OURS]:
        head.append(f"`{OURS}` is times as fast (of RF-DETR's rows `{OURS_OF_RFDETR}`)")
        extra = {name: [*extra[name], ratio(readings, name)] for name in readings}
    rows = [
        [f"`{name}`", *(cell(values.get(figure, ())) for figure in names), *extra[name]]
        for name, values in readings.items()
    ]
    repetitions = max(len(column) for values in readings.values() for column in values.values())
    return f"{document['title']}; {repetitions} repetitions.\n\n{table(head, rows)}"


def ratio(readings: dict[str, dict[str, Sequence[float]]], name: str) -> str:
    """How many times as fast as ``name`` the stream was, repetition by repetition: median and range."""
    ours = OURS_OF_RFDETR if name.startswith("rfdetr") else OURS
    pairs = zip(readings[ours][RATE], readings[name][RATE], strict=True)
    return "" if name == ours else cell([mine / theirs for mine, theirs in pairs])


def sweep(document: Document) -> str:
    """Images a second of each peer by its number of workers, one reading each."""
    tried = document["sweep"]
    numbers = list(next(iter(tried.values())))
    rows = [[f"`{name}`", *(figure_text(rates[number]) for number in numbers)] for name, rates in tried.items()]
    return table(["images/s", *(f"{number} workers" for number in numbers)], rows)


def block(name: str) -> str:
    """What stands between the markers of ``name``."""
    file, _, part = name.partition(":")
    path = RESULTS / f"{file}.json"
    if not path.is_file():
        return "Not measured yet."
    document = json.loads(path.read_text())
    if part == "plot":
        return plot(document, f"images/{file}.png")
    if part == "sweep":
        return sweep(document) if document.get("sweep") else "No sweep in the last run."
    return figures(document)


def plot(document: Document, file: str) -> str:
    """Images a second of every loader as bars, with the range of its readings, in ``file``; the link to it."""
    readings = {name: values[RATE] for name, values in document["readings"].items() if name != "ready-batch"}
    names = sorted(readings, key=lambda name: statistics.median(readings[name]))
    middles = [statistics.median(readings[name]) for name in names]
    below = [middle - min(readings[name]) for name, middle in zip(names, middles, strict=True)]
    above = [max(readings[name]) - middle for name, middle in zip(names, middles, strict=True)]
    colours = ["tab:blue" if name.startswith("rfstream") or name == "rfdetr-stream" else "tab:gray" for name in names]
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(names) + 1), layout="constrained")
    axes.barh(names, middles, xerr=[below, above], color=colours)
    axes.set(xlabel="images a second, median and range", title=document["title"].partition(": ")[2])
    axes.axvline(statistics.median(readings[BOUND]), color="black", linestyle=":")
    figure.savefig(DOCS / file, dpi=110)
    plt.close(figure)
    return f"![Images a second of every loader; the dotted line is the bound `{BOUND}`]({file})"


def main() -> None:
    """Write the page's tables and draw the plot."""
    page = DOCS / "performance.md"
    text = re.sub(
        r"<!-- ([\w:]+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- {found[1]} -->\n\n{block(found[1])}\n\n<!-- end -->",
        page.read_text(),
        flags=re.DOTALL,
    )
    page.write_text(text)


if __name__ == "__main__":
    typer.run(main)
