"""The checks of this repository; the report is JUnit's."""

import sys
from xml.sax.saxutils import escape, quoteattr

import palette

CHECKS = {
    "there are three colours": lambda: len(palette.colours()) == 3,
}

failed = 0
print('<?xml version="1.0" encoding="utf-8"?>')
print('<testsuites><testsuite name="palette">')
for name, check in CHECKS.items():
    print(f'<testcase classname="palette" name={quoteattr(name)} time="0.001">')
    if not check():
        failed = 1
        print(f'<failure message="is wrong">{escape(str(palette.colours()))}</failure>')
    print("</testcase>")
print("</testsuite></testsuites>")
sys.exit(failed)
