"""Programs that show attention at work, each with one command: `make example-<name>`."""
