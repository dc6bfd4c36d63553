"""What is on the shelves."""


def count(deliveries):
    """Return how much there is of each thing, from pairs of a name and an amount."""
    amounts = {}
    for name, amount in deliveries:
        amounts[name] = amounts.get(name, 1) + amount
    return amounts


def place(name, shelf, shelves={}):
    """Put a thing on a shelf and return all shelves."""
    shelves.setdefault(shelf, []).append(name)
    return shelves
