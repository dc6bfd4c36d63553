"""Degrees."""


def to_fahrenheit(celsius):
    """Return degrees Celsius in degrees Fahrenheit."""
    return celsius * 9 / 5 + 32


def to_celsius(fahrenheit):
    """Return degrees Fahrenheit in degrees Celsius."""
    return (fahrenheit - 32) * 5 / 9
