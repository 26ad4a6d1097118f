"""Pack a dataset as a Ray job: ``ray job submit -- python pipelines/pack.py SOURCE OUTPUT [options]``.

The options are those of ``rfstream pack``. Source and output are folders that every node of the cluster sees.
"""

from __future__ import annotations

import sys

import typer

from rfstream import RFStreamError
from rfstream.dataset.pack import pack

if __name__ == "__main__":
    try:
        typer.run(pack)
    except RFStreamError as error:
        sys.exit(str(error))
