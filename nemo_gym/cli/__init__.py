"""The command `gym`: each command parses its arguments, calls one function of the framework, and renders."""
