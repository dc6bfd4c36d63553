import unittest

from tally import total


class TotalTest(unittest.TestCase):
    def test_a_range_that_ends_before_it_begins_is_empty(self):
        self.assertEqual(total(3, 1), 0)
