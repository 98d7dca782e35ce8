"""Prints the table of docs/loops.md. Run: PYTHONPATH=tests:tests/cases python -m user_loops"""

from __future__ import annotations

from .table import as_markdown

print(as_markdown())
