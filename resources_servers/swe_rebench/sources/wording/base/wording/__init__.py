"""Small helpers for titles."""

from wording.titles import title_case

__all__ = ["title_case"]
