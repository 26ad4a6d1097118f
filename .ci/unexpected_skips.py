"""Fail when pytest skipped a test that may not be skipped: `unexpected_skips.py JUNIT_XML ALLOWED`.

ALLOWED holds one shell pattern a line, matched against `module::test`; what follows ` #` is the reason and is required.
The last line printed counts the tests in the form `N passed, N failed, N skipped`.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from fnmatch import fnmatchcase
from pathlib import Path


def allowed_patterns(text: str) -> list[str]:
    """The patterns of an allow-list; every one must give its reason."""
    patterns = []
    for line in text.splitlines():
        pattern, _, reason = line.partition(" #")
        if not line.strip() or line.startswith("#"):
            continue
        if not reason.strip():
            raise SystemExit(f"expected_skips.txt: '{pattern.strip()}' gives no reason after ' #'")
        patterns.append(pattern.strip())
    return patterns


def main(junit: str, allowed: str) -> int:
    """Print each unexpected skip and the counts; 1 if there was an unexpected skip or no test ran."""
    patterns = allowed_patterns(Path(allowed).read_text(encoding="utf-8"))
    passed = failed = skipped = 0
    unexpected = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        elif skip is None:
            passed += 1
        else:
            skipped += 1
            name = f"{case.get('classname')}::{case.get('name')}"
            if not any(fnmatchcase(name, pattern) for pattern in patterns):
                unexpected.append(f"{name}: {skip.get('message')}")
    for line in unexpected:
        print(f"ci: unexpected skip: {line}", file=sys.stderr)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if unexpected or failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
