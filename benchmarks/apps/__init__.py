"""What the framework is compared with."""
