"""What every server process shares: calls between servers, middleware, the base class, the bootstrap."""
