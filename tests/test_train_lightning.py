"""Which Lightning is used, where both are installed and where one is."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from rfstream.train.lightning import pl, ray_lightning


def run(code: str, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    lead = f"import sys; sys.path[:0] = {[str(p) for p in first_on_path]}\n"
    return subprocess.run(
        [sys.executable, "-c", lead + textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )


def both_installed(folder: Path) -> Path:
    """A stand-in for the package ``lightning``: the same classes as ``pytorch_lightning``, but not the same objects."""
    package = folder / "lightning"
    (package / "pytorch" / "plugins").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text(
        "import types\n"
        "import pytorch_lightning as real\n"
        "from pytorch_lightning import callbacks, Trainer, __version__\n"
        "class DDPStrategy(real.strategies.DDPStrategy): pass\n"
        "strategies = types.SimpleNamespace(**{**vars(real.strategies), 'DDPStrategy': DDPStrategy})\n"
    )
    (package / "pytorch" / "plugins" / "__init__.py").write_text("")
    (package / "pytorch" / "plugins" / "environments.py").write_text(
        "from pytorch_lightning.plugins.environments import LightningEnvironment as Base\n"
        "class LightningEnvironment(Base): pass\n"
    )
    return folder


def test_ray_s_classes_are_ours() -> None:
    ours = ray_lightning()
    assert issubclass(ours.RayDDPStrategy, pl.strategies.DDPStrategy)
    assert issubclass(ours.RayLightningEnvironment, pl.plugins.environments.LightningEnvironment)
    assert issubclass(ours.RayTrainReportCallback, pl.Callback)
    assert ray_lightning() is ours


def test_where_both_are_installed_ray_takes_the_other_and_we_do_not(tmp_path: Path) -> None:
    done = run(
        """
        import sys
        from rfstream.train.lightning import pl, ray_lightning

        def are_ours(classes):
            assert pl.__name__ == "pytorch_lightning" and classes._lightning_utils.pl is pl
            assert classes.RayDDPStrategy.__mro__[1] is pl.strategies.DDPStrategy
            assert classes.RayLightningEnvironment.__mro__[1] is pl.plugins.environments.LightningEnvironment

        def forget():
            for name in [name for name in sys.modules if name.startswith(("lightning", "ray.train.lightning"))]:
                del sys.modules[name]
            ray_lightning.cache_clear()

        are_ours(ray_lightning())
        import lightning.pytorch  # importable again
        assert lightning.pytorch.strategies.DDPStrategy is not pl.strategies.DDPStrategy

        forget()
        import lightning.pytorch, ray.train.lightning as theirs
        ours = ray_lightning()
        are_ours(ours)
        assert ours is not theirs
        assert sys.modules["lightning.pytorch"] is lightning.pytorch and sys.modules["ray.train.lightning"] is theirs
        assert issubclass(theirs.RayDDPStrategy, lightning.pytorch.strategies.DDPStrategy)
        """,
        both_installed(tmp_path),
    )
    assert done.returncode == 0, done.stderr
