import unittest

import scales


class TemperatureTest(unittest.TestCase):
    def test_water_boils_at_212(self):
        self.assertEqual(scales.to_fahrenheit(100), 212)
