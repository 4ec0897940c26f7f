"""Log lines that a program can read: ``oscar: event=NAME key=value ...``."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

_PAIR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
_PLAIN = re.compile(r"[\w./:+-]+")


def _value(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def log_event(logger: logging.Logger, name: str, **fields: Any) -> None:
    """Strings with spaces or quotes are written as JSON strings."""
    pairs = " ".join(f"{k}={_value(v)}" for k, v in {"event": name, **fields}.items())
    logger.info("oscar: %s", pairs)


def read_events(log: str) -> list[dict[str, str]]:
    """All such lines of a log, as dictionaries of strings."""
    lines = (line.partition("oscar: event=")[2] for line in log.splitlines())
    return [
        {k: json.loads(v) if v[0] == '"' else v for k, v in _PAIR.findall("event=" + line)}
        for line in lines
        if line
    ]
