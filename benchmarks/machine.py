"""What a figure was measured on, in one line."""

import platform
from pathlib import Path

import torch
import transformers


def machine() -> str:
    """Processor, threads and versions, for the head of a table."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []  # Linux has it
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = f"{names[0]}, {len(names)} logical CPUs" if names else platform.processor() or platform.machine()
    return (
        f"{processor}; {torch.get_num_threads()} thread(s); Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
