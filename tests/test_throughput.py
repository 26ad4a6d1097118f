"""What ``rfstream plan`` predicts of speed: more of anything is never slower, and the bottleneck is what is scarce."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import pack_here
from rich.console import Console

from rfstream.config import Config
from rfstream.plan.throughput import MEASURED, Work, forecast
from rfstream.tools.report import plan_report
from rfstream.tools.scenes import make_scenes

seconds = st.floats(1e-7, 10)
counts = st.integers(1, 10_000)
nbytes = st.integers(1, 10**10)
works = st.builds(Work, seconds, counts, nbytes, nbytes)
bandwidths = st.floats(1, 1e12) | st.just(math.inf)
DECODED = Work(seconds_per_image=0.004, batch_size=16, batch_bytes=16_000_000, encoded_bytes=1_600_000)


@given(works, counts, counts, st.none() | counts, bandwidths)
def test_more_actors_cores_and_bandwidth_are_never_slower(
    work: Work, actors: int, more: int, cores: int | None, read: float
) -> None:
    rate = forecast(work, actors, cores, read).images_per_s
    assert 0 < rate < math.inf
    assert forecast(work, actors + more, cores, read).images_per_s >= rate
    assert forecast(work, actors, cores and cores + more, read).images_per_s >= rate
    assert forecast(work, actors, None, read).images_per_s >= rate
    assert forecast(work, actors, cores, read * 2).images_per_s >= rate


@given(works, counts, st.none() | counts, bandwidths, st.floats(1, 100))
def test_more_work_is_never_faster(work: Work, actors: int, cores: int | None, read: float, times: float) -> None:
    rate = forecast(work, actors, cores, read).images_per_s
    for field in ("seconds_per_image", "batch_bytes", "encoded_bytes"):
        heavier = replace(work, **{field: getattr(work, field) * times})
        assert forecast(heavier, actors, cores, read).images_per_s <= rate


@given(works, counts, st.integers(2, 100))
def test_larger_batches_of_such_images_are_never_slower(work: Work, actors: int, times: int) -> None:
    larger = replace(
        work,
        batch_size=work.batch_size * times,
        batch_bytes=work.batch_bytes * times,
        encoded_bytes=work.encoded_bytes * times,
    )
    assert forecast(larger, actors).images_per_s >= forecast(work, actors).images_per_s * (1 - 1e-9)


@given(works, counts, st.none() | counts, bandwidths)
def test_the_bottleneck_is_the_lowest_rate(work: Work, actors: int, cores: int | None, read: float) -> None:
    found = forecast(work, actors, cores, read)
    assert found.images_per_s == found.by_part[found.bottleneck] == min(found.by_part.values())
    # Decoding alone, and what one execution hands out, are bounds whatever the bottleneck.
    assert found.images_per_s <= actors / work.seconds_per_image
    assert found.images_per_s <= MEASURED.batches_per_s * work.batch_size * (1 + 1e-9)


@pytest.mark.parametrize(
    ("work", "actors", "cores", "read", "bottleneck"),
    [
        (DECODED, 1, None, math.inf, "decoding"),
        (DECODED, 2, 2, math.inf, "cores"),
        (DECODED, 1000, None, math.inf, "hand-off"),
        (replace(DECODED, batch_size=1, batch_bytes=1000), 10, None, math.inf, "hand-off"),
        (replace(DECODED, seconds_per_image=1e-6), 1, None, math.inf, "hand-off in the actors"),
        (DECODED, 8, None, 10e6, "storage"),
    ],
)
def test_the_bottleneck_is_what_is_scarce(
    work: Work, actors: int, cores: int | None, read: float, bottleneck: str
) -> None:
    assert forecast(work, actors, cores, read).bottleneck == bottleneck


def test_the_plan_predicts(tmp_path: Path) -> None:
    make_scenes(tmp_path / "scenes", train=16, val=1, seed=0)
    pack_here(tmp_path / "scenes", tmp_path / "pack", 16)
    config = Config(data={"path": str(tmp_path / "pack")}, stream={"batch_size": 4}, decode={"actors": (1, 1000)})

    def said(**known: float) -> str:
        out = StringIO()
        Console(width=300, file=out).print(plan_report(config, 2, **known))
        return out.getvalue()

    text = said()
    assert "with 1 actor, " in text and "with 1000 actors, a core each; " in text
    assert "hand-off, if" in text.partition("what limits")[2]
    assert "storage, if the ranks together take more than" in said(read_bytes_per_s=1000)
