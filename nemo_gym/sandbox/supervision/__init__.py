"""What the process supervisor is made of. The standard library only: it runs where nothing else is installed."""
