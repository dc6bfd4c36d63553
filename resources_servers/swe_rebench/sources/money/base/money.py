"""Amounts of money."""


def cents(amount):
    """Return an amount in cents; half a cent counts as one."""
    return int(amount * 100)
