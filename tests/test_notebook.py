"""The notebooks run from top to bottom on this interpreter, and are kept without outputs that could go stale."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def run(notebook: Any, folder: Path) -> tuple[str, list[bytes]]:
    """What a notebook prints, and its pictures."""
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return "".join(output.get("text", "") for output in outputs), [base64.b64decode(data) for data in pictures]


def test_quickstart_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # its own Ray, even where a cluster runs
    printed, pictures = run(nbformat.read(NOTEBOOKS / "quickstart.ipynb", as_version=4), tmp_path)
    assert "identical to those of the uninterrupted epoch: True" in printed
    assert pictures


def test_episodes_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    printed, pictures = run(nbformat.read(NOTEBOOKS / "episodes.ipynb", as_version=4), tmp_path)
    for line in (
        "camera observation.images.front",
        "frame 0: action_is_pad [False, False, False]",
        "frame 63: action_is_pad [False, True, True]",
        "736 samples, 736 of them different",
        "(8, 5, 3, 72, 96)",
    ):
        assert line in printed
    assert len(pictures) == 3
    assert sum(map(len, pictures)) < 300_000


def test_episodes_runs_where_there_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    notebook = nbformat.read(NOTEBOOKS / "episodes.ipynb", as_version=4)
    notebook.cells = notebook.cells[:4]  # to the dataset: what follows knows it no better
    notebook.cells[3].source = notebook.cells[3].source.replace("shared/data", "absent")
    printed, _ = run(notebook, tmp_path)
    assert "camera observation.images.camera_0" in printed


@pytest.mark.parametrize("notebook", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(notebook: Path) -> None:
    cells = nbformat.read(notebook, as_version=4).cells
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
