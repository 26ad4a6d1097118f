"""What the documents say of the code is so: configuration keys and defaults, commands, files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from rfstream.cli import app
from rfstream.config import Config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def readme_table() -> dict[str, str]:
    """Configuration key -> default, as README's table has them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"(?m)^\| `(\w+\.\w+)` \| (.+?) \|", text))


def test_readme_lists_every_configuration_key() -> None:
    keys = {
        f"{section}.{name}"
        for section, field in Config.model_fields.items()
        for name in field.annotation.model_fields  # type: ignore[union-attr]
    }
    assert set(readme_table()) == keys


@pytest.mark.parametrize(("key", "default"), readme_table().items())
def test_readme_gives_the_default(key: str, default: str) -> None:
    section, name = key.split(".")
    if default == "required":
        assert Config.model_fields[section].annotation.model_fields[name].is_required()  # type: ignore[union-attr]
        return
    data = {"data": {"path": "pack"}}
    said = {**data, section: {**data.get(section, {}), name: yaml.safe_load(default.strip("`"))}}
    assert Config(**said) == Config(**data)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link}
    assert not {link for link in links if not (page.parent / link).exists()}
    named = set(re.findall(r"(?:pipelines|configs|tests|notebooks|benchmarks)/[\w./-]*\w\.\w+", text))
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    said = set(re.findall(r"`rfstream (\w+)|^    rfstream (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert {a or b for a, b in said} <= commands


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    named = re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text(encoding="utf-8"))
    assert not [name for file, name in named if f"\ndef {name}(" not in (ROOT / file).read_text(encoding="utf-8")]
