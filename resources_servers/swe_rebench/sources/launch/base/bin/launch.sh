#!/bin/sh
# Prints the command that starts the service.
port=${1:-808}
echo "serve --port $port"
