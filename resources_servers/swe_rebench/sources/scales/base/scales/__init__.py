"""Conversions between scales."""

from scales.temprature import to_celsius, to_fahrenheit

__all__ = ["to_celsius", "to_fahrenheit"]
