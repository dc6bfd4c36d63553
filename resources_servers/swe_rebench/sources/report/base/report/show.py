"""Shows lines to a person."""


def show(lines, quiet=False):
    """Print the lines, unless it should be quiet."""
    for line in lines:
        if quiet:
            print(line)
