import unittest

from pages.reader import read_all


class ReadAllTest(unittest.TestCase):
    def test_all_pages_are_read(self):
        pages = {1: ["a", "b"], 2: ["c"]}
        self.assertEqual(read_all(pages.get), ["a", "b", "c"])
