"""A worker whose process a candidate has spoiled: it writes to the parent's socket by itself."""

from __future__ import annotations

import base64
import os
import sys
import time
from typing import Any


def prepare() -> None:
    """Nothing to import."""


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Write bytes where the answer should be, and hang; or answer."""
    if "bytes" in request:
        os.write(int(sys.argv[1]), base64.b64decode(request["bytes"]))
        time.sleep(600)
    return {}
