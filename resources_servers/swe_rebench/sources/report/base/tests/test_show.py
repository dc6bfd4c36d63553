import contextlib
import io
import unittest

from report.show import show


class ShowTest(unittest.TestCase):
    def test_nothing_to_show_is_fine(self):
        show([])
