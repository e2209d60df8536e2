"""Programs that show attention in use, each with one command: `make example-<name>`."""
