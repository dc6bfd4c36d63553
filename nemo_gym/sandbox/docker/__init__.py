"""What the docker provider is made of: the Engine API's client, commands, archives, one sandbox, its owner."""
