"""Files that are there as they were before, or whole: never in part."""

import os
from pathlib import Path


def put(path: Path, content: str | bytes) -> None:
    """Has `content` in the file at `path`; two processes that put at once leave the content of one of them."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(unfinished, path)
