"""The load generators: each module is a process of its own, started by the harness and spoken to over its pipes.

They share the machine with the servers they measure, so they do as little as they can per request, and import little.
All of them check what they are answered.
"""
