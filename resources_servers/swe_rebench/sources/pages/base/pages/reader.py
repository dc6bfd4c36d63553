"""Reads what comes in pages."""

import time

PAUSE = 0.01


def read_all(fetch):
    """Return the entries of all pages; `fetch(number)` returns a page's, from 1 on."""
    found = []
    number = 1
    while True:
        entries = fetch(number)
        if entries is None:
            return found
        found.extend(entries)
        number += 1
        time.sleep(PAUSE)
