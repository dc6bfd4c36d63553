"""Titles."""


def title_case(text):
    """Return the text with each word's first letter in upper case."""
    return " ".join(word[:1].upper() + word[1:] for word in text.split())
